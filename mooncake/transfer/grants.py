"""Who may touch registered memory, and until when: grants and loans. Thread-safe, except `Resting`.

A grant is one writer's permission for some memory. Each of its writes carries the grant's number,
and the owner's side refuses a number that was revoked. The owner keeps one word for each slot: the
least number that is still valid there. The numbers of a slot only grow. So a number that was never
issued here is valid until it is revoked: a lead issues numbers for its followers. What each engine
issues for its staging windows has slots of its own, so the two never meet. The words lie in memory
that peers of this host can read. Memory of a revoked grant rests until nothing can write by the
grant any more. It rests for a time if nobody can tell.

Workers may reach all registered memory. A pool client reaches only what the owner has lent it:
pieces to write, until it reports that they are written, and pieces to read, until it unpins them. A
loan is withdrawn like a region: it is marked, and then the gates of all threads that touch memory
are passed. After that nothing of that client touches the piece.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from mooncake.base.errors import TransferError

if TYPE_CHECKING:
    from mooncake.transfer.engine import Pieces

NUM_SLOTS = 2**16
"""Grants that may be open at a time, half of them for windows."""


class Fence(IntEnum):
    """The answer to whether a revoked grant may still be written by. The largest of several answers
    counts.
    """

    CLOSED = 0
    """No write is possible: the memory may be used for others."""
    OPEN = 1
    """A writer has a copy in hand. Its end will be known, or the end of the writer's process."""
    UNKNOWN = 2
    """Hardware may still write, and nobody here can tell when it is done."""


class Words(Protocol):
    """Numbers below 2^64, one for each slot; 0 at first."""

    def __getitem__(self, slot: int, /) -> int: ...

    def __setitem__(self, slot: int, number: int, /) -> None: ...


class _Slots:
    """Slots that are free."""

    def __init__(self, all_slots: range) -> None:
        self._returned: list[int] = []
        self._untaken = iter(all_slots)

    def take(self) -> int:
        """Return a slot. Raises TransferError when none is free."""
        if self._returned:
            return self._returned.pop()
        slot = next(self._untaken, None)
        if slot is None:
            raise TransferError(f"more than {NUM_SLOTS // 2} grants would be open at once")
        return slot

    def give_back(self, slot: int) -> None:
        self._returned.append(slot)


class Grants:
    """The grants of one engine."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._lock = threading.Lock()
        half = NUM_SLOTS // 2
        self._slots = _Slots(range(half)), _Slots(range(half, NUM_SLOTS))
        """Those for memory, and those for windows."""
        self._open: set[int] = set()
        self._last = 0

    @property
    def num_open(self) -> int:
        """Grants that were issued here and not revoked."""
        return len(self._open)

    def issue(self, *, window: bool = False) -> int:
        """Return a new number, never 0. Raises TransferError when too many are open. window: it is
        for a staging window of this engine, not for memory of which a lead may issue numbers.
        """
        with self._lock:
            slot = self._slots[window].take()
            self._last += 1
            number = self._last * NUM_SLOTS + slot
            self._open.add(number)
            return number

    def revoke(self, number: int) -> None:
        """Refuse a number from now on; nothing happens when it was revoked before."""
        slot = number % NUM_SLOTS
        with self._lock:
            if self._words[slot] <= number:
                self._words[slot] = number + 1
            if number in self._open:
                self._open.remove(number)
                self._slots[slot >= NUM_SLOTS // 2].give_back(slot)

    def close(self) -> None:
        """Release the words. Nobody writes here by a grant after this."""
        with self._lock:
            self._words = defaultdict(int)

    def permit(self, number: int) -> Permit:
        """Return what a write by this number must hold."""
        return Permit(self._words, number)


class Permit:
    """One grant as a writer holds it: a `regions.Withdrawable`."""

    __slots__ = ("_slot", "_words", "number")

    def __init__(self, words: Words, number: int) -> None:
        self._words = words
        self._slot = number % NUM_SLOTS
        self.number = number

    @property
    def withdrawn(self) -> str | None:
        """The reason why nothing may be written by it any more, or None."""
        if self._words[self._slot] <= self.number:
            return None
        return revoked(self.number)


def revoked(number: int) -> str:
    """Return the error text for a grant number that was revoked."""
    return f"grant {number} was revoked"


HeldT = TypeVar("HeldT", bound=Sized)
FIRST_LOOK_S = 0.02
"""A writer that went on before it saw the revocation is seen at work by then."""
LOOK_AGAIN_S = 0.25


@dataclass(slots=True)
class _Rest(Generic[HeldT]):
    grant: int
    held: HeldT
    since_s: float
    look_s: float


class Resting(Generic[HeldT]):
    """Pages or blocks whose grants were revoked."""

    def __init__(
        self,
        fence: Callable[[int], Fence],
        rest_s: float,
        give_back: Callable[[HeldT], None],
    ) -> None:
        """`rest_s`: how long to wait if `fence` cannot tell."""
        self._fence = fence
        self._rest_s = rest_s
        self._give_back = give_back
        self._resting: list[_Rest[HeldT]] = []

    @property
    def num_held(self) -> int:
        """Pages, or blocks, that rest."""
        return sum(len(rest.held) for rest in self._resting)

    def held_by(self, grant: int) -> list[HeldT]:
        """Return what rests because of a grant."""
        return [rest.held for rest in self._resting if rest.grant == grant]

    def add(self, grant: int, held: HeldT, now: float) -> None:
        """Take over the memory of a grant that has just been revoked."""
        if held:
            self._resting.append(_Rest(grant, held, now, now + FIRST_LOOK_S))

    def tick(self, now: float) -> float | None:
        """Give back what nobody can write to any more. Return when to call again."""
        due = [rest for rest in self._resting if rest.look_s <= now]
        for rest in due:
            match self._fence(rest.grant):
                case Fence.OPEN:
                    rest.look_s = now + LOOK_AGAIN_S
                    continue
                case Fence.UNKNOWN if now < rest.since_s + self._rest_s:
                    rest.look_s = min(now + LOOK_AGAIN_S, rest.since_s + self._rest_s)
                    continue
            self._resting.remove(rest)
            self._give_back(rest.held)
        return min((rest.look_s for rest in self._resting), default=None)


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
        """End one loan of each piece. The client touches no piece without a loan once this
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
        """Return the loans that cover (region, offset, length) ranges, or None if not all are
        lent.
        """
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
