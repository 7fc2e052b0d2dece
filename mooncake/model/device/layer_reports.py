"""Reports layers in order as the device completes them, while the host continues: as events of a
lead's runner, and as the progress of a follower.

On a device, kernels start long before they end, and a receiver of `LayerDone` may read the pages at
once. On the host, a layer is done when it is reported.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, TypeVar

from mooncake.base.vital_thread import VitalThread
from mooncake.model.copies import Mark

Report = TypeVar("Report")


class LayerReports(Generic[Report]):
    """One thread, started on first use, that waits for marks one after another."""

    def __init__(self, emit: Callable[[Report], None]) -> None:
        self._emit = emit
        self._waiting: queue.Queue[tuple[Report, Mark] | None] = queue.Queue()
        self._thread: VitalThread | None = None

    def add(self, event: Report, mark: Mark | None) -> None:
        """Emit `event` when `mark` is reached; at once when `mark` is None."""
        if mark is None:
            self._emit(event)
            return
        if self._thread is None:
            self._thread = VitalThread(self._run, "layer-reports")
            self._thread.start()
        self._waiting.put((event, mark))

    def drain(self) -> None:
        """Block until everything added has been emitted."""
        self._waiting.join()

    def close(self) -> None:
        """Emit the remaining events and end the thread."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            event, mark = item
            try:
                mark.reached()
            except RuntimeError:
                pass  # the device has failed, so the step fails and nothing is pushed
            else:
                self._emit(event)
            finally:
                self._waiting.task_done()
        self._waiting.task_done()
