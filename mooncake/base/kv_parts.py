"""Which memory holds what of a sequence's blocks, and which rank copies what to whom. Pure.

The ranks of an instance may each hold all pages (latent KV has one head, which cannot be cut), only
the pages of one home (decode context parallel), or only some layers (pipelines). The ranks of the
peer may do this in another way. The two lists of parts are enough to copy every slice once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mooncake.base.kv_layout import BlockPlaces, PageArray, SegmentRef


class KvPart(msgspec.Struct, frozen=True, array_like=True):
    """Some layers of some blocks of a sequence, in the memory of one process.

    Raises:
        ValueError: there is not one place for each block, or no layer.
    """

    places: BlockPlaces
    indexes: list[int]
    """Positions in the sequence of the blocks in `places`."""
    first_layer: int
    """The first layer that lies at `places`; the offsets there are those of its slices."""
    stop_layer: int

    def __post_init__(self) -> None:
        if len(self.indexes) != len(self.places.offsets):
            raise ValueError(f"{len(self.places.offsets)} places for {len(self.indexes)} blocks")
        if not 0 <= self.first_layer < self.stop_layer:
            raise ValueError(f"no layers from {self.first_layer} to {self.stop_layer}")


class Move(msgspec.Struct, frozen=True, array_like=True):
    """Slices that one rank copies between pages of its own and a peer's memory."""

    rank: int
    pages: list[int]
    there: BlockPlaces
    """Where the slices of `first_layer` begin, page by page."""
    first_layer: int
    stop_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.stop_layer)


def part_of(
    array: PageArray,
    segment: SegmentRef,
    region: int,
    pages: Sequence[int],
    first_index: int,
    grant: int = 0,
) -> KvPart:
    """Return the part of a sequence's blocks that `array` holds in `region`.

    pages: the pages of the sequence's blocks, from the block `first_index` on. grant: allows peers
    to write to them.
    """
    held = [number for number, page in enumerate(pages) if array.holds(page)]
    places = array.places(segment, region, [pages[number] for number in held], grant)
    indexes = [first_index + number for number in held]
    return KvPart(places, indexes, array.layers.start, array.layers.stop)


def reshard(
    mine: Sequence[PageArray], theirs: Sequence[KvPart], pages: Mapping[int, int], layers: range
) -> list[Move]:
    """Return what each rank of an instance writes so that every part of `theirs` gets its share of
    `layers` of the blocks in `pages` (index -> page). Each slice is written once, by a rank that
    holds it; ranks that hold the same slices take turns by block.

    mine: what the memory of each rank holds.
    """
    holders: dict[tuple[int | None, int, int], list[int]] = {}
    for rank, array in enumerate(mine):
        span = array.layers
        holders.setdefault((array.home, span.start, span.stop), []).append(rank)
    moves: dict[tuple[int, int, int, int], Move] = {}
    for number, part in enumerate(theirs):
        stride = part.places.layer_stride
        for (_, start, stop), ranks in holders.items():
            first = max(start, part.first_layer, layers.start)
            last = min(stop, part.stop_layer, layers.stop)
            if first >= last:
                continue
            before = (first - part.first_layer) * stride
            of_home = mine[ranks[0]]
            for index, offset in zip(part.indexes, part.places.offsets, strict=True):
                page = pages.get(index)
                if page is None or not of_home.holds(page):
                    continue
                rank = ranks[index % len(ranks)]
                move = moves.get((rank, number, first, last))
                if move is None:
                    there = msgspec.structs.replace(part.places, offsets=[])
                    move = moves[rank, number, first, last] = Move(rank, [], there, first, last)
                move.pages.append(page)
                move.there.offsets.append(offset + before)
    return list(moves.values())


def copies(mine: Sequence[PageArray], pages: Sequence[int], there: BlockPlaces) -> list[Move]:
    """Return what each rank reads so that every memory gets its part of the blocks at `there`.
    These are whole blocks and go to `pages` in this order. When several ranks hold copies of a
    page, each of them reads it.
    """
    moves = []
    for rank, array in enumerate(mine):
        before = array.first_layer * there.layer_stride
        held = [
            (page, offset + before)
            for page, offset in zip(pages, there.offsets, strict=False)
            if array.holds(page)
        ]
        if held:
            offsets = [offset for _, offset in held]
            places = msgspec.structs.replace(there, offsets=offsets)
            span = array.layers
            moves.append(Move(rank, [page for page, _ in held], places, span.start, span.stop))
    return moves
