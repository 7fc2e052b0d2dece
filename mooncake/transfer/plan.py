"""Cuts a batch into slices: adjacent copies are merged, long ones cut, small ones grouped. Pure.

One connection carries a slice in one request; its pieces may be scattered at both ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from mooncake.transfer.engine import TransferOp

_ALIGN = 4096


@dataclass(frozen=True, kw_only=True)
class SliceLimits:
    """Sizes of slices on one kind of link."""

    target_bytes: int = 4 * 2**20
    """No slice is longer than this (rounded up to whole pages)."""
    min_bytes: int = 4 * 2**20
    """A batch uses no more connections than it has pieces of this size. On two cores a second
    connection made 1 and 4 MiB slower and changed nothing from 16 MiB on.
    """
    max_pieces: int = 256
    """Ranges one slice may scatter and gather."""


class Slice(msgspec.Struct, frozen=True):
    """Part of a batch that travels as one request."""

    pieces: tuple[TransferOp, ...]
    num_bytes: int


def merge_ops(ops: Iterable[TransferOp]) -> list[TransferOp]:
    """Return `ops` in order with empty ones left out and neighbours joined.

    Two ops are joined when the second begins where the first ends, on both sides.
    """
    merged: list[TransferOp] = []
    for op in ops:
        if op.num_bytes == 0:
            continue
        if merged and _continues(merged[-1], op):
            last = merged[-1]
            merged[-1] = TransferOp(
                last.local_region,
                last.local_offset,
                last.remote_region,
                last.remote_offset,
                last.num_bytes + op.num_bytes,
            )
        else:
            merged.append(op)
    return merged


def _continues(last: TransferOp, op: TransferOp) -> bool:
    return (
        last.local_region == op.local_region
        and last.remote_region == op.remote_region
        and last.local_offset + last.num_bytes == op.local_offset
        and last.remote_offset + last.num_bytes == op.remote_offset
    )


def choose_slice_bytes(num_bytes: int, num_connections: int, limits: SliceLimits) -> int:
    """Return the slice length that spreads `num_bytes` evenly over connections, in whole pages."""
    num_slices = -(-num_bytes // limits.target_bytes)
    worth = max(1, min(num_connections, num_bytes // limits.min_bytes))
    num_slices = max(1, -(-num_slices // worth)) * worth
    length = -(-num_bytes // num_slices)
    return max(_ALIGN, -(-length // _ALIGN) * _ALIGN)


def cut_slices(ops: Sequence[TransferOp], slice_bytes: int, max_pieces: int) -> list[Slice]:
    """Return `ops` in order as slices of at most `slice_bytes` bytes and `max_pieces` pieces."""
    if slice_bytes < 1 or max_pieces < 1:
        raise ValueError(f"a slice must hold something, not {slice_bytes} bytes, {max_pieces} ops")
    slices: list[Slice] = []
    pieces: list[TransferOp] = []
    room = slice_bytes
    for op in ops:
        done = 0
        while done < op.num_bytes:
            length = min(room, op.num_bytes - done)
            pieces.append(_part(op, done, length))
            done += length
            room -= length
            if room == 0 or len(pieces) == max_pieces:
                slices.append(Slice(tuple(pieces), slice_bytes - room))
                pieces, room = [], slice_bytes
    if pieces:
        slices.append(Slice(tuple(pieces), slice_bytes - room))
    return slices


def _part(op: TransferOp, start: int, length: int) -> TransferOp:
    if length == op.num_bytes:
        return op
    return TransferOp(
        op.local_region,
        op.local_offset + start,
        op.remote_region,
        op.remote_offset + start,
        length,
    )


def plan_slices(
    ops: Sequence[TransferOp], num_connections: int, limits: SliceLimits
) -> list[Slice]:
    """Return merged `ops` cut for parallel connections: slices of about equal size, in order."""
    num_bytes = ops[0].num_bytes if len(ops) == 1 else sum(op.num_bytes for op in ops)
    if num_bytes == 0:
        return []
    is_small = num_bytes <= limits.target_bytes and num_bytes < 2 * limits.min_bytes
    if is_small and len(ops) <= limits.max_pieces:
        return [Slice(tuple(ops), num_bytes)]
    slice_bytes = choose_slice_bytes(num_bytes, num_connections, limits)
    return cut_slices(ops, slice_bytes, limits.max_pieces)
