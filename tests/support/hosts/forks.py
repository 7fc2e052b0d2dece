"""Programs of hosts that are forks of the test's process, which has imported what they need: where
the machine is emulated, a new interpreter computes for a quarter of a minute before it says a word.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn

_ENTERED = ("net", "ipc", "uts", "pid", "mnt")
"""The kinds of namespaces that make a host."""


class Fork:
    """What tests use of `subprocess.Popen`: a fork of this process."""

    def __init__(
        self, be: Callable[[], int], environment: Mapping[str, str], output: int = -1
    ) -> None:
        """`be` returns the exit code. `output`: a descriptor; -1: what this process has."""
        self.pid = os.fork()
        if self.pid == 0:
            _be(be, environment, output)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None: it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired if it has not ended by then."""
        if self.poll() is None:
            ends, pidfd = select.poll(), os.pidfd_open(self.pid)
            ends.register(pidfd, select.POLLIN)
            ends.poll(None if timeout is None else timeout * 1000)
            os.close(pidfd)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a fork of this process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _be(be: Callable[[], int], environment: Mapping[str, str], output: int) -> NoReturn:
    """Be a program of its own: no line of what called this runs again."""
    code = 1
    try:
        gc.freeze()  # what is garbage here belongs to the process that was forked
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if output >= 0:
            for number in (1, 2):
                os.dup2(output, number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1) for number in (1, 2))
        os.environ.clear()
        os.environ.update(environment)
        code = be()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def on_host(first: int, home: str, be: Callable[[], int]) -> int:
    """Do `be` in a child on the host whose first process is `first`, and return its exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    files = [os.open(f"/proc/{first}/ns/{kind}", os.O_RDONLY) for kind in _ENTERED]
    for file in files:
        if libc.setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)
    os.chdir(home)
    code = Fork(be, dict(os.environ)).wait()  # only a child is among the host's processes
    return 128 - code if code < 0 else code
