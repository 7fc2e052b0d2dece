"""Ends a process when a thread that it cannot work without has failed."""

from __future__ import annotations

import logging
import os
import sys
import threading

from mooncake.base.threads import VitalThread

_log = logging.getLogger(__name__)


def end_with_vital_threads() -> None:
    """From now on, end this process when an exception leaves a `VitalThread`. Requests that wait
    for the thread then go on elsewhere, or end with a reason; otherwise they would wait for ever.
    Use it only in processes that are ours alone.
    """
    others = threading.excepthook

    def on_fault(fault: threading.ExceptHookArgs) -> None:
        if not isinstance(fault.thread, VitalThread) or fault.exc_value is None:
            others(fault)
            return
        _log.critical(
            "thread %s failed, and this process ends: nothing in it goes on without that thread",
            fault.thread.name, exc_info=fault.exc_value,
        )  # fmt: skip
        sys.stderr.flush()
        os._exit(1)

    threading.excepthook = on_fault
