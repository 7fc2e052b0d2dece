"""How many kernels a captured decode step launches: counted, and as README and predictions say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from benchmarks.gpu import predict
from mooncake.base import KvLayout
from mooncake.model.compiling import META
from mooncake.model.device.prefill_graphs import PrefillGraphs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.running.computed_step import ForwardPass
from tests.support.kernels import hopper_table
from tests.support.kernels.step_launches import (
    exchanged_in_a_step,
    model_of,
    noted,
    of_a_layer,
    of_a_step,
)
from tests.support.model.tiny_models import slot


class Graphs:
    """Replays start what was captured at once, as far as the host is concerned."""

    def __init__(self) -> None:
        self.captured: dict[int, list[str]] = {}

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        with noted() as names:
            out = step()
        self.captured[out.shape[0]] = names
        return lambda: out


@pytest.mark.parametrize(("kind", "most"), [("int4", 20), ("fp8", 22)])
def test_launches_of_a_layer_of_experts(kind: str, most: int) -> None:
    names, step = of_a_layer(kind), of_a_step(kind)
    assert len(names) <= most
    assert not {"cat", "clone", "copy_", "mul_"} & set(names), "nothing is copied or scaled apart"
    readme = hopper_table.README.read_text(encoding="utf-8")
    row = next(line for line in readme.splitlines() if line.startswith(f"| {kind.upper()} |"))
    assert f"-> {len(names)} |" in row
    assert f"-> {step:,} |" in row
    assert "`" + "` `".join(names) + "`" in row
    assert kind == "fp8" or step == predict.STEP_LAUNCHES[False]


@pytest.mark.parametrize("name", predict.EXCHANGED)
def test_what_ranks_exchange_in_a_step_is_what_predictions_take(name: str) -> None:
    of = predict.SLICES[name]
    found = exchanged_in_a_step(of.rows, dcp=8 if name.endswith("dcp8") else 1)
    assert found == predict.EXCHANGED[name]


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_short_prompt_starts_a_graph_and_no_kernel_of_a_layer(kind: str) -> None:
    """Prompts and a sequence that decodes: eager, the host launches all of it."""
    model, graphs = model_of(kind, 3, 1), Graphs()
    layout = KvLayout.for_model(
        model.spec, block_tokens=64, dtype="bfloat16", weights_revision="none"
    )
    slots = [slot(1, 0, [1] * 70, [0, 1]), slot(2, 200, [1], [2] * 4), slot(3, 64, [1] * 9, [3, 3])]
    with torch.inference_mode():
        kv = KvTensors.allocate(layout, 4, META)
        steps = PrefillGraphs(model, kv, graphs, most_tokens=256, most_sequences=16, most_pages=4)
        with noted() as eager:
            ForwardPass(model, kv)(slots, frozenset())
        with noted() as replayed:
            ForwardPass(model, kv, steps)(slots, frozenset())
    assert sorted(graphs.captured) == [16, 32, 48, 64, 96, 128, 192, 256]
    assert len(eager) > len(graphs.captured[96]) > 60
    of_layers = {"mm", "_linear", "_norm", "_attend", "_choose", "down_kernel", "_gated", "add_"}
    assert len(of_layers & set(eager)) >= 7
    assert not of_layers & set(replayed), "what is left are the step's tensors"
