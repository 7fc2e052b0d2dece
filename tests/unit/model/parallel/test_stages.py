"""What a stage says of its times where a device computes for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mooncake.base import Shape
from mooncake.model.copies import HostCopies
from mooncake.model.parallel.stages import Stage
from tests.support.model.thread_group import ThreadGroup


class Clock:
    """The time, which passes while the host waits for a device."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Busy(HostCopies):
    """To a device that has 4 s of work whenever the host waits for it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> Busy:  # type: ignore[override]
        return self

    def reached(self) -> None:
        self._clock.now_s += 4.0


def test_the_seconds_of_a_stage_are_those_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device does before a step begins, as waiting for who has not received yet, is none
    of the step's.
    """
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    last, first = (
        Stage(group, Shape(pp=2), 4, Busy(clock) if group.rank else None)
        for group in ThreadGroup.make(2)
    )
    row = torch.arange(3.0)[None]
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(last.receive, row)
        first.begin()
        first.send(row)
        assert torch.equal(receiving.result(), row)
    assert last.seconds[0] == 4.0
