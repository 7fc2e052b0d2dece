"""Hashes blocks in an engine's pages, in a few threads beside the machine's own: see `Hasher`.

Owns its threads. The machine decides which pages, and holds them meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from mooncake.base import PageArray, TransferError
from mooncake.base.mailbox import Mailbox
from mooncake.engine.ranks.kv_moves import Hashed
from mooncake.kvstore.block_checksum import added, checksum_of
from mooncake.kvstore.client.block_memory import BlockMemory
from mooncake.transfer.engine import Region
from mooncake.transfer.regions import HostRegion

_log = logging.getLogger(__name__)
NUM_THREADS = 2
AT_ONCE = 8
"""Layers of a block that are copied, then hashed while they are in a cache."""


class PageHasher:
    """Computes the checksums of one engine's pages: its `Hasher`, which is `Polled`."""

    def __init__(self, region: Region, pages: PageArray) -> None:
        layout = pages.layout
        self._blocks = BlockMemory.strided(region, layout, pages.layer_stride, pages.layers)
        self._array = pages
        self._pages: npt.NDArray[np.uint8] | None = None
        if isinstance(region, HostRegion):
            shape = (
                pages.num_homes_here, len(pages.layers), pages.pages_of_home, layout.slice_bytes
            )  # fmt: skip
            self._pages = np.frombuffer(region.buffer, np.uint8).reshape(shape)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "page-hash")
        self._lock = threading.Lock()
        self._events: Mailbox[Hashed] = Mailbox()
        self._last_op = 0

    def start(self, pages: Sequence[int]) -> int:
        self._last_op += 1
        shares = [list(pages[first::NUM_THREADS]) for first in range(NUM_THREADS)]
        found = [0] * len(pages)
        left = [len(shares)]
        for first, share in enumerate(shares):
            self._threads.submit(self._hash, self._last_op, first, share, found, left)
        return self._last_op

    def _hash(
        self, op_id: int, first: int, share: list[int], found: list[int], left: list[int]
    ) -> None:
        """Hash one thread's share of an operation; the last one reports it."""
        try:
            found[first::NUM_THREADS] = [self.checksum(page) for page in share]
        except TransferError as error:  # of a device; 0 is no checksum that a peer would agree with
            _log.warning("pages cannot be hashed: %s", error.message)
        except Exception:  # whoever waits for the operation has to hear of its end
            _log.exception("pages cannot be hashed")
        with self._lock:
            left[0] -= 1
            if left[0] == 0:
                self._events.put(Hashed(op_id, found))

    def checksum(self, page: int) -> int:
        """Return the checksum of the block in a page, or the part of it that this rank's layers
        contribute. Raises TransferError when a device fails.
        """
        if self._pages is None:
            return self._blocks.checksum(self._array.offset(page))
        home, within = divmod(page, self._array.pages_of_home)
        home = home if self._array.home is None else 0
        # Copies go without the interpreter lock, and so do hashes of long slices: the machine's
        # thread waits for those of a few short ones at most.
        layout, layers, found = self._array.layout, self._array.layers, list[int]()
        for first in range(0, len(layers), AT_ONCE):
            copied = np.ascontiguousarray(self._pages[home, first : first + AT_ONCE, within])
            found.append(checksum_of(copied.data.cast("B"), layout, layers.start + first))
        return added(found)

    def fileno(self) -> int:
        """A descriptor that becomes readable when an operation ended."""
        return self._events.fileno()

    def poll(self) -> Sequence[Hashed]:
        return self._events.receive()

    def close(self) -> None:
        """End what runs and forget what waits. The machine must not be driven after this."""
        self._threads.shutdown(cancel_futures=True)
        self._pages = None
        self._events.close()
