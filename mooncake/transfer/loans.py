"""Tracks which pieces of registered memory pool clients may touch, and for how long.

Workers may reach all registered memory. A pool client reaches only what the owner has lent it:
pieces to write, until it reports that they are written, and pieces to read, until it unpins them. A
loan is withdrawn like a region: it is marked, and then the gates of all threads that touch memory
are passed. After that nothing of that client touches the piece. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from mooncake.transfer.engine import Pieces


class Loan:
    """One piece lent to one client for one kind of access."""

    __slots__ = ("count", "withdrawn")

    def __init__(self) -> None:
        self.count = 0
        """Number of times it was lent and not taken back: a client may pin a block twice."""
        self.withdrawn: str | None = None


class Loans:
    """The pieces of regions that their owner has lent."""

    def __init__(self, pass_gates: Callable[[], None]) -> None:
        """Use `pass_gates`, which returns once no thread is still at what it began before the
        call.
        """
        self._pass_gates = pass_gates
        self._lock = threading.Lock()
        self._piece_bytes: dict[int, int] = {}
        """Size of the pieces, by region id."""
        self._lent: dict[tuple[str, int, bool], dict[int, Loan]] = {}
        """(holder, region id, is to be written) -> number of the piece -> loan."""

    @property
    def num_open(self) -> int:
        """Loans that were not taken back."""
        with self._lock:
            return sum(loan.count for lent in self._lent.values() for loan in lent.values())

    def lend(self, holder: str, region_id: int, pieces: Pieces, *, write: bool) -> None:
        """Lend pieces to a client. All pieces of a region have one size.

        holder: the channel key of its certificate.
        """
        size = pieces.num_bytes
        with self._lock:
            assert self._piece_bytes.setdefault(region_id, size) == size
            lent = self._lent.setdefault((holder, region_id, write), {})
            for offset in pieces.offsets:
                lent.setdefault(offset // size, Loan()).count += 1

    def take_back(self, holder: str, region_id: int, pieces: Pieces, *, write: bool) -> None:
        """End one loan of each piece. The client touches no piece that is lent no more once this
        has returned.
        """
        name, ended = (holder, region_id, write), False
        with self._lock:
            lent = self._lent.get(name, {})
            for offset in pieces.offsets:
                number = offset // pieces.num_bytes
                loan = lent[number]
                loan.count -= 1
                if not loan.count:
                    loan.withdrawn, ended = "the loan of this memory has ended", True
                    del lent[number]
            if not lent:
                self._lent.pop(name, None)
        if ended:
            self._pass_gates()

    def find(
        self, holder: str, ranges: Iterable[tuple[int, int, int]], *, write: bool
    ) -> list[Loan] | None:
        """Return the loans that cover (region, offset, length) ranges; None: not all are lent."""
        found: list[Loan | None] = []
        with self._lock:
            for region_id, offset, length in ranges:
                lent = self._lent.get((holder, region_id, write))
                if not lent:
                    return None
                size = self._piece_bytes[region_id]
                first, last = offset // size, (offset + length - 1) // size
                if last - first >= len(lent):
                    return None
                found += [lent.get(number) for number in range(first, last + 1)]
        loans = [loan for loan in found if loan is not None]
        return loans if len(loans) == len(found) else None
