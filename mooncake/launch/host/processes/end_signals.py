"""Tells a second signal to end from the first one, repeated by the kernel."""

from __future__ import annotations

import ctypes
import os

_PR_GET_PDEATHSIG = 2


class EndSignals:
    """Counts the signals that ask this process to end.

    A process that is to end with its parent (PR_SET_PDEATHSIG) may get that signal once for each
    thread of the parent. Such a repetition is nobody's wish that the process should hurry.
    """

    def __init__(self) -> None:
        self._parent = os.getppid() if _ends_with_its_parent() else None
        self.has_come = False
        """Whether there was one."""

    def hurries(self) -> bool:
        """Count a signal. Return whether it is a further one of somebody who does not wait."""
        is_first, self.has_come = not self.has_come, True
        return not is_first and self._parent in (None, os.getppid())


def _ends_with_its_parent() -> bool:
    number = ctypes.c_int()
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(number))
    return number.value != 0
