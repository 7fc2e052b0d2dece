"""Merging, cutting and grouping of ops: plain cases (the laws are in tests/property)."""

from __future__ import annotations

import pytest

from mooncake.transfer.batches import (
    SliceLimits,
    choose_slice_bytes,
    cut_slices,
    merge_ops,
    plan_slices,
)
from mooncake.transfer.engine import TransferOp

KIB, MIB = 2**10, 2**20


def test_neighbours_on_both_sides_become_one() -> None:
    ops = [TransferOp(1, 0, 2, 100, 10), TransferOp(1, 10, 2, 110, 5), TransferOp(1, 15, 2, 115, 1)]
    assert merge_ops(ops) == [TransferOp(1, 0, 2, 100, 16)]


@pytest.mark.parametrize(
    "second",
    [
        TransferOp(1, 11, 2, 110, 5),
        TransferOp(1, 10, 2, 111, 5),
        TransferOp(3, 10, 2, 110, 5),
        TransferOp(1, 10, 3, 110, 5),
        TransferOp(1, 0, 2, 100, 10),
    ],
)
def test_what_is_not_adjacent_on_both_sides_stays_apart(second: TransferOp) -> None:
    first = TransferOp(1, 0, 2, 100, 10)
    assert merge_ops([first, second]) == [first, second]


def test_empty_ops_vanish_and_do_not_hinder_merging() -> None:
    ops = [TransferOp(1, 0, 2, 0, 4), TransferOp(9, 9, 9, 9, 0), TransferOp(1, 4, 2, 4, 4)]
    assert merge_ops(ops) == [TransferOp(1, 0, 2, 0, 8)]
    assert merge_ops([TransferOp(1, 0, 2, 0, 0)]) == []


@pytest.mark.parametrize(
    ("num_bytes", "num_connections", "num_slices"),
    [
        (1, 2, 1),
        (4096, 2, 1),
        (256 * KIB, 2, 1),
        (512 * KIB, 2, 2),
        (MIB, 2, 2),
        (MIB, 4, 4),
        (8 * MIB, 2, 2),
        (9 * MIB, 2, 4),
        (64 * MIB, 2, 16),
        (64 * MIB, 3, 18),
    ],
)
def test_slices_are_even_and_a_multiple_of_the_connections(
    num_bytes: int, num_connections: int, num_slices: int
) -> None:
    limits = SliceLimits(target_bytes=4 * MIB, min_bytes=256 * KIB)
    slices = plan_slices([TransferOp(1, 0, 2, 0, num_bytes)], num_connections, limits)
    assert len(slices) == num_slices
    assert slices[0].num_bytes % 4096 == 0 or num_slices == 1
    assert sum(part.num_bytes for part in slices) == num_bytes
    assert choose_slice_bytes(num_bytes, num_connections, limits) <= limits.target_bytes


def test_small_ops_share_a_slice_up_to_the_piece_limit() -> None:
    ops = [TransferOp(1, 3 * index, 2, 2 * index, 1) for index in range(10)]
    slices = cut_slices(ops, slice_bytes=100, max_pieces=4)
    assert [len(part.pieces) for part in slices] == [4, 4, 2]
    assert [op for part in slices for op in part.pieces] == ops


def test_a_long_op_is_cut_where_a_slice_is_full() -> None:
    ops = [TransferOp(1, 0, 2, 50, 6), TransferOp(1, 20, 3, 0, 9)]
    slices = cut_slices(ops, slice_bytes=8, max_pieces=9)
    assert [part.pieces for part in slices] == [
        (TransferOp(1, 0, 2, 50, 6), TransferOp(1, 20, 3, 0, 2)),
        (TransferOp(1, 22, 3, 2, 7),),
    ]
    assert [part.num_bytes for part in slices] == [8, 7]


def test_nothing_gives_no_slices_and_silly_limits_are_refused() -> None:
    assert plan_slices([], 2, SliceLimits()) == []
    with pytest.raises(ValueError, match="0 bytes"):
        cut_slices([], 0, 1)
    with pytest.raises(ValueError, match="0 ops"):
        cut_slices([], 1, 0)
