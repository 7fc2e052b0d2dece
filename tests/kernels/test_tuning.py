"""Tuned tables: what is written is what is found, and the fastest is what is written."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_kernels import tuning
from mooncake_kernels.dispatch import TRITON, kernel
from mooncake_kernels.triton import experts
from mooncake_kernels.triton.device import INTERPRETED
from mooncake_kernels.tune import (
    BATCHES,
    KIMI_K2_RANKS,
    product_tiles,
    rank_shape,
    row_cuts,
    tune_experts,
)
from mooncake_kernels.tuning import (
    ExpertsConfig,
    ExpertsShape,
    ProductTile,
    Target,
    default_experts_config,
    experts_config,
    save_table,
)

from tests.support.kernels.gates import DEVICE

H200 = Target("NVIDIA H200", "3.6.0")
SHAPE = ExpertsShape("int4", 384, 256, 7168)


def config(width: int, swap: bool = True) -> ExpertsConfig:
    tile = ProductTile(width, 128, 1, 2, 4, 3)
    return ExpertsConfig(16, swap, tile, tile)


def test_a_table_is_found_again_and_extended(tmp_path: Path) -> None:
    path = tmp_path / H200.file_name
    assert path.name == "nvidia-h200.triton-3.6.json"
    save_table(path, H200, {SHAPE.key: {128: config(64), 512: config(128)}})
    save_table(path, H200, {SHAPE.key: {512: config(32)}, "experts/plain/1/2/3": {8: config(64)}})
    assert experts_config(SHAPE, 128, H200, tmp_path) == config(64)
    assert experts_config(SHAPE, 512, H200, tmp_path) == config(32)
    assert experts_config(SHAPE, 200, H200, tmp_path) == config(64)
    assert experts_config(SHAPE, 400, H200, tmp_path) == config(32)
    for far in (60, 1100):  # more than twice as few or as many: another rule's tiles suit them
        assert experts_config(SHAPE, far, H200, tmp_path) == default_experts_config(SHAPE, far)


def test_other_devices_releases_and_shapes_get_the_rule_of_thumb(tmp_path: Path) -> None:
    save_table(tmp_path / H200.file_name, H200, {SHAPE.key: {128: config(16)}})
    rule = default_experts_config(SHAPE, 128)
    assert rule != config(16)
    for target in (None, Target("NVIDIA H100", "3.6.0"), Target("NVIDIA H200", "3.9.0")):
        assert experts_config(SHAPE, 128, target, tmp_path) == rule
    other = ExpertsShape("fp8", 384, 256, 7168)
    assert experts_config(other, 128, H200, tmp_path) == default_experts_config(other, 128)
    assert experts_config(SHAPE, 128, Target("NVIDIA H200", "3.6.7"), tmp_path) == config(16)


def test_shipped_tables_can_be_read() -> None:
    paths = list(tuning.TABLES.glob("*.json"))
    assert tuning.TABLES / H200.file_name in paths
    for path in paths:
        assert tuning._table(path)


def test_the_h200s_table_is_served_by_the_release_that_measured_it_and_no_prompt_takes_it() -> None:
    shape = ExpertsShape("fp8", 24, 2048, 7168)
    tuned = experts_config(shape, 512, H200)
    assert (tuned.gate_up.programs, tuned.down.stages) == (2, 5)
    assert tuned != default_experts_config(shape, 512)
    for pairs, target in ((512, Target("NVIDIA H200", "3.9.0")), (65536, H200)):
        assert experts_config(shape, pairs, target) == default_experts_config(shape, pairs)


def test_products_are_launched_with_the_tiles_that_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU that has a table. Another one launches them by the rule of thumb."""
    if not INTERPRETED.value:
        pytest.skip("launches are noted in Triton's interpreter; compiled, they would really run")
    launched: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        "triton.runtime.interpreter.InterpretedFunction.run",
        lambda kernel, *_, **options: launched.update({kernel.fn.__name__: options}),
    )
    shape = ExpertsShape("fp8", 24, 2048, 7168)
    made = partial(torch.empty, device="meta")
    layer = kernel("experts_fp8", TRITON)(
        made(24, 2, 2048, 7168, dtype=torch.float8_e4m3fn), made(24, 2, 16, 56),
        made(24, 7168, 2048, dtype=torch.float8_e4m3fn), made(24, 56, 16),
    )  # fmt: skip
    rows = made(64, 7168, dtype=torch.bfloat16), made(64, 8, dtype=torch.int64), made(64, 8)
    for target in (H200, Target("NVIDIA H100", "3.6.0")):
        monkeypatch.setattr(experts, "target", lambda _, found=target: found)
        layer(*rows)
        config = experts_config(shape, 512, target)
        for name, tile in (("gate_up_kernel", config.gate_up), ("down_kernel", config.down)):
            found = launched.pop(name)
            wanted = config.block_t, tile.block_w, tile.block_k, tile.group_t, tile.warps
            names = "BLOCK_T", "BLOCK_W", "BLOCK_K", "GROUP_T", "num_warps"
            assert tuple(found[each] for each in names) == wanted
            assert found["STAGES"] == tile.stages


