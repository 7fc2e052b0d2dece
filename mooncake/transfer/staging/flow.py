"""One batch that is staged: its slices, and the step at which each of them is. Pure.

A slice touches at most one device region on each side. Ops that touch none form one slice of their
own, uncut: the protocols cut it themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from mooncake.transfer.batches import Job, Slice, cut_slices, merge_ops
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.regions import DeviceRegion
from mooncake.transfer.staging.peer import StagingPeer
from mooncake.transfer.staging.wire import MAX_RANGES, Granted


@dataclass(frozen=True, slots=True)
class Load:
    """A slice, and the devices at its ends."""

    slice: Slice
    local: DeviceRegion | None
    remote: int | None
    """The peer's region if it lies on a device."""

    @property
    def local_ranges(self) -> list[tuple[int, int]]:
        """(offset, number of bytes) ranges at our end, in order."""
        return _joined((op.local_offset, op.num_bytes) for op in self.slice.pieces)

    @property
    def remote_ranges(self) -> list[tuple[int, int]]:
        """(offset, number of bytes) ranges at the peer's end, in order."""
        return _joined((op.remote_offset, op.num_bytes) for op in self.slice.pieces)

    def host_ops(
        self, slot: tuple[int, int] | None, window: tuple[int, int] | None
    ) -> list[TransferOp]:
        """Return the copies between host memory that carry the load.

        slot, window: (region, offset) that stand for the device at our end and at the peer's.
        """
        ops, at = [], 0
        for op in self.slice.pieces:
            local = (op.local_region, op.local_offset) if slot is None else _at(slot, at)
            remote = (op.remote_region, op.remote_offset) if window is None else _at(window, at)
            ops.append(TransferOp(*local, *remote, op.num_bytes))
            at += op.num_bytes
        return merge_ops(ops)


def _at(place: tuple[int, int], offset: int) -> tuple[int, int]:
    return place[0], place[1] + offset


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, with neighbours joined."""
    found: list[tuple[int, int]] = []
    for offset, length in ranges:
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found


def cut_loads(
    ops: Sequence[TransferOp],
    local: Callable[[int], DeviceRegion | None],
    remote: Callable[[int], bool],
    slice_bytes: int,
) -> list[Load]:
    """Return `ops` as loads of at most `slice_bytes`, those between the same devices in order.

    local: returns our device region of that number. remote: returns whether the peer's region lies
    on a device.
    """
    groups: dict[tuple[int, int], list[TransferOp]] = {}
    for op in ops:
        here = op.local_region if local(op.local_region) is not None else 0
        there = op.remote_region if remote(op.remote_region) else 0
        groups.setdefault((here, there), []).append(op)
    loads = []
    for (here, there), group in groups.items():
        if here or there:
            slices = cut_slices(group, slice_bytes, MAX_RANGES)
        else:
            slices = [Slice(tuple(group), sum(op.num_bytes for op in group))]
        loads += [Load(each, local(here) if here else None, there or None) for each in slices]
    return loads


class Step(Enum):
    """The step that a slice transfer waits for."""

    PERMIT = "its turn to ask the peer for a window"
    WINDOW = "the peer's window"
    COPY = "a copy between our device and a slot"
    NETWORK = "a protocol that carries it"
    LANDING = "the peer's copy to its device"


@dataclass(slots=True, eq=False)
class SliceTransfer:
    """One load under way, and what it holds."""

    flow: Flow
    load: Load
    started_s: float
    step: Step = Step.PERMIT
    slot: int | None = None
    permit: int | None = None
    ticket: int | None = None
    window: Granted | None = None
    inner: Job | None = None

    @property
    def is_write(self) -> bool:
        """True if bytes go to the peer."""
        return self.flow.job.op is Op.WRITE


@dataclass(slots=True, eq=False)
class Flow:
    """One batch: loads that have not begun, and slice transfers that have."""

    job: Job
    peer: StagingPeer | None
    waiting: deque[Load] = field(default_factory=deque)
    transfers: list[SliceTransfer] = field(default_factory=list)
    is_direct: bool = False
    """True if hardware is to move the whole batch at once."""
    direct: Job | None = None
    """The job by which hardware does it."""
    withdrawn: bool = False
    """True if all that is in hand was stopped, after the job was."""
    settled: bool = False
    """True if writes that the devices began before this batch have ended."""
