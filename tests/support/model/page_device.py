"""A device for KV pages that is not there: the model computes on the CPU, and nothing but copies in
its order brings bytes to the pages or from them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch

from mooncake.model.copies import HostCopies, Mark
from mooncake.model.opening import ModelSource
from mooncake.transfer.device import CopyDone, DmaBuf


class FarDevice:
    """A `PageDevice`; copies run in the caller's thread and are counted."""

    def __init__(self) -> None:
        self.copies = HostCopies()
        self.num_copies = {True: 0, False: 0}
        """Out, in."""
        self.pinned: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "far:0"

    @property
    def location(self) -> str:
        return "anywhere"

    def run(self, out: bool, work: Callable[[], None], done: CopyDone) -> None:
        with self._lock:
            self.num_copies[out] += 1
        with torch.inference_mode():
            work()
        done(None)

    def when(self, mark: Mark, done: CopyDone) -> None:
        mark.reached()
        done(None)

    def pin(self, buffer: memoryview) -> None:
        self.pinned.append((_address(buffer), buffer.nbytes))

    def unpin(self, buffer: memoryview) -> None:
        self.pinned.remove((_address(buffer), buffer.nbytes))

    def flush(self) -> None:
        raise AssertionError("no NIC reaches it")

    def reachable_by_nics(self) -> bool:
        return False

    def dmabuf(self, address: int, num_bytes: int) -> DmaBuf | None:
        del address, num_bytes
        return None


def _address(buffer: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


class FarPages(ModelSource):
    """A model on the CPU whose pages are a `FarDevice`'s: what owns pages is told so."""

    def __init__(self, *opened: Any) -> None:
        super().__init__(*opened)
        self.far = self._device.page_device = FarDevice()

    @property
    def owns_pages(self) -> bool:
        return True
