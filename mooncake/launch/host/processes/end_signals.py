"""Tells a second signal to end from the first one, repeated by the kernel."""

from __future__ import annotations

import ctypes
import signal

_PR_GET_PDEATHSIG = 2


class EndSignals:
    """Counts the signals that ask this process to end.

    A process that gets SIGTERM when its parent ends (PR_SET_PDEATHSIG), as those of `mooncake up`,
    may get it once for each thread of the parent. So a further SIGTERM does not ask it to hurry:
    `mooncake up` sends SIGINT for that.
    """

    def __init__(self) -> None:
        self._may_repeat = _signal_of_parents_end() == signal.SIGTERM
        self.has_come = False
        """Whether there was one."""

    def hurries(self, number: int) -> bool:
        """Count a signal. Return whether it asks this process again, and so to hurry."""
        is_first, self.has_come = not self.has_come, True
        return not is_first and not (self._may_repeat and number == signal.SIGTERM)


def _signal_of_parents_end() -> int:
    """Return the signal that this process gets when its parent ends, or 0 for none."""
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value
