"""The plain reference of staging, to compare with: whole regions, one copy after another.

Nothing is pipelined, and both ends must be in this process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mooncake.transfer.device import write_now
from mooncake.transfer.engine import Op, TransferOp
from mooncake.transfer.regions import AnyRegion, DeviceRegion


def move_whole(
    op: Op,
    ops: Sequence[TransferOp],
    local: Mapping[int, AnyRegion],
    remote: Mapping[int, AnyRegion],
) -> None:
    """Do a batch between regions, given by their numbers: copy all bytes of all regions to host
    memory, move there, copy those that were written back. Raises TransferError.
    """
    ours = {number: _bytes_of(region) for number, region in local.items()}
    theirs = {number: _bytes_of(region) for number, region in remote.items()}
    for each in ops:
        here = ours[each.local_region][each.local_offset :][: each.num_bytes]
        there = theirs[each.remote_region][each.remote_offset :][: each.num_bytes]
        if op is Op.READ:
            here[:] = there
        else:
            there[:] = here
    for regions, contents in ((local, ours),) if op is Op.READ else ((remote, theirs),):
        for number, region in regions.items():
            if isinstance(region, DeviceRegion):
                write_now(region.memory, [(0, region.num_bytes)], contents[number])
            else:
                region.buffer[:] = contents[number]


def _bytes_of(region: AnyRegion) -> memoryview:
    return memoryview(bytearray().join(region.read([(0, region.num_bytes)])))
