"""Makes a process slow, as other load on its machine would."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def in_short_turns(process: psutil.Process) -> Iterator[None]:
    """Have a process stand still most of the time, never for long."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.05):
            process.send_signal(signal.SIGSTOP)
            ended.wait(0.3)
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
