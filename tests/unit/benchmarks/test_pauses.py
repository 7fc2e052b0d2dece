"""The rows of `benchmarks pauses`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import pauses
from benchmarks.support.faults import Fault


class FakeStreams:
    """Clients whose longest pause is one of 7 s, as soon as something is killed."""

    def __init__(self, clock: list[float], *, ends: bool) -> None:
        self._clock = clock
        self._ends = ends

    def go_on(self, count: int, limit_s: float, holds: Callable[[], bool] | None = None) -> bool:
        assert count == pauses.NUM_AFTER
        if holds is None:
            return True
        assert holds()
        self._clock[0] += 50.0 if self._ends else limit_s
        return self._ends

    def pause_s(self, begin_s: float, end_s: float) -> float:
        return 7.0 if end_s > begin_s else 0.5

    def num_failed(self, begin_s: float) -> int:
        return 2


@pytest.mark.parametrize(
    ("ends", "row"),
    [(True, "0.5 s | 7.0 s | 50 s | 2"), (False, "0.5 s | 7.0 s | not within 180 s | 2")],
)
def test_what_clients_saw_is_told_also_when_what_was_killed_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, ends: bool, row: str
) -> None:
    """Otherwise nobody knows whether they waited for it."""
    clock, killed = [100.0], list[str]()
    monkeypatch.setattr(pauses, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    clients: Any = FakeStreams(clock, ends=ends)
    fault = Fault("url", lambda: killed.append("it"), lambda: killed == ["it"])
    assert pauses.measure(clients, fault, 180.0) == row
