"""Laws of planning: whatever the ops and limits, every byte travels once, to its own place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.transfer.batches import (
    SliceLimits,
    choose_slice_bytes,
    cut_slices,
    merge_ops,
    plan_slices,
)
from mooncake.transfer.engine import TransferOp

KIB = 2**10

small = st.integers(0, 40)
ops_lists = st.lists(
    st.builds(TransferOp, st.integers(1, 2), small, st.integers(1, 2), small, st.integers(0, 30)),
    max_size=20,
)


def moved(ops: list[TransferOp]) -> list[tuple[int, int, int, int]]:
    """Return every single byte that moves, in order: (region, place) here and there."""
    return [
        (op.local_region, op.local_offset + at, op.remote_region, op.remote_offset + at)
        for op in ops
        for at in range(op.num_bytes)
    ]


@given(ops_lists)
def test_merging_moves_the_same_bytes_in_the_same_order_with_no_more_ops(
    ops: list[TransferOp],
) -> None:
    merged = merge_ops(ops)
    assert moved(merged) == moved(ops)
    assert len(merged) <= len(ops)
    assert all(op.num_bytes > 0 for op in merged)
    assert merge_ops(merged) == merged


@given(ops_lists, st.integers(1, 50), st.integers(1, 5))
def test_slices_cover_every_byte_once_and_keep_their_limits(
    ops: list[TransferOp], slice_bytes: int, max_pieces: int
) -> None:
    slices = cut_slices(ops, slice_bytes, max_pieces)
    assert moved([piece for part in slices for piece in part.pieces]) == moved(ops)
    for part in slices:
        assert 0 < part.num_bytes <= slice_bytes
        assert part.num_bytes == sum(piece.num_bytes for piece in part.pieces)
        assert len(part.pieces) <= max_pieces
    for part in slices[:-1]:
        assert part.num_bytes == slice_bytes or len(part.pieces) == max_pieces


@given(
    st.lists(st.integers(1, 3_000_000), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_a_plan_keeps_its_connections_evenly_busy(
    lengths: list[int], num_connections: int, target_pages: int, min_pages: int
) -> None:
    limits = SliceLimits(
        target_bytes=target_pages * 64 * KIB, min_bytes=min_pages * 4 * KIB, max_pieces=1000
    )
    ops = [
        TransferOp(1, 4_000_000 * index, 2, 5_000_000 * index, length)
        for index, length in enumerate(lengths)
    ]
    total = sum(lengths)
    slices = plan_slices(ops, num_connections, limits)
    assert moved_ranges(slices_ops=[piece for part in slices for piece in part.pieces]) == (
        moved_ranges(slices_ops=ops)
    )
    length = choose_slice_bytes(total, num_connections, limits)
    assert length % 4096 == 0
    assert length <= limits.target_bytes
    assert all(part.num_bytes == length for part in slices[:-1])
    worth = min(num_connections, total // limits.min_bytes)
    if worth > 1 and length > 4096:
        # Whole pages cost at most one slice of balance.
        assert len(slices) >= worth - (worth * 4096 * len(slices)) // total - 1


def moved_ranges(slices_ops: list[TransferOp]) -> list[TransferOp]:
    """Return ops with what was cut joined again."""
    return merge_ops(slices_ops)
