"""Pages that peers may write to, with a separate grant for each reservation, and pages that rest
because a lost peer might still write to them.

The pages stay held until their reservation ends. It ends at once when its writer has said that it
writes no more. If the writer was lost, it ends as soon as that is certain.
"""

from __future__ import annotations

from collections.abc import Sequence

from mooncake.base.errors import TransferError
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.mover import SliceMover
from mooncake.transfer.engine import Transfer
from mooncake.transfer.grants import Resting


class Reservations:
    """All reservations of one instance."""

    def __init__(
        self, transfer: Transfer, mover: SliceMover, pool: BlockPool, rest_s: float
    ) -> None:
        """`rest_s`: how long pages of a lost writer rest if nobody can tell whether it still
        writes.
        """
        self._transfer = transfer
        self._mover = mover
        self._open: dict[int, list[int]] = {}
        self._pool = pool
        self._resting: Resting[list[int]] = Resting(mover.fence, rest_s, self._give_back)
        self.num_rested = 0
        """How many pages of lost writers may be used again."""

    def _give_back(self, pages: list[int]) -> None:
        self._pool.release(pages)
        self.num_rested += len(pages)

    @property
    def num_resting(self) -> int:
        """Number of pages that may not be used yet, although nobody uses them."""
        return self._resting.num_held

    def open(self, pages: Sequence[int]) -> int | None:
        """Return the grant under which one peer may write to `pages`, which the caller holds.
        Returns None when too many are open.
        """
        try:
            grant = self._transfer.grant()
        except TransferError:
            return None
        self._open[grant] = list(pages)
        return grant

    def end(self, grant: int) -> None:
        """End a reservation whose writer writes no more. The caller still holds the pages."""
        del self._open[grant]
        self._mover.revoke(grant)

    def fence(self, grant: int, held: list[int], now: float) -> None:
        """End a reservation whose writer was lost, and take over the caller's hold on the pages.
        They are released once nothing can be written to them.
        """
        self.end(grant)
        self._resting.add(grant, held, now)

    def may_be_written(self, grant: int) -> set[int]:
        """Return the pages that a write under this grant may land in (for checks)."""
        pages = [self._open.get(grant, []), *self._resting.held_by(grant)]
        return {page for some in pages for page in some}

    def tick(self, now: float) -> float | None:
        """Release pages that need not rest any more. Return when to call again."""
        return self._resting.tick(now)