@pytest.mark.parametrize("split", sorted(KIMI_K2_RANKS))
@pytest.mark.parametrize("kind", ["plain", "fp8", "int4"])
def test_every_batch_has_something_to_try(split: str, kind: str) -> None:
    shape = rank_shape(kind, split)
    for tokens in BATCHES:
        cuts = row_cuts(tokens * 8, shape.num_experts)
        assert cuts
        for _, swap in cuts:
            tiles = list(product_tiles(swap, kind))
            assert 8 <= len(tiles) <= 64
            assert len(set(tiles)) == len(tiles)


class FakeLayer:
    """Stands for a layer on a GPU; `config` is what it was last called with."""

    def __init__(self, *stored: torch.Tensor) -> None:
        FakeLayer.last = self
        self.config: ExpertsConfig | None = None

    def __call__(self, *args: torch.Tensor) -> None:
        assert self.config is not None


class OutOfResources(Exception):
    """Named as Triton's."""


def test_the_fastest_wins_and_what_cannot_run_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock is made up: gate-up likes 32 rows of weights, down likes 64; 128 does not fit."""
    monkeypatch.setattr("mooncake_kernels.tune.kernel", lambda op, backend: FakeLayer)
    refused: list[ExpertsConfig] = []

    def tiles(swap: bool, kind: str) -> list[ProductTile]:
        return [ProductTile(width, 32, 1, 1, 4, 2) for width in (16, 32, 64, 128)]

    def timer(call: Callable[[], object]) -> float:
        call()
        made = FakeLayer.last.config
        if 128 in (made.gate_up.block_w, made.down.block_w):
            refused.append(made)
            raise OutOfResources
        gate_up, down = made.gate_up.block_w, made.down.block_w
        return abs(gate_up - 32) + abs(down - 64) + (not made.swap) * 500

    seen: list[tuple[int, int]] = []
    found = tune_experts(
        ExpertsShape("plain", 4, 16, 32), [1, 3], device=DEVICE, timer=timer, tiles=tiles,
        progress=lambda done, whole: seen.append((done, whole)),
    )  # fmt: skip
    assert seen == [(1, 2), (2, 2)]
    assert sorted(found) == [4, 12]
    for best in found.values():
        assert (best.gate_up.block_w, best.down.block_w, best.swap) == (32, 64, True)
    assert refused


def test_another_error_is_not_hidden() -> None:
    def timer(call) -> float:
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        tune_experts(ExpertsShape("plain", 2, 16, 32), [1], device=DEVICE, timer=timer)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_device_time_of_a_copy() -> None:
    from mooncake_kernels.timing import copy_bandwidth

    assert 1e11 < copy_bandwidth(2**30) < 2e13
