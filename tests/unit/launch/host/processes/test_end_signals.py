"""A second signal to end hurries, unless the kernel repeats that of a parent's end."""

from __future__ import annotations

import os

import pytest

from mooncake.launch.host.processes import end_signals
from mooncake.launch.host.processes.end_signals import EndSignals


@pytest.mark.parametrize("bound", [False, True])
def test_the_second_signal_hurries_and_no_repetition_after_the_parents_end(
    bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_signals, "_ends_with_its_parent", lambda: bound)
    signals, orphan = EndSignals(), EndSignals()
    assert not signals.has_come
    assert [signals.hurries() for _ in range(3)] == [False, True, True]
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert [orphan.hurries() for _ in range(3)] == [False, not bound, not bound]
    assert orphan.has_come
