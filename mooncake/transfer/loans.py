"""Which pieces of registered memory pool clients may touch, and for how long.

Workers reach all that is registered. A pool client reaches what its owner has lent it: pieces that
it is to write, until it says that it has, and pieces that it may read, until it unpins them. Like a
region, a loan is withdrawn by marking it and passing the gates of all threads that touch memory:
afterwards nothing of that client touches the piece any more. Thread-safe.
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
        """How often it was lent and not taken back: a client may pin a block twice."""
        self.withdrawn: str | None = None


class Loans:
    """What the owner of a region has lent of it, piece by piece of one size."""

    def __init__(self, pass_gates: Callable[[], None]) -> None:
        """`pass_gates` returns once no thread is still at what it began before."""
        self._pass_gates = pass_gates
        self._lock = threading.Lock()
        self._piece_bytes: dict[int, int] = {}
        """By region id."""
        self._lent: dict[tuple[str, int, bool], dict[int, Loan]] = {}
        """(holder, region id, is to be written) -> number of the piece -> loan."""

    @property
    def num_open(self) -> int:
        """Loans that were not taken back."""
        with self._lock:
            return sum(loan.count for lent in self._lent.values() for loan in lent.values())

    def lend(self, holder: str, region_id: int, pieces: Pieces, *, write: bool) -> None:
        """Lend pieces to a client, all of a region of one size.

        holder: the channel key of its certificate.
        """
        size = pieces.num_bytes
        with self._lock:
            assert self._piece_bytes.setdefault(region_id, size) == size
            lent = self._lent.setdefault((holder, region_id, write), {})
            for offset in pieces.offsets:
                lent.setdefault(offset // size, Loan()).count += 1

    def take_back(self, holder: str, region_id: int, pieces: Pieces, *, write: bool) -> None:
        """End a loan of each piece. What is not lent any more, the client does not touch once this
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
                    loan.withdrawn, ended = "it was lent and is not any more", True
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
