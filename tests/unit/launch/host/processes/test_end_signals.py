"""A second signal to end hurries, unless it may be the kernel's, of the parent's end, repeated."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator

import pytest

from mooncake.launch.host.processes.end_signals import EndSignals

PR_SET_PDEATHSIG = 1


@pytest.fixture
def unbound() -> Iterator[None]:
    yield
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


@pytest.mark.parametrize(
    ("number", "hurries"), [(0, True), (signal.SIGKILL, True), (signal.SIGTERM, False)]
)
def test_the_second_signal_hurries_and_no_repetition(
    number: int, hurries: bool, unbound: None
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    signals = EndSignals()
    assert not signals.has_come
    assert [signals.hurries(signal.SIGTERM) for _ in range(3)] == [False, hurries, hurries]
    assert signals.has_come
    assert signals.hurries(signal.SIGINT)
