"""Measures configurations of the experts on a GPU. `mooncake tune` runs this; serving never does.

Gate-up and down are timed inside the whole layer, one after the other. For each way of cutting rows
into tiles, this finds the best gate-up with a plain down, then the best down with that gate-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from mooncake_kernels.dispatch import TRITON, kernel
from mooncake_kernels.synthetic import Maker
from mooncake_kernels.timing import Timer, cuda_seconds
from mooncake_kernels.tuning import (
    ExpertsConfig,
    ExpertsShape,
    ProductTile,
    default_experts_config,
)

TOP_K = 8
KIMI_K2_RANKS: dict[str, tuple[int, int]] = {
    "tp8": (384, 256),
    "tp16": (384, 128),
    "ep16": (24, 2048),
}
"""How Kimi-K2's experts are split -> (experts, inner width) of a rank."""
HIDDEN = 7168
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
"""The numbers of tokens that a step may have."""

_OPS = {"plain": "experts", "fp8": "experts_fp8", "int4": "experts_int4"}

Progress = Callable[[int, int], None]
"""Called with (batches done, batches in all)."""


def rank_shape(kind: str, split: str) -> ExpertsShape:
    """Return the shape of Kimi-K2's experts on a rank. Raises KeyError when there is no
    such split.
    """
    num_experts, inner = KIMI_K2_RANKS[split]
    return ExpertsShape(kind, num_experts, inner, HIDDEN)


def row_cuts(pairs: int, num_experts: int) -> list[tuple[int, bool]]:
    """Return the (rows of a tile, swapped) that make sense for a batch."""
    rows = pairs / min(num_experts, pairs)
    cuts = [(16, True), (32, True), (64, True), (64, False), (128, False)]
    return [
        (size, swap)
        for size, swap in cuts
        if size <= 16 or (size / 8 <= rows and (size >= 64 or rows <= 4 * size))
    ]


def product_tiles(swap: bool, kind: str) -> Iterator[ProductTile]:
    """Yield tiles to try."""
    steps = (64, 128) if kind == "plain" else (128,)
    if swap:
        for width, step, stages in itertools.product((64, 128), steps, (3, 4, 5)):
            for programs in (1, 2, 3, 4):
                yield ProductTile(width, step, 1, programs, width // 16, stages)
    else:
        for width, step, stages in itertools.product((64, 128), steps, (3, 4)):
            for group, warps in itertools.product((4, 16), (4, 8)):
                yield ProductTile(width, step, group, 1, warps, stages)


def tune_experts(
    shape: ExpertsShape,
    batches: Sequence[int] = BATCHES,
    *,
    device: torch.device | None = None,
    timer: Timer = cuda_seconds,
    tiles: Callable[[bool, str], Iterable[ProductTile]] = product_tiles,
    progress: Progress | None = None,
) -> dict[int, ExpertsConfig]:
    """Return pairs of a batch -> the fastest configuration found, for each batch of `batches`.

    Configurations that the device cannot run (too much shared memory) are skipped.
    """
    make = Maker(device or torch.device("cuda"))
    stored = make.experts(shape.format, shape.num_experts, shape.inner, shape.hidden)
    layer = kernel(_OPS[shape.format], TRITON)(*stored)
    best: dict[int, ExpertsConfig] = {}
    for done, tokens in enumerate(batches, start=1):
        top_k = min(TOP_K, shape.num_experts)
        x, routing = (
            make.normal(tokens, shape.hidden),
            make.routing(tokens, shape.num_experts, top_k),
        )

        def seconds(
            config: ExpertsConfig,
            x: torch.Tensor = x,
            routing: tuple[torch.Tensor, ...] = routing,
        ) -> float:
            layer.config = config
            try:
                return timer(lambda: layer(x, *routing))
            except Exception as error:
                if type(error).__name__ not in ("OutOfResources", "PTXASError"):
                    raise
                return float("inf")

        pairs = tokens * top_k
        best[pairs] = _fastest(shape, pairs, seconds, tiles)
        if progress is not None:
            progress(done, len(batches))
    return best


def _fastest(
    shape: ExpertsShape,
    pairs: int,
    seconds: Callable[[ExpertsConfig], float],
    tiles: Callable[[bool, str], Iterable[ProductTile]],
) -> ExpertsConfig:
    found = default_experts_config(shape, pairs)
    least = seconds(found)
    for block_t, swap in row_cuts(pairs, shape.num_experts):
        tried = list(tiles(swap, shape.format))
        config = ExpertsConfig(block_t, swap, tried[0], tried[0])
        reached = seconds(config)
        for part in ("gate_up", "down"):
            for tile in tried:
                gate_up = part == "gate_up"
                candidate = replace(config, gate_up=tile) if gate_up else replace(config, down=tile)
                took = seconds(candidate)
                if took < reached:
                    config, reached = candidate, took
        if reached < least:
            found, least = config, reached
    return found
