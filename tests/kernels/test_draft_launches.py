"""What drafts launch on a GPU while an engine serves is what `mooncake compile` has compiled, by
the command's own choice of steps. No kernel runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from mooncake.base import Role
from mooncake.cli.models import compile as command
from mooncake.engine.config import EAGLE3, MTP
from mooncake.launch.config.plan import make_plan
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.compiling import META, model_without_numbers
from mooncake.model.copies import HostCopies
from mooncake.model.device.graphs import EagerSteps
from mooncake.model.drafts.layers import draft_layer
from mooncake.model.drafts.model_drafts import DraftLayer
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.running.computed_step import capture_steps, captured_sizes
from tests.support.kernels.launch_notes import Launch, noted_launches, variants
from tests.support.model.eagle3_heads import (
    config_of,
    mla_config_of,
    random_tensors,
    write_head,
)
from tests.support.model.tiny_models import slot

MLA = "eagle3 with MLA"
SETTINGS = {"max_model_len": "4096", "max_num_seqs": "16", "max_num_batched_tokens": "2048"}
ROWS = [
    [(1, 0)], [(2, 9)], [(3, 700)], [(1, 4000)] * 3, [(2, 50)] * 16, [(17, 0)], [(33, 60), (2, 9)],
    [(100, 0)], [(208, 99)], [(400, 1000)], [(512, 3000)], [(300, 0), (500, 7), (77, 2000)],
    [(120, 300)] * 16,
]  # fmt: skip
"""(rows, rows before them) of each sequence of a call of the layer."""


class Sent(HostCopies):
    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(META)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nano") / "nano"
    return init_checkpoint("k2-nano", 0, folder, overrides={"num_nextn_predict_layers": 1})


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("method", [MTP, EAGLE3, MLA])
def test_drafts_launch_what_was_compiled_ahead(
    model: Path, tmp_path: Path, method: str, ranks: int, graphs: bool
) -> None:
    asked: dict[str, object] = {"method": MTP, "num_speculative_tokens": 3}
    spec = Checkpoint.open(model).spec
    if method != MTP:
        config = (config_of if method == EAGLE3 else mla_config_of)(spec)
        head = write_head(tmp_path / "head", config, random_tensors(config, spec))
        asked |= {"method": EAGLE3, "model": str(head)}
    file = tmp_path / "serve.yaml"
    file.write_text(f"enforce-eager: {json.dumps(not graphs)}\n")
    given: dict[str, object] = {"model": str(model), "gpu": "h200", "output": str(tmp_path)}
    given |= SETTINGS | {"tensor_parallel_size": str(ranks)}
    read = command.read(given | {"speculative_config": json.dumps(asked)}, str(file), {}).serve
    assert read is not None
    plan = make_plan(read, 1)
    with noted_launches() as known:
        command._launch_all(plan, read)
    shape = plan.ranks[Role.DECODE].shape
    assert (plan.options.graphs, shape.tp) == (graphs, ranks)
    options = msgspec.structs.replace(plan.options, shape=shape)
    made, head, backends = model_without_numbers(
        spec, plan.model.quantization, plan.model.dtype, options
    )
    kv, engine = KvTensors.allocate(plan.layout, 4, META), plan.engine_of(Role.DECODE)
    with torch.inference_mode(), noted_launches() as found:
        layer = draft_layer(made, head, kv, engine.max_num_seqs, Sent())
        assert layer is not None
        drafted(layer)
        sizes = captured_sizes(made, backends, options, engine, layer.reads)
        assert bool(sizes.most_drafts) == graphs
        if graphs:
            capture_steps(made, kv, EagerSteps(), sizes, Sent(), layer, layer.reads)
            drafted(layer)
    assert len(found) > 50
    check(known, found)


def drafted(layer: DraftLayer) -> None:
    """Compute rows of the layer, as a step's that makes drafts and as a prompt's."""
    for rows in ROWS:
        for sample in (True, False):
            slots = [
                msgspec.structs.replace(
                    slot(number, before, [1] * new, [0] * -(-(before + new) // 64)), sample=sample
                )
                for number, (new, before) in enumerate(rows)
            ]
            wide = len(layer.reads) * 64
            read = torch.empty(sum(new for new, _ in rows), wide, dtype=torch.bfloat16, device=META)
            layer.compute(slots, layer.states(read))


def check(known: list[Launch], found: list[Launch]) -> None:
    """Each kernel of `found` is among those that are known, for the same types and widths."""
    compiled = variants(known)
    new = {name: len(each - compiled.get(name, set())) for name, each in variants(found).items()}
    assert not any(new.values()), new
