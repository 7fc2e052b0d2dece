"""Copies between a CUDA GPU and pinned host memory, beside the model's own work, and access to its
memory for NICs. Thin: others decide what is copied and when.

Each direction has one stream, so copies end in order. A thread waits for each and reports it.
Streams and events are torch's; everything else is the driver's: pinned memory, dmabuf, write
ordering. Every call of the driver is declared as in cuda.h (12 and 13), and its return code is
checked. Of the driver this module owns only a reference to the GPU's primary context, the one in
which torch computes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import queue
from collections.abc import Callable, Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import torch

from mooncake.base import TransferError
from mooncake.base.threads import VitalThread
from mooncake.model.copies import Mark
from mooncake.model.device.cuda import CudaCopies
from mooncake.transfer.device import CopyDone, DmaBuf
from mooncake.transfer.topology import ANYWHERE, has_peer_memory

LIBRARY = "libcuda.so.1"
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuMemGetHandleForAddressRange": (c_void_p, c_uint64, c_size_t, c_int, c_uint64),
    "cuFlushGPUDirectRDMAWrites": (c_int, c_int),
}
"""The library's symbols. cuda.h maps the names in manuals to those with a version."""

_PORTABLE = 1
"""CU_MEMHOSTREGISTER_PORTABLE: pinned for all contexts."""
_FLUSH_OPTIONS, _FLUSH_BY_HOST = 117, 1
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS and its bit for the call below."""
_WRITES_ORDERING = 118
"""CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING"""
_DMA_BUF_SUPPORTED = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED"""
_DMA_BUF_FD = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD"""
_CURRENT_CONTEXT, _TO_OWNER = 0, 100
"""CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX and _TO_OWNER, a scope. An ordering that is
not less than a scope makes flushing to it needless."""


class Driver:
    """The library. Raises TransferError when there is none, or when a call fails."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _FUNCTIONS.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:
            raise TransferError(f"the CUDA driver cannot be used: {error}") from error
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises TransferError with the driver's error."""
        code = int(getattr(self._library, name)(*arguments))
        if code != 0:
            said = c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            raise TransferError(f"{name}: {(said.value or b'').decode() or f'CUDA error {code}'}")


class Gpu:
    """One GPU as the driver knows it. Any thread may call it. Raises TransferError when a call
    fails.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._handle, self._context = c_int(), c_void_p()
        self._driver.call("cuDeviceGet", ctypes.byref(self._handle), ordinal)
        # Never released: the context lives while somebody retains it, and torch needs it.
        self._driver.call(
            "cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._handle.value
        )

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make this GPU's context current on the calling thread. A thread begins without one, and
        torch sets none for the first device.
        """
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def _attribute(self, number: int) -> int:
        value = c_int()
        handle = self._handle.value
        self._driver.call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
        return value.value

    @property
    def pci_address(self) -> str:
        """The address as sysfs writes it, e.g. "0000:3b:00.0"."""
        name = ctypes.create_string_buffer(32)
        self._driver.call("cuDeviceGetPCIBusId", name, len(name), self._handle.value)
        return name.value.decode().lower()

    # ------------------------------------------------------------ host memory

    def pin(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory for copies to and from all GPUs."""
        with self._current():
            self._driver.call("cuMemHostRegister_v2", address, num_bytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """Undo `pin`."""
        with self._current():
            self._driver.call("cuMemHostUnregister", address)

    # ------------------------------------------------------------ NICs

    @functools.cached_property
    def orders_writes(self) -> bool:
        """Whether this GPU sees what a NIC has written without a flush."""
        return self._attribute(_WRITES_ORDERING) >= _TO_OWNER

    @functools.cached_property
    def can_flush(self) -> bool:
        """Whether `flush` is available."""
        return bool(self._attribute(_FLUSH_OPTIONS) & _FLUSH_BY_HOST)

    def flush(self) -> None:
        """Return when all work begun on this GPU afterwards sees what NICs have written."""
        with self._current():
            self._driver.call("cuFlushGPUDirectRDMAWrites", _CURRENT_CONTEXT, _TO_OWNER)

    @functools.cached_property
    def has_dmabufs(self) -> bool:
        """Whether `dmabuf` is available. It needs the kernel's support."""
        return bool(self._attribute(_DMA_BUF_SUPPORTED))

    def dmabuf(self, address: int, num_bytes: int) -> int:
        """Return a new descriptor of whole pages of the GPU's memory. The pages belong to one
        allocation, or are mapped side by side.
        """
        fd = c_int(-1)
        with self._current():
            self._driver.call(
                "cuMemGetHandleForAddressRange",
                ctypes.byref(fd),
                address,
                num_bytes,
                _DMA_BUF_FD,
                0,
            )
        return fd.value


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
            _LOG.info("%s exports no dmabuf of its memory: %s", self.name, error.message)
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
