"""Whoever holds what of a sequence's blocks, each memory of the other side gets each slice once,
from a rank that holds it.
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import BlockPlaces, KvLayout, PageArray, SegmentRef
from mooncake.base.kv_layout import KvPart, Move, copies, part_of, reshard

LAYERS = 6
LAYOUT = KvLayout(num_layers=LAYERS, block_tokens=4, kv_width=8, dtype="bfloat16", fingerprint="f")
SLICE = LAYOUT.slice_bytes
REGION = 3


@st.composite
def instances(draw: st.DrawFn) -> list[PageArray]:
    """What the memories of an instance hold: stages of copies of homes, or all in one memory."""
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=2)))
    num_homes, num_copies = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_pages = num_homes * draw(st.integers(2, 6))
    if draw(st.booleans()):
        return [PageArray(LAYOUT, num_pages, num_homes)]
    whole = PageArray(LAYOUT, num_pages, num_homes)
    return [
        msgspec.structs.replace(whole.of_rank(rank), first_layer=first, stop_layer=stop)
        for first, stop in zip([0, *cuts], [*cuts, LAYERS], strict=True)
        for rank in range(num_homes * num_copies)
    ]


def segment(rank: int) -> SegmentRef:
    return SegmentRef(f"e{rank}", {}, "h")


def parts_of(arrays: list[PageArray], pages: list[int]) -> list[KvPart]:
    """The parts by which an instance names `pages`, which take the blocks from 0 on."""
    return [part_of(array, segment(rank), REGION, pages, 0) for rank, array in enumerate(arrays)]


def slices(array: PageArray, page: int) -> dict[int, int]:
    """Layer -> byte of a page's slices in a memory."""
    begin = array.offset(page)
    return {layer: begin + number * array.layer_stride for number, layer in enumerate(array.layers)}


@given(instances(), instances(), st.data())
def test_every_destination_gets_every_slice_once_from_a_holder(
    mine: list[PageArray], theirs: list[PageArray], data: st.DataObject
) -> None:
    most = min(mine[0].num_pages, theirs[0].num_pages)
    count = data.draw(st.integers(1, most))
    own = data.draw(st.permutations(range(mine[0].num_pages)))[:count]
    their = list(data.draw(st.permutations(range(theirs[0].num_pages)))[:count])
    final = data.draw(st.sets(st.sampled_from(range(count))))
    layers = range(*sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6)))))
    blocks = {index: own[index] for index in final}

    written: Counter[tuple[str, int]] = Counter()
    index_of = {page: index for index, page in blocks.items()}
    for move in reshard(mine, parts_of(theirs, their), blocks, layers):
        array, target = mine[move.rank], theirs[int(move.there.segment.engine_id[1:])]
        assert move.there.region == REGION
        for page, offset in zip(move.pages, move.there.offsets, strict=True):
            assert array.holds(page)
            there = slices(target, their[index_of[page]])
            for number, layer in enumerate(move.layers):
                assert layer in array.layers
                byte = offset + number * move.there.layer_stride
                assert byte == there[layer], "another slice's place"
                written[move.there.segment.engine_id, byte] += 1
    expected = Counter(
        (segment(rank).engine_id, slices(array, their[index])[layer])
        for rank, array in enumerate(theirs)
        for index in final
        if array.holds(their[index])
        for layer in layers
        if layer in array.layers
    )
    assert written == expected


@given(instances(), st.data())
def test_every_memory_reads_what_it_holds_once(mine: list[PageArray], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, mine[0].num_pages))
    pages = list(data.draw(st.permutations(range(mine[0].num_pages)))[:count])
    there = BlockPlaces(
        segment(0), REGION, SLICE, [7 * index * LAYOUT.block_bytes for index in range(count)]
    )
    read = Counter(
        (move.rank, page, layer, offset + number * SLICE)
        for move in copies(mine, pages, there)
        for page, offset in zip(move.pages, move.there.offsets, strict=True)
        for number, layer in enumerate(move.layers)
    )
    assert read == Counter(
        (rank, page, layer, there.offsets[index] + layer * SLICE)
        for rank, array in enumerate(mine)
        for index, page in enumerate(pages)
        if array.holds(page)
        for layer in array.layers
    )


def test_ranks_with_copies_share_the_blocks_out() -> None:
    mine = [PageArray(LAYOUT, 8).of_rank(rank) for rank in range(4)]
    moves = reshard(mine, parts_of([PageArray(LAYOUT, 8)], list(range(8))),
                    {index: 7 - index for index in range(8)}, range(LAYERS))  # fmt: skip
    assert {move.rank: move.pages for move in moves} == {
        rank: [7 - rank, 3 - rank] for rank in range(4)
    }
    assert len(moves) == 4, "one for each rank, of all layers"


def test_a_part_is_refused_that_makes_no_sense() -> None:
    places = BlockPlaces(segment(0), REGION, SLICE, [0, 99])
    with pytest.raises(ValueError, match="2 places for 1 blocks"):
        KvPart(places, [4], 0, LAYERS)
    with pytest.raises(ValueError, match="no layers"):
        KvPart(places, [4, 5], 3, 3)
    sent = msgspec.msgpack.encode([places, [0], 0, 2])
    with pytest.raises(msgspec.ValidationError, match="2 places for 1"):
        msgspec.msgpack.decode(sent, type=KvPart)


def test_moves_travel() -> None:
    move = Move(1, [4], BlockPlaces(segment(0), REGION, SLICE, [0]), 2, 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(move), type=Move) == move
