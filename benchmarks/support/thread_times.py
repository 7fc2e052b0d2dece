"""CPU time of the threads of some processes, and how often they waited, as the kernel counts them:
where the time of one call goes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

LEAST_CPU_S = 2e-6
"""A thread that takes less for a call is not shown."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Spent(msgspec.Struct):
    """What one thread has spent so far, or for one call."""

    cpu_s: float
    kernel_s: float
    """The part of it that the kernel took, among it copies from and to sockets. It is counted in
    ticks of the clock, so it needs many calls.
    """
    num_waits: float

    def since(self, before: Spent, num_calls: int) -> Spent:
        """Return what one of the calls since then took."""
        return Spent(*(
            (now - then) / num_calls
            for now, then in zip(
                msgspec.structs.astuple(self), msgspec.structs.astuple(before), strict=True
            )
        ))  # fmt: skip


def own_names() -> dict[int, str]:
    """Return the names of this process's threads by their ids."""
    return {each.native_id: each.name for each in threading.enumerate() if each.native_id}


def read(pid: int) -> dict[int, Spent]:
    """Return what each thread of a process has spent so far."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu_ns = int((task / "schedstat").read_text().split()[0])
        ticks = int((task / "stat").read_text().rpartition(")")[2].split()[12])
        waits = (task / "status").read_text().partition("\nvoluntary_ctxt_switches:")[2]
        found[int(task.name)] = Spent(cpu_ns / 1e9, ticks / _TICKS_PER_S, int(waits.split()[0]))
    return found


def measure(
    call: Callable[[], object], num_calls: int, processes: Mapping[str, int]
) -> dict[tuple[str, int], Spent]:
    """Call so often; return what each thread of `processes` (name -> pid) took for one call, by
    the name of its process and its id, the most costly first.
    """
    before = {name: read(pid) for name, pid in processes.items()}
    for _ in range(num_calls):
        call()
    took = {
        (name, thread): spent.since(before[name].get(thread, Spent(0, 0, 0)), num_calls)
        for name, pid in processes.items()
        for thread, spent in read(pid).items()
    }
    shown = {each: spent for each, spent in took.items() if spent.cpu_s >= LEAST_CPU_S}
    return dict(sorted(shown.items(), key=lambda entry: -entry[1].cpu_s))
