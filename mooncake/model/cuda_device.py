"""Copies between a CUDA GPU and pinned host memory, beside the model's own work, and what lets NICs
reach its memory. Thin: what is copied and when is decided elsewhere.

One stream each way, so copies end in order; a thread waits for each and tells. Written after the
CUDA driver API: libcuda is called where torch has no name for something.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from mooncake.base import TransferError
from mooncake.model.copies import Mark
from mooncake.model.cuda import CudaCopies
from mooncake.transfer.device import CopyDone, DmaBuf
from mooncake.transfer.topology import ANYWHERE, has_peer_memory

_LOG = logging.getLogger(__name__)
_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all contexts."""
_DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"""
_DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""
_FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER = 0, 100
_PAGE = 2**16
"""Ranges shown to NICs are made of whole pages of this length; allocations are too."""


class CudaDevice:
    """A `device_pages.PageDevice`: one GPU of this process. Lives as long as it."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", device.index or 0)
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
        stream = self._streams[out]
        try:
            with torch.inference_mode(), self._cuda.stream(stream):
                work()
                ended = self._cuda.Event(blocking=True)
                ended.record(stream)
        except Exception as error:  # whatever it was, somebody waits to hear of the end
            done(f"{self.name}: {error}")
            return
        self._ends[out].tell(ended.synchronize, done)

    def when(self, mark: Mark, done: CopyDone) -> None:
        self._marks.tell(mark.reached, done)

    # ------------------------------------------------------------ host memory

    def pin(self, buffer: memoryview) -> None:
        """Page-lock it. Raises TransferError."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        with self._cuda.device(self._device):
            code = int(self._cuda.cudart().cudaHostRegister(address, buffer.nbytes, _PORTABLE))
        if code != 0:
            raise TransferError(
                f"{self.name} cannot pin {buffer.nbytes} bytes of host memory (CUDA error {code}); "
                "raise the limit of locked memory ('ulimit -l unlimited')"
            )

    def unpin(self, buffer: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        with self._cuda.device(self._device):
            self._cuda.cudart().cudaHostUnregister(address)

    # ------------------------------------------------------------ NICs

    @functools.cached_property
    def location(self) -> str:
        name = ctypes.create_string_buffer(32)
        number = self._ordinal()
        if number is None or self._call("cuDeviceGetPCIBusId", name, 32, number) != 0:
            return ANYWHERE
        return f"gpu:{name.value.decode().lower()}"

    def reachable_by_nics(self) -> bool:
        return has_peer_memory()

    def dmabuf(self, address: int, num_bytes: int) -> DmaBuf | None:
        number, has = self._ordinal(), ctypes.c_int(0)
        if number is None:
            return None
        self._call("cuDeviceGetAttribute", ctypes.byref(has), _DMA_BUF_SUPPORTED, number)
        if not has.value:
            return None
        first = address // _PAGE * _PAGE
        length = -(-(address + num_bytes - first) // _PAGE) * _PAGE
        fd = ctypes.c_int(-1)
        with self._cuda.device(self._device):
            code = self._call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                ctypes.c_uint64(first),
                ctypes.c_size_t(length),
                _DMA_BUF_FD,
                ctypes.c_uint64(0),
            )
        if code != 0:
            _LOG.info("%s shows no dmabuf of its memory (CUDA error %d)", self.name, code)
            return None
        return DmaBuf(fd.value, address - first)

    def flush(self) -> None:
        with self._cuda.device(self._device):
            self._call("cuFlushGPUDirectRDMAWrites", _FLUSH_CURRENT_CONTEXT, _FLUSH_TO_OWNER)

    def _ordinal(self) -> ctypes.c_int | None:
        """Return the driver's handle of this GPU."""
        handle = ctypes.c_int(-1)
        found = self._call("cuDeviceGet", ctypes.byref(handle), self._device.index or 0)
        return handle if found == 0 else None

    def _call(self, name: str, *arguments: Any) -> int:
        """Call the driver and return its code; of a function it does not have: -1."""
        try:
            function: Any = getattr(_driver(), name)
        except (AttributeError, OSError):
            return -1
        return int(function(*arguments))


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


class _Ends:
    """A thread that waits for one thing after another and tells how it ended."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], None], CopyDone]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def tell(self, wait: Callable[[], None], done: CopyDone) -> None:
        self._waiting.put((wait, done))

    def _run(self) -> None:
        while True:
            wait, done = self._waiting.get()
            error = None
            try:
                wait()
            except RuntimeError as failure:
                error = str(failure)
            done(error)
