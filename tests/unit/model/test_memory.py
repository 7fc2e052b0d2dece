"""The memory plan against built models and the published sizes of Kimi-K2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from mooncake_kernels.native import build, packed

from mooncake.base import ConfigError, KvLayout, Shape
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS, convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.quant_format import parse_quantization
from mooncake.model.checkpoint.weights import SPEC_DTYPES, Checkpoint
from mooncake.model.loading import load_model
from mooncake.model.memory import (
    Kept,
    communication_bytes,
    held_weights,
    keeps_router,
    kept_by,
    num_communicators,
    weights_bytes,
    workspace_bytes,
)
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.model.held_bytes import held_bytes
from tests.support.model.parameters import count_parameters
from tests.support.model.specs import KIMI_K2, small_spec
from tests.support.model.tiny_models import CONFIGS, source_of, truth


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_parameters_equal_those_of_a_built_model(name: str) -> None:
    model = truth(name)
    source = source_of(model)
    count = count_parameters(source.spec)
    assert count.total == sum(tensor.numel() for tensor in source.tensors.values())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    biases = 8 * (source.spec.num_hidden_layers - 1)  # the router's are buffers in transformers
    assert count.total == parameters + biases
    assert weights_bytes(source.spec, "float32") == 4 * count.total


def test_kimi_k2_has_a_trillion_parameters() -> None:
    count = count_parameters(small_spec(**KIMI_K2))
    assert count.total == pytest.approx(1026.4e9, rel=1e-3)
    assert count.active == pytest.approx(32.9e9, rel=5e-3)


def test_routers_are_kept_in_float32_or_as_they_are_stored() -> None:
    spec = small_spec()
    count = count_parameters(spec)
    assert count.router == 2 * (8 * 32 + 8)
    wide = weights_bytes(spec, "bfloat16")
    assert wide == 2 * count.total + 2 * count.router
    assert weights_bytes(spec, "bfloat16", router="bfloat16") == wide - 2 * 2 * 8 * 32


WIDE_ENOUGH = {
    "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128,
    "intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 64,
}  # fmt: skip
"""For weights to stay quantized, whatever multiplies with them."""
EVERYWHERE = ("auto", "reference", "triton")
"""Backends for every dtype."""
NO_WEIGHTS = 512
"""Bytes of rotations, of factors held for each block of outs, and of what calls begin with."""


@pytest.fixture(scope="module")
def stored_as(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("stored")
    plain = init_checkpoint("k2-nano", 0, folder / "plain", overrides=WIDE_ENOUGH)
    made = {kind: convert_checkpoint(plain, folder / kind, kind) for kind in ("fp8", "int4")}
    return {kind: Checkpoint.open(path) for kind, path in {"plain": plain, **made}.items()}


@pytest.mark.parametrize("stored", ["plain", "fp8", "int4"])
@pytest.mark.parametrize(
    ("backend", "dtype", "deterministic"),
    [
        *((name, dtype, False) for dtype in SPEC_DTYPES for name in EVERYWHERE),
        *((name, "bfloat16", False) for name in ("onednn", "native")),
        *((name, dtype, True) for dtype in SPEC_DTYPES for name in ("auto", "triton")),
    ],
)
def test_the_plan_is_what_a_loaded_model_holds(
    stored_as: dict[str, Checkpoint], stored: str, backend: str, dtype: str, deterministic: bool
) -> None:
    """By every backend, to less than an eighth of the router."""
    options = ModelOptions(
        attention_backend=backend, moe_backend=backend, deterministic=deterministic
    )
    try:
        chosen = RankDevice(options, SPEC_DTYPES[dtype])
    except ConfigError as error:
        pytest.skip(str(error))
    source = stored_as[stored]
    model = load_model(
        source, dtype=SPEC_DTYPES[dtype], device=chosen.device, backends=chosen.backends
    )
    planned = held_weights(source.spec, dtype, options, source.quantization)
    assert planned.in_dram == 0
    assert 0 <= held_bytes(model) - planned.on_device < NO_WEIGHTS


def test_on_a_gpu_routers_of_16_bits_stay_so() -> None:
    """330 MB less a rank of Kimi-K2, where routers are whole."""
    spec = small_spec(**KIMI_K2)
    int4 = parse_quantization(QUANTIZATION_CONFIGS["int4"])
    on_gpu = ModelOptions(device="cuda", shape=Shape(tp=8))
    held, wide = (
        held_weights(spec, "bfloat16", options, int4, shape=Shape(tp=8)).on_device
        for options in (on_gpu, msgspec.structs.replace(on_gpu, deterministic=True))
    )
    assert wide - held == 2 * 60 * 384 * 7168
    apart = ModelOptions(device="cuda", expert_device="cpu", moe_backend="native")
    assert keeps_router(apart, "bfloat16", spec)
    plain = ModelOptions(device="cuda", moe_backend="reference")
    assert not keeps_router(plain, "bfloat16", spec)
    assert not keeps_router(on_gpu, "bfloat16", small_spec(**KIMI_K2, torch_dtype="float32"))


def test_one_kimi_k2_token_takes_70272_bytes() -> None:
    spec = small_spec(**KIMI_K2)
    layout = KvLayout.for_model(spec, block_tokens=64, dtype="bfloat16", weights_revision="x")
    assert layout.block_bytes == 64 * 70272


def test_workspace_grows_with_tokens_and_sequences() -> None:
    spec = small_spec()
    small = workspace_bytes(spec, "float32", step_tokens=16, step_sequences=1)
    longer = workspace_bytes(spec, "float32", step_tokens=32, step_sequences=1)
    wider = workspace_bytes(spec, "float32", step_tokens=16, step_sequences=9)
    assert small < longer
    assert wider - small == 8 * spec.vocab_size * 2 * torch.float32.itemsize


@pytest.mark.parametrize(("kind", "stored"), [("fp8", 1029e9), ("int4", 594e9)])
def test_kimi_k2_is_counted_as_it_is_stored(kind: str, stored: float) -> None:
    """Published: 1,029 GB in FP8 and 594 GB in INT4. On one rank only routers and `kv_b_proj` are
    wider than on disk.
    """
    spec = small_spec(**KIMI_K2)
    kept = Kept(parse_quantization(QUANTIZATION_CONFIGS[kind]))
    assert weights_bytes(spec, "bfloat16", kept=kept) == pytest.approx(stored, rel=0.005)
    assert weights_bytes(spec, "bfloat16") == pytest.approx(2.05e12, rel=0.005)


def test_ranks_hold_parts_and_what_is_whole_on_each() -> None:
    """Eight ranks of Kimi-K2 in INT4: 76.5 GB each."""
    spec = small_spec(**KIMI_K2)
    kept = Kept(parse_quantization(QUANTIZATION_CONFIGS["int4"]))
    whole, part = (
        weights_bytes(spec, "bfloat16", shape=Shape(tp=number), kept=kept) for number in (1, 8)
    )
    assert part == pytest.approx(76.5e9, rel=0.005)
    latent = 7168 * (1536 + 576) * 61 * 2
    router = 60 * 384 * (7168 + 1) * 4
    norms = (61 * (2 * 7168 + 1536 + 512) + 7168) * 2
    assert 8 * part - whole == 7 * (latent + router + norms)


def test_blocks_that_no_kernel_takes_are_widened() -> None:
    spec = small_spec(moe_intermediate_size=64)
    odd = {**QUANTIZATION_CONFIGS["fp8"], "weight_block_size": [64, 64]}
    wide = weights_bytes(spec, "bfloat16")
    assert weights_bytes(spec, "bfloat16", kept=Kept(parse_quantization(odd))) == wide


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize(
    "widths",
    [{}, {"q_lora_rank": 192}, {"q_lora_rank": None}, {"moe_intermediate_size": 96},
     {"attention_bias": True}],
)  # fmt: skip
def test_what_stays_quantized_on_the_cpu_is_counted_as_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, widths: dict[str, Any]
) -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain", overrides={**WIDE_ENOUGH, **widths})
    source = Checkpoint.open(convert_checkpoint(plain, tmp_path / "out", kind))
    held: list[tuple[int, int]] = []
    made = packed.Quantized.__init__

    def recorded(weight: packed.Quantized, *given: Any) -> None:
        made(weight, *given)
        numbers = weight.codes.numel() * (2 if kind == "int4" else 1)
        held.append((numbers, weight.codes.nbytes + weight.scales.nbytes))

    monkeypatch.setattr(packed.Quantized, "__init__", recorded)
    load_model(source, dtype=torch.bfloat16, device=torch.device("cpu"))
    kept = kept_by(ModelOptions(), "bfloat16", source.quantization)
    wide, planned = (weights_bytes(source.spec, "bfloat16", kept=each) for each in (None, kept))
    saved = sum(2 * numbers - size for numbers, size in held)
    # Factors of FP8 are held for each block of outs that is multiplied, not for each 128.
    more = sum(size - numbers for numbers, size in held) if kind == "fp8" else 0
    assert saved <= wide - planned <= saved + more
    assert bool(held) == (widths != {"moe_intermediate_size": 96} or kind == "fp8")


def test_nothing_stays_quantized_where_nothing_multiplies_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    int4 = parse_quantization(QUANTIZATION_CONFIGS["int4"])
    monkeypatch.setattr(build, "unlikely", lambda folder=None: None)
    for options, dtype, stays in (
        (ModelOptions(), "bfloat16", True),
        (ModelOptions(), "float32", False),
        (ModelOptions(moe_backend="native"), "bfloat16", True),
        (ModelOptions(moe_backend="onednn"), "bfloat16", False),
        (ModelOptions(device="cuda"), "float32", True),
        (ModelOptions(device="cuda", moe_backend="reference"), "bfloat16", False),
        (ModelOptions(deterministic=True), "bfloat16", False),
        (ModelOptions(device="cuda", deterministic=True), "bfloat16", True),
    ):
        assert (kept_by(options, dtype, int4) is not None) == stays
    monkeypatch.setattr(build, "unlikely", lambda folder=None: "there is no C++ compiler")
    assert kept_by(ModelOptions(), "bfloat16", int4) is None
    assert kept_by(ModelOptions(device="cuda"), "bfloat16", int4) == Kept(int4)
    assert kept_by(ModelOptions(), "bfloat16", None) is None


def test_ranks_that_exchange_need_room_for_it() -> None:
    def needed(shape: Shape) -> int:
        return communication_bytes(
            small_spec(), "bfloat16", shape, step_tokens=16, step_sequences=4, max_model_len=64
        )

    assert needed(Shape()) == 0
    assert needed(Shape(tp=2)) == 16 * 32 * 6
    assert needed(Shape(tp=2, dcp=2)) == 16 * 32 * 6 + 4 * 2 * (20 * 2 + 17 * 4) + 64 * 20 * 2


@pytest.mark.parametrize(
    ("words", "of_stages"),
    [
        ("tp1", [0]), ("tp2", [1]), ("tp4-dcp2", [2]), ("tp4-dcp4", [1]), ("tp2-ep2", [1]),
        ("tp1-dp2-ep2", [1]), ("tp2-dp2-ep4", [2]), ("tp1-pp2", [2, 2]), ("tp1-pp3", [2, 3, 2]),
        ("tp2-pp2-dcp2", [3, 3]), ("tp4-pp3-dcp2", [4, 5, 4]),
    ],
)  # fmt: skip
def test_each_group_and_each_pair_of_ranks_is_a_communicator(
    words: str, of_stages: list[int]
) -> None:
    shape = Shape.parse(words)
    assert [num_communicators(shape, stage) for stage in range(shape.pp)] == of_stages


def test_a_ranks_steps_are_narrower() -> None:
    spec = small_spec(**KIMI_K2)
    one, eight = (
        workspace_bytes(spec, "bfloat16", step_tokens=4096, step_sequences=1, num_ranks=number)
        for number in (1, 8)
    )
    assert eight < 0.8 * one
