"""What each of several memories holds of a sequence's blocks, and who copies what to whom. Pure.

Ranks of an instance with memories of their own hold pages in copies (latent KV has one head, which
cannot be cut), at one home each (decode context parallel), or some layers of each (pipelines). The
ranks of its peer may do otherwise: the two lists of parts are enough to copy every slice once.
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
    """`places` say where its slices begin."""
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
    """Return where peers may write, by `grant`, what `array`, in that region, holds of `pages`,
    which take the blocks of a sequence from `first_index` on.
    """
    held = [number for number, page in enumerate(pages) if array.holds(page)]
    places = array.places(segment, region, [pages[number] for number in held], grant)
    indexes = [first_index + number for number in held]
    return KvPart(places, indexes, array.layers.start, array.layers.stop)


def reshard(
    mine: Sequence[PageArray], theirs: Sequence[KvPart], pages: Mapping[int, int], layers: range
) -> list[Move]:
    """Return what each rank of an instance writes so that every part of `theirs` gets `layers` of
    the blocks `pages` (index -> page), as far as it has room for them: each slice once, from a rank
    that holds it. Ranks that hold the same slices take blocks in turn.

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
    """Return what each rank reads so that every memory gets what it holds of the blocks `there`,
    whole ones that go to `pages` in this order: a page of which there are copies is read for each.
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
