"""Asynchronous copies between host and device: the port, and the version for a CPU. Layers are
reported in order as the device completes them, while the host continues.

`device.cuda.CudaCopies` implements it for a GPU. On the CPU nothing has to be copied, and a layer
is done when it is reported. On a device, kernels start long before they end, and a receiver of
`LayerDone` may read the pages at once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from mooncake.base.threads import VitalThread


class Arriving(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Return the tensor once it has arrived. Only this call may block."""


class Mark(Protocol):
    """A point in the order of the device's work."""

    def reached(self) -> None:
        """Block until all work before the mark has ended."""


class Copies(Protocol):
    """Copies small tensors. The host must not change a tensor after passing it."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return a host tensor's copy on the device, in the order of the device's work."""

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Start copying a device tensor to the host, in the order of the device's work."""

    def mark(self) -> Mark | None:
        """Return a mark after all work begun so far, or None if that work has ended already."""


class Here:
    """A tensor that has arrived."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        return self._values


class HostCopies:
    """Copies for a device that is the host."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def fetch(self, values: torch.Tensor) -> Arriving:
        return Here(values)

    def mark(self) -> None:
        """Return None, because work on the host has ended when its call returns."""


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
