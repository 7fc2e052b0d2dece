"""What an engine launches has the dtypes of what is compiled for Hopper in
`test_compiles_for_hopper.py`: the model is loaded from checkpoints on disk, so it is the loader
that says what weights, factors and biases are.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mooncake_kernels.dispatch import TRITON

from mooncake.base import KvLayout
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.compiling import META
from mooncake.model.inputs import build_inputs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.kernels.hopper_launches import LAUNCHES
from tests.support.kernels.launch_notes import Launch, noted_launches
from tests.support.kernels.step_launches import model_of
from tests.support.model.tiny_models import slot

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="notes launches of tensors without memory, as without a GPU"
)
PAGE = 16
SHAPE = {
    "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128,
    "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 64,
}  # fmt: skip
"""In which nothing has to be widened."""
FACTORS = {"int4": "bf16", "fp8": "fp32"}
"""Of weights that stay as they are stored."""
Pointers = tuple[tuple[str, str], ...]
"""(argument, dtype) of what lies in memory."""


def dtypes(launches: list[Launch]) -> dict[str, set[Pointers]]:
    """Return kernel -> what its launches were given."""
    found: dict[str, set[Pointers]] = {}
    for each in launches:
        found.setdefault(each.kernel, set()).add(tuple(each.tensors.items()))
    return found


@pytest.fixture(scope="module")
def compiled() -> dict[str, set[Pointers]]:
    with noted_launches() as launches:
        for name, launch in LAUNCHES.items():
            if "float32" not in name:  # for comparisons only
                launch()
    return dtypes(launches)


def served(folder: Path, kind: str, deterministic: bool) -> list[Launch]:
    """Return what steps of a model launch that was loaded from a checkpoint of `kind`."""
    path = init_checkpoint("k2-nano", 0, folder / "plain", overrides=SHAPE)
    if kind != "plain":
        path = convert_checkpoint(path, folder / kind, kind)
    options = ModelOptions(
        attention_backend=TRITON, moe_backend=TRITON, deterministic=deterministic
    )
    chosen = RankDevice(options, torch.bfloat16)
    model = load_model(
        Checkpoint.open(path), dtype=torch.bfloat16, device=chosen.device, backends=chosen.backends
    )
    with noted_launches() as launches, torch.inference_mode():
        for kv_dtype in ("bfloat16", "float8_e4m3fn"):
            layout = KvLayout.for_model(
                model.spec, block_tokens=PAGE, dtype=kv_dtype, weights_revision="none"
            )
            kv = KvTensors.allocate(layout, 300, chosen.device)
            for tokens in (1, 60, 4096):
                slots = [slot(0, 0, [1] * tokens, list(range(300)))]
                inputs = build_inputs(slots, frozenset(), kv.page_shape, model.prefers_absorbed)
                model.logits(model.forward(inputs, kv))
    return launches


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
def test_what_is_served_is_what_is_compiled(
    tmp_path: Path,
    kind: str,
    deterministic: bool,
    compiled: dict[str, set[Pointers]],
) -> None:
    found = dtypes(served(tmp_path, kind, deterministic))
    factors = {
        dict(each)["factors"]
        for name in ("gate_up_kernel", "gate_up_ranges_kernel", "gate_up_fp8_kernel", "down_kernel",
                     "down_fp8_kernel", "_linear")
        for each in found.get(name, ())
    }  # fmt: skip
    assert factors == {FACTORS.get(kind, "bf16")}
    other = {name: each - compiled.get(name, set()) for name, each in found.items()}
    assert {name: each for name, each in other.items() if each} == {}


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_models_without_numbers_have_the_dtypes_of_loaded_ones(tmp_path: Path, kind: str) -> None:
    """Launches and grids are counted with them."""
    model = model_of(kind, 2, 1, num_ranks=1)
    layout = KvLayout.for_model(
        model.spec, block_tokens=PAGE, dtype="bfloat16", weights_revision="none"
    )
    kv = KvTensors.allocate(layout, 300, META)
    with noted_launches() as launches, torch.inference_mode():
        for tokens in (1, 60, 4096):
            slots = [slot(0, 0, [1] * tokens, list(range(300)))]
            inputs = build_inputs(slots, frozenset(), kv.page_shape, model.prefers_absorbed)
            model.logits(model.forward(inputs.to(META), kv))
    known = dtypes(served(tmp_path, kind, deterministic=False))
    for name, each in dtypes(launches).items():
        assert each <= known[name], name
