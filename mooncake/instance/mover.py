"""Writes slices of this instance's pages to block places elsewhere.

Owns which batch belongs to which push; each batch ends through the callback it was started with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncake.base.kv_layout import BlockPlaces, PageArray
from mooncake.transfer.engine import Op, Transfer, TransferBatch, TransferDone, TransferOp

Ended = Callable[[TransferDone, float], None]


class SliceMover:
    """Copies slices (one layer of one block each) from local pages to remote places."""

    def __init__(self, pages: PageArray, transfer: Transfer, region_id: int) -> None:
        self.layout = pages.layout
        self._pages = pages
        self._transfer = transfer
        self._region_id = region_id
        self._ended: dict[int, Ended] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._ended)

    def move(
        self,
        places: BlockPlaces,
        slices: Iterable[tuple[int, int, int]],
        deadline_s: float,
        ended: Ended,
    ) -> int:
        """Start to write one batch and return its id; `ended` is called once.

        Each slice is (page, byte offset of the block at the remote place, layer).
        """
        size, mine = self.layout.slice_bytes, self._pages
        ops = [
            TransferOp(
                self._region_id,
                mine.offset(page) + layer * mine.layer_stride,
                places.region,
                offset + layer * places.layer_stride,
                size,
            )
            for page, offset, layer in slices
        ]
        batch_id = self._transfer.submit(
            TransferBatch(op=Op.WRITE, peer=places.segment, ops=ops, deadline_s=deadline_s)
        )
        self._ended[batch_id] = ended
        return batch_id

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop; its callback is called when it has."""
        self._transfer.cancel(batch_id)

    def on_done(self, done: TransferDone, now: float) -> None:
        """Call the callback of the batch that ended; an unknown one is ignored."""
        ended = self._ended.pop(done.batch_id, None)
        if ended is not None:
            ended(done, now)
