"""A block's checksum is the sum of what the memories that hold it find, wherever the cuts are."""

from __future__ import annotations

import itertools

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import KvLayout
from mooncake.kvstore.block_checksum import added, checksum_of

LAYOUT = KvLayout(num_layers=6, block_tokens=2, kv_width=4, dtype="float16", fingerprint="f")
SIZE = LAYOUT.slice_bytes
BLOCKS = st.binary(min_size=LAYOUT.block_bytes, max_size=LAYOUT.block_bytes)


def plain(block: bytes) -> int:
    slices = [block[layer * SIZE : (layer + 1) * SIZE] for layer in range(LAYOUT.num_layers)]
    return sum(xxhash.xxh3_64(each, seed=n).intdigest() for n, each in enumerate(slices)) % 2**64


@given(BLOCKS, st.sets(st.integers(1, LAYOUT.num_layers - 1)))
def test_parts_of_any_cut_make_the_checksum_of_the_whole(block: bytes, cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), LAYOUT.num_layers]
    parts = [
        checksum_of(block[first * SIZE : stop * SIZE], LAYOUT, first)
        for first, stop in itertools.pairwise(edges)
    ]
    assert added(parts) == checksum_of(memoryview(block), LAYOUT) == plain(block)


@given(BLOCKS, st.integers(0, LAYOUT.block_bytes - 1), st.integers(1, 255))
def test_a_changed_byte_and_layers_that_changed_places_are_found(
    block: bytes, at: int, flip: int
) -> None:
    whole = checksum_of(block, LAYOUT)
    changed = bytearray(block)
    changed[at] ^= flip
    assert checksum_of(bytes(changed), LAYOUT) != whole
    swapped = block[SIZE : 2 * SIZE] + block[:SIZE] + block[2 * SIZE :]
    assert (checksum_of(swapped, LAYOUT) == whole) == (swapped == block)
