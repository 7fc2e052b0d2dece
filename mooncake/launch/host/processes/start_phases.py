"""Measures how long the phases of a start take, and keeps imports short. Each process logs its own
phases, and `benchmarks startup` reads them in the log.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_SAID = re.compile(r"([^,;(]+) ([0-9.]+) s \(([0-9.]+) CPU\)")
_BEFORE = "started in "


class Phase(NamedTuple):
    name: str
    wall_s: float
    cpu_s: float
    """The CPU time of all threads of the process."""


class StartPhases:
    """Measures the phases of one process, one after the other; `begin` ends the one before."""

    def __init__(
        self,
        first: str,
        began_s: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`first` has run since `began_s` by the clock, and counts all CPU time so far. None: it
        begins now.
        """
        self._clock, self._cpu_clock = clock, cpu_clock
        self._ended: list[Phase] = []
        self._name = first
        self._began_s = clock() if began_s is None else began_s
        self._began_cpu_s = cpu_clock() if began_s is None else 0.0

    def begin(self, name: str) -> None:
        """End the running phase and begin `name`, unless `name` is running already."""
        if name != self._name:
            now_s, cpu_s = self._clock(), self._cpu_clock()
            self._ended.append(Phase(self._name, now_s - self._began_s, cpu_s - self._began_cpu_s))
            self._name, self._began_s, self._began_cpu_s = name, now_s, cpu_s

    def ended(self) -> list[Phase]:
        """Return the phases that have ended; phases of one name are added up."""
        found: dict[str, Phase] = {}
        for name, wall_s, cpu_s in self._ended:
            before = found.get(name, Phase(name, 0.0, 0.0))
            found[name] = Phase(name, before.wall_s + wall_s, before.cpu_s + cpu_s)
        return list(found.values())

    def text(self) -> str:
        phases = self.ended()
        each = ", ".join(f"{name} {wall:.2f} s ({cpu:.2f} CPU)" for name, wall, cpu in phases)
        return f"{_BEFORE}{sum(phase.wall_s for phase in phases):.2f} s: {each}"


def phases_said(line: str) -> list[Phase]:
    """Return the phases in a log line; empty if the line says nothing about them."""
    _, found, said = line.partition(_BEFORE)
    if not found:
        return []
    _, _, said = said.partition(": ")
    return [Phase(name.strip(), float(wall), float(cpu)) for name, wall, cpu in _SAID.findall(said)]


def process_began_s() -> float:
    """Return when this process began, by `time.monotonic`'s clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Stop garbage collection during imports: modules are no garbage, and scanning them again and
    again takes an eighth of the time of their import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
