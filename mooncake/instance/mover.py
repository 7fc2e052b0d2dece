"""Bytes between this instance's pages and block places elsewhere: the only caller of the transfer
port here.

Owns which batch belongs to whom; each batch's one end reaches the one callback it was started
with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mooncake.base.kv_layout import BlockPlaces, KvLayout
from mooncake.transfer.engine import Op, Transfer, TransferBatch, TransferDone, TransferOp

Ended = Callable[[TransferDone, float], None]


class SliceMover:
    """Copies slices (one layer of one block) between local pages and remote places."""

    def __init__(
        self, layout: KvLayout, transfer: Transfer, region_id: int, num_pages: int
    ) -> None:
        self.layout = layout
        self._transfer = transfer
        self._region_id = region_id
        self._page_stride = layout.slice_bytes
        self._layer_stride = num_pages * layout.slice_bytes
        self._ended: dict[int, Ended] = {}

    @property
    def num_in_flight(self) -> int:
        return len(self._ended)

    def move(
        self,
        op: Op,
        places: BlockPlaces,
        slices: Iterable[tuple[int, int, int]],
        deadline_s: float,
        ended: Ended,
    ) -> int:
        """Start one batch and return its id.

        Each slice is (page, offset of the block at the remote place, layer). `ended` is called
        once.
        """
        size = self.layout.slice_bytes
        ops = [
            TransferOp(
                self._region_id,
                page * self._page_stride + layer * self._layer_stride,
                places.region,
                offset + layer * places.layer_stride,
                size,
            )
            for page, offset, layer in slices
        ]
        batch_id = self._transfer.submit(
            TransferBatch(op=op, peer=places.segment, ops=ops, deadline_s=deadline_s)
        )
        self._ended[batch_id] = ended
        return batch_id

    def cancel(self, batch_id: int) -> None:
        """Ask a batch to stop; its callback still comes."""
        self._transfer.cancel(batch_id)

    def on_done(self, done: TransferDone, now: float) -> None:
        """Bring the end of a batch to whoever started it."""
        ended = self._ended.pop(done.batch_id, None)
        if ended is not None:
            ended(done, now)
