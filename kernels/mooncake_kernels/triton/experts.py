"""Routed experts on the grouped products: plain, FP8 block and INT4 weights (contracts:
`reference.experts`, `reference.experts_quantized`). Experts of other ranks (ids outside the stack)
add nothing, so the same classes serve expert parallelism. No count ever reaches the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from mooncake_kernels.triton import grouped, grouped_fp8, int4
from mooncake_kernels.triton.device import num_programs, pow2, target
from mooncake_kernels.triton.expert_order import ExpertTiles, expert_tiles, most_tiles
from mooncake_kernels.triton.quantize import quantize_pairs, quantize_rows
from mooncake_kernels.tuning import (
    ExpertsConfig,
    ExpertsShape,
    ProductTile,
    default_experts_config,
    experts_config,
)

_SUM_COLUMNS = 1024
_STEPS_IN_A_ROW = 2
"""The most steps of a down product that are unrolled; more become a loop."""
_FEW_PRODUCTS = 4
"""With fewer pairs of tiles and blocks of weight rows per program than this, the steps are shared
out. Otherwise one program has twice the work of another.
"""


@dataclass(frozen=True)
class _Weights:
    """The `matrices` [rows, columns] of one product, one after another, and the factors that widen
    them.
    """

    values: torch.Tensor
    factors: torch.Tensor
    rows: int
    columns: int
    matrices: int


class _GroupedExperts:
    """The common part of the three formats. `config` overrides the tables (for tuning)."""

    def __init__(self, kind: int, num_experts: int, gate_up: _Weights, down: _Weights) -> None:
        self._kind = kind
        self._num_experts = num_experts
        self._gate_up = gate_up
        self._down = down
        names = ("plain", "fp8", "int4")
        self.shape = ExpertsShape(names[kind], num_experts, gate_up.rows, gate_up.columns)
        self.config: ExpertsConfig | None = None
        self._whole_products = False

    @property
    def num_bytes(self) -> int:
        """Return the size of the weights, with the padding that the format needs."""
        products = self._gate_up, self._down
        return sum(each.values.nbytes + each.factors.nbytes for each in products)

    def slot(self, number: int) -> list[torch.Tensor]:
        """Return where the weights of an expert lie, to be read and written."""
        parts: list[torch.Tensor] = []
        for product in (self._gate_up, self._down):
            parts.append(product.values)
            if product.factors is not product.values:
                parts.append(product.factors)
        return [part.view(self._num_experts, -1)[number] for part in parts]

    def fix_tiles(self, rows: int) -> None:
        """Use the tiles of `rows` rows per expert for every batch, and compute no product in parts.
        Then bits do not depend on the batch.
        """
        self.config = default_experts_config(self.shape, rows * self._num_experts)
        self._whole_products = True

    def _config(self, pairs: int, x: torch.Tensor) -> ExpertsConfig:
        """Return the tiles for a batch. The tables hold for bfloat16."""
        if self.config is not None:
            return self.config
        measured = None if x.dtype == torch.float32 else target(x.device)
        return experts_config(self.shape, pairs, measured)

    def __call__(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden] in x's dtype."""
        tokens, choices = experts.shape
        hidden, pairs = x.shape[1], experts.numel()
        out = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
        if not tokens:
            return out
        config = self._config(pairs, x)
        tiles = self._tiles(experts, config)
        inner = torch.empty(pairs, self._gate_up.rows, dtype=x.dtype, device=x.device)
        parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
        rows = self._ready(x, config, tiles.order, choices)
        self._multiply(self._gate_up, rows, inner, tiles, config, choices)
        rows = self._ready(inner, config)
        self._multiply(self._down, rows, parts, tiles, config, weights.contiguous())
        columns = min(_SUM_COLUMNS, pow2(hidden))
        grouped.sum_kernel[(tokens, triton.cdiv(hidden, columns))](
            parts, experts.contiguous(), out, self._num_experts, hidden,
            CHOICES=choices, BLOCK_N=columns, num_warps=4,
        )  # fmt: skip
        return out

    def products(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the two grouped products of a batch, each ready to be launched. Used for
        measuring.
        """
        pairs = experts.numel()
        config = self._config(pairs, x)
        tiles = self._tiles(experts, config)
        inner = torch.empty(pairs, self._gate_up.rows, dtype=x.dtype, device=x.device)
        parts = torch.empty(pairs, x.shape[1], dtype=x.dtype, device=x.device)
        choices = experts.shape[1]
        rows = self._ready(x, config, tiles.order, choices)
        self._multiply(self._gate_up, rows, inner, tiles, config, choices)
        inner_rows = self._ready(inner, config)

        def gate_up() -> None:
            self._multiply(self._gate_up, rows, inner, tiles, config, choices)

        def down() -> None:
            self._multiply(self._down, inner_rows, parts, tiles, config, weights)

        return gate_up, down

    def _tiles(self, experts: torch.Tensor, config: ExpertsConfig) -> ExpertTiles:
        """Return the tiles of a batch. They have `arrived` when `_multiply` shares out gate-up's
        products by steps, which it does when each program has few of them.
        """
        pairs, tile = experts.numel(), config.gate_up
        most = most_tiles(pairs, self._num_experts, config.block_t)
        blocks = triton.cdiv(self._gate_up.rows, tile.block_w)
        few = most * blocks < _FEW_PRODUCTS * num_programs(experts.device) * tile.programs
        shared = few and config.swap and not self._whole_products
        return expert_tiles(experts, self._num_experts, config.block_t, blocks if shared else 0)

    def _by_boxes(self, config: ExpertsConfig) -> bool:
        """Whether `grouped_fp8` computes the products: for many rows, in whole 16 bytes."""
        widths = self._gate_up.columns | self._down.columns
        return self._kind == grouped.FP8.value and not config.swap and not widths % 16

    def _ready(
        self,
        x: torch.Tensor,
        config: ExpertsConfig,
        order: torch.Tensor | None = None,
        choices: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the rows to multiply, their factors). order: None if the rows are sorted
        already.
        """
        x = x.contiguous()
        if self._by_boxes(config):
            return quantize_pairs(x, order, choices)
        return quantize_rows(x) if self._kind == grouped.FP8.value else (x, x)

    def _multiply(
        self,
        w: _Weights,
        rows: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        tiles: ExpertTiles,
        config: ExpertsConfig,
        extra: Any,
    ) -> None:
        if self._by_boxes(config):
            self._multiply_boxes(w, rows, out, tiles, config, extra)
            return
        first = w is self._gate_up
        tile: ProductTile = config.gate_up if first else config.down
        # The groups of both quantized formats fix their steps.
        step = tile.block_k if self._kind == grouped.PLAIN.value else int4.COLUMNS
        x, x_factors = rows
        # Tiles of float32 are twice as large, so no more than two of them in flight fit.
        stages = min(tile.stages, 2) if x.dtype == torch.float32 else tile.stages
        most = tiles.max_tiles * triton.cdiv(w.rows, tile.block_w)
        programs = num_programs(x.device) * tile.programs
        more: tuple[torch.Tensor, ...] = ()
        whole = {}
        if first and len(tiles.arrived):
            kernel = grouped.gate_up_ranges_kernel
            # Each program has two slots, each for two sums.
            size = 4 * programs * tile.block_w * config.block_t
            more = torch.empty(size, dtype=torch.float32, device=x.device), tiles.arrived
        else:
            kernel = grouped.gate_up_kernel if first else grouped.down_kernel
            programs = min(programs, most)
        if not first:
            steps = triton.cdiv(w.columns, step)
            whole = {"STEPS": steps if steps <= _STEPS_IN_A_ROW else 0}
        kernel[(programs,)](
            x, x_factors, w.values, w.factors, out,
            tiles.order, tiles.tile_expert, tiles.tile_begin, tiles.tile_end, tiles.num_tiles,
            w.rows, w.columns, w.values.numel() // w.matrices, w.factors.numel() // w.matrices,
            extra, *more,
            FORMAT=self._kind, SWAP=config.swap, BLOCK_W=tile.block_w, BLOCK_T=config.block_t,
            BLOCK_K=step, GROUP_T=tile.group_t, STAGES=stages, num_warps=tile.warps,
            **whole,
        )  # fmt: skip

    def _multiply_boxes(
        self,
        w: _Weights,
        rows: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        tiles: ExpertTiles,
        config: ExpertsConfig,
        extra: Any,
    ) -> None:
        first = w is self._gate_up
        tile = config.gate_up if first else config.down
        most = tiles.max_tiles * triton.cdiv(w.rows, tile.block_w)
        given: tuple[torch.Tensor, ...] = (*rows, w.values, w.factors, out)
        of_tiles = tiles.tile_expert, tiles.tile_begin, tiles.tile_end, tiles.num_tiles
        kernel = grouped_fp8.gate_up_fp8_kernel
        if not first:
            kernel, given = grouped_fp8.down_fp8_kernel, (*given, tiles.order, extra)
        triton.set_allocator(grouped_fp8.allocate)
        kernel[(min(num_programs(out.device) * tile.programs, most),)](
            *given, *of_tiles, rows[0].shape[0], w.matrices, w.rows, w.columns,
            BLOCK_W=tile.block_w, BLOCK_T=config.block_t, GROUP_T=tile.group_t, STAGES=tile.stages,
            num_warps=tile.warps,
        )  # fmt: skip


class StackedExperts(_GroupedExperts):
    """Like `reference.experts.StackedExperts`, for any float dtype."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        count, hidden, inner = down.shape
        gate_up, down = gate_up.contiguous(), down.contiguous()
        super().__init__(
            grouped.PLAIN.value,
            count,
            _Weights(gate_up, gate_up, inner, hidden, 2 * count),
            _Weights(down, down, hidden, inner, count),
        )


class Fp8Experts(_GroupedExperts):
    """Like `reference.experts_quantized.Fp8Experts`."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_factors: torch.Tensor,
        down: torch.Tensor,
        down_factors: torch.Tensor,
    ) -> None:
        count, hidden, inner = down.shape
        super().__init__(
            grouped.FP8.value,
            count,
            _Weights(gate_up.contiguous(), gate_up_factors.contiguous(), inner, hidden, 2 * count),
            _Weights(down.contiguous(), down_factors.contiguous(), hidden, inner, count),
        )


class Int4Experts(_GroupedExperts):
    """Like `reference.experts_quantized.Int4Experts`. Packs the weights anew, see `int4.pack_int4`.

    in_place: pack into the given tensors, which must have no other user. Otherwise 384 experts of
    Kimi-K2 need another 10 GB for each layer.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        gate_up_scales: torch.Tensor,
        down: torch.Tensor,
        down_scales: torch.Tensor,
        *,
        in_place: bool = False,
    ) -> None:
        count, hidden, inner = down.shape[0], down.shape[1], gate_up.shape[2]
        first = int4.pack_matrices(gate_up, gate_up_scales, in_place)
        second = int4.pack_matrices(down, down_scales, in_place)
        super().__init__(
            grouped.INT4.value,
            count,
            _Weights(*first, inner, hidden, 2 * count),
            _Weights(*second, hidden, inner, count),
        )
