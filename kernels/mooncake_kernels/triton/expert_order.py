"""Sorts a batch's (token, choice) pairs by expert and cuts each expert's rows into tiles.

All counts stay on the device. Few pairs are sorted and cut by one program; many are sorted by
torch's stable sort, which is slower to start and faster a pair, and cut by a program an expert.
Both keep pairs of one expert in token order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mooncake_kernels.triton.device import pow2

_SORTED_BY_ONE = (128, 512, 2048)
"""The numbers of pairs that one program sorts: few sizes, because each is a kernel to compile."""
_COUNT_CHUNK = 1024


@dataclass(frozen=True)
class ExpertTiles:
    """Pairs sorted by expert, in tiles of one expert each; a pair is token * k + choice.

    order: [pairs] int32, the pairs in sorted order; those without an expert here come last.
    tile_expert, tile_begin, tile_end: [max_tiles] int32, of which `num_tiles` [1] int32 are set: a
    tile's expert and its rows of the sorted order. arrived: [max_tiles * blocks] int32, zeros, for
    the product of each tile with each block of weight rows.
    """

    order: torch.Tensor
    tile_expert: torch.Tensor
    tile_begin: torch.Tensor
    tile_end: torch.Tensor
    num_tiles: torch.Tensor
    arrived: torch.Tensor

    @property
    def max_tiles(self) -> int:
        return self.tile_expert.shape[0]


@triton.jit(do_not_specialize=["pairs", "num_products"])
def _sort_and_tile(
    experts, order, tile_expert, tile_begin, tile_end, num_tiles, arrived,
    pairs, num_experts, num_products,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All in one program; a tile's number follows from its expert, so none waits for another."""
    i = tl.arange(0, BLOCK)
    for begin in range(0, num_products, BLOCK):
        tl.store(arrived + begin + i, 0, mask=begin + i < num_products)
    expert = tl.load(experts + i, mask=i < pairs, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < num_experts)
    key = tl.where(known, expert, tl.where(i < pairs, num_experts, num_experts + 1)) * BLOCK + i
    tl.store(order + i, tl.sort(key) % BLOCK, mask=i < pairs)
    e = tl.arange(0, BLOCK_E)
    counts = tl.histogram(tl.where(known, expert, num_experts), BLOCK_E)
    counts = tl.where(e < num_experts, counts, 0)
    tiles = (counts + TILE - 1) // TILE
    row = tl.cumsum(counts, 0) - counts
    first = tl.cumsum(tiles, 0) - tiles
    for tile in range(tl.max(tiles, 0)):
        mine = tile < tiles
        tl.store(tile_expert + first + tile, e, mask=mine)
        tl.store(tile_begin + first + tile, row + tile * TILE, mask=mine)
        end = row + tl.minimum((tile + 1) * TILE, counts)
        tl.store(tile_end + first + tile, end, mask=mine)
    tl.store(num_tiles, tl.sum(tiles, 0))


@triton.jit(do_not_specialize=["pairs"])
def _tile(
    experts, tile_expert, tile_begin, tile_end, num_tiles, pairs, num_experts,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program an expert: counts all pairs (cheaper than a launch) and writes its tiles."""
    me = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    i = tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, pairs, CHUNK):
        expert = tl.load(experts + begin + i, mask=begin + i < pairs, other=-1).to(tl.int32)
        known = (expert >= 0) & (expert < num_experts)
        counts += tl.histogram(tl.where(known, expert, num_experts), BLOCK_E)
    tiles = tl.where(e < num_experts, (counts + TILE - 1) // TILE, 0)
    before = e < me
    row = tl.sum(tl.where(before, counts, 0))
    end = row + tl.sum(tl.where(e == me, counts, 0))
    first = tl.sum(tl.where(before, tiles, 0))
    mine = tl.sum(tl.where(e == me, tiles, 0))
    for tile in range(mine):
        tl.store(tile_expert + first + tile, me)
        tl.store(tile_begin + first + tile, row + tile * TILE)
        tl.store(tile_end + first + tile, tl.minimum(row + (tile + 1) * TILE, end))
    if me == num_experts - 1:
        tl.store(num_tiles, first + mine)


def most_tiles(pairs: int, num_experts: int, tile_rows: int) -> int:
    """Return how many tiles `pairs` pairs may have."""
    return min(pairs, num_experts) + pairs // tile_rows


def expert_tiles(
    experts: torch.Tensor, num_experts: int, tile_rows: int, blocks: int = 0
) -> ExpertTiles:
    """Return the tiles of `experts` [tokens, k] int64; ids outside 0..num_experts - 1 have none.

    blocks: of weight rows, for each of which a tile has a place in `arrived`.
    """
    pairs, device = experts.numel(), experts.device
    most = most_tiles(pairs, num_experts, tile_rows)
    # Separate tensors, because Triton compiles a kernel anew for a tensor that is not aligned.
    tile_expert, tile_begin, tile_end = (
        torch.empty(most, dtype=torch.int32, device=device) for _ in range(3)
    )
    if not pairs:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return ExpertTiles(tile_expert, tile_expert, tile_begin, tile_end, none, tile_expert)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    flat = experts.contiguous().view(-1)
    if pairs <= _SORTED_BY_ONE[-1]:
        order = torch.empty(pairs, dtype=torch.int32, device=device)
        arrived = torch.empty(most * blocks, dtype=torch.int32, device=device)
        _sort_and_tile[(1,)](
            flat, order, tile_expert, tile_begin, tile_end, num_tiles, arrived,
            pairs, num_experts, most * blocks,
            TILE=tile_rows, BLOCK=next(size for size in _SORTED_BY_ONE if pairs <= size),
            BLOCK_E=pow2(num_experts + 1), num_warps=8,
        )  # fmt: skip
        return ExpertTiles(order, tile_expert, tile_begin, tile_end, num_tiles, arrived)
    known = (flat >= 0) & (flat < num_experts)
    order = flat.where(known, num_experts).sort(stable=True).indices.to(torch.int32)
    _tile[(num_experts,)](
        flat, tile_expert, tile_begin, tile_end, num_tiles, pairs, num_experts,
        TILE=tile_rows, CHUNK=_COUNT_CHUNK, BLOCK_E=pow2(num_experts + 1), num_warps=4,
    )  # fmt: skip
    arrived = torch.zeros(most * blocks, dtype=torch.int32, device=device)
    return ExpertTiles(order, tile_expert, tile_begin, tile_end, num_tiles, arrived)
