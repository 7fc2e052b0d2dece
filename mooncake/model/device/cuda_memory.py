"""Copies between a CUDA GPU and pinned host memory, beside the model's own work, and access to its
memory for NICs. Thin: others decide what is copied and when.

Each direction has one stream, so copies end in order. A thread waits for each and reports it.
Streams and events are torch's; everything else is the driver's (`cuda_driver`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import queue
from collections.abc import Callable
from typing import Any

import torch

from mooncake.base import TransferError
from mooncake.base.vital_thread import VitalThread
from mooncake.model.copies import Mark
from mooncake.model.device.cuda import CudaCopies
from mooncake.model.device.cuda_driver import Gpu
from mooncake.transfer.device import CopyDone, DmaBuf
from mooncake.transfer.topology import ANYWHERE, has_peer_memory

_LOG = logging.getLogger(__name__)
_PAGE = 2**16
"""Ranges shown to NICs consist of whole pages of this length, as allocations do."""


class CudaDevice:
    """A `device_pages.PageDevice`: one GPU of this process. It lives as long as the process."""

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        """`gpu`: the same GPU as the driver knows it. Raises TransferError when there is
        no driver.
        """
        self._device = torch.device("cuda", device.index or 0)
        self._gpu = gpu or Gpu(self._device.index or 0)
        self._cuda: Any = torch.cuda
        self._copies = CudaCopies(self._device)
        self._streams = {out: self._cuda.Stream(self._device) for out in (True, False)}
        self._ends = {out: _Ends(f"copies-{'out' if out else 'in'}") for out in (True, False)}
        self._marks = _Ends("guesses")

    @property
    def name(self) -> str:
        return str(self._device)

    @property
    def copies(self) -> CudaCopies:
        return self._copies

    def run(self, out: bool, work: Callable[[], None], done: CopyDone) -> None:
        stream, error = self._streams[out], None
        try:
            with torch.inference_mode(), self._cuda.stream(stream):
                work()
        except Exception as failure:  # any failure must reach the waiting caller
            error = f"{self.name}: {failure}"
        try:
            ended = self._cuda.Event(blocking=True)
            ended.record(stream)
        except Exception as failure:
            done(error or f"{self.name}: {failure}")
            return
        # A call that failed half way may have begun copies. They end first.
        self._ends[out].tell(ended.synchronize, done, error)

    def when(self, mark: Mark, done: CopyDone) -> None:
        self._marks.tell(mark.reached, done)

    # ------------------------------------------------------------ host memory

    def pin(self, buffer: memoryview) -> None:
        """Page-lock host memory. Raises TransferError."""
        try:
            self._gpu.pin(_address(buffer), buffer.nbytes)
        except TransferError as error:
            raise TransferError(
                f"{self.name} cannot pin {buffer.nbytes} bytes of host memory ({error.message}); "
                "raise the limit of locked memory ('ulimit -l unlimited')"
            ) from error

    def unpin(self, buffer: memoryview) -> None:
        try:
            self._gpu.unpin(_address(buffer))
        except TransferError as error:  # it ends with the process
            _LOG.warning("%s: %s", self.name, error.message)

    # ------------------------------------------------------------ NICs

    @functools.cached_property
    def location(self) -> str:
        try:
            return f"gpu:{self._gpu.pci_address}"
        except TransferError:
            return ANYWHERE

    @functools.cached_property
    def _shows_writes(self) -> bool:
        """Whether the GPU can be made to see writes by NICs."""
        try:
            return self._gpu.orders_writes or self._gpu.can_flush
        except TransferError:
            return False

    def reachable_by_nics(self) -> bool:
        return has_peer_memory() and self._shows_writes

    def dmabuf(self, address: int, num_bytes: int) -> DmaBuf | None:
        first = address // _PAGE * _PAGE
        length = -(-(address + num_bytes - first) // _PAGE) * _PAGE
        try:
            if not (self._shows_writes and self._gpu.has_dmabufs):
                return None
            return DmaBuf(self._gpu.dmabuf(first, length), address - first)
        except TransferError as error:
            _LOG.info("%s shows no dmabuf of its memory: %s", self.name, error.message)
            return None

    def flush(self) -> None:
        if not self._gpu.orders_writes:
            self._gpu.flush()


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class _Ends:
    """A thread that waits for one operation after another and reports each result."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], CopyDone, str | None]] = (
            queue.SimpleQueue()
        )
        VitalThread(self._run, name).start()

    def tell(self, wait: Callable[[], None], done: CopyDone, error: str | None = None) -> None:
        """Call `done` with the result after `wait` returns. `error` is a failure that is known
        beforehand.
        """
        self._waiting.put((wait, done, error))

    def _run(self) -> None:
        while True:
            wait, done, error = self._waiting.get()
            try:
                wait()
            except Exception as failure:  # any error: later callers wait for their results too
                error = error or str(failure)
            done(error)
