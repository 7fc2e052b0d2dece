"""The pages of ranks that have their own memories: how the lead tells a follower to move them, and
the follower's machine that moves them.

A follower begins a move only once it has computed as far as the lead knew the stage to be when it
ordered the move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from mooncake.base.kv_layout import Move, PageArray, SegmentRef
from mooncake.engine.ranks.kv_moves import (
    AskFence,
    Fenced,
    Hashed,
    HashPages,
    Moved,
    Progress,
    RankAnswer,
    RankWord,
    Revoke,
    StartMove,
    StopMove,
)
from mooncake.instance.mover import RankPages
from mooncake.transfer.engine import Op, TransferDone
from mooncake.transfer.grants import FIRST_LOOK_S, LOOK_AGAIN_S, Fence


class RankLink(Protocol):
    """The lead's way to reach its followers."""

    def progress_of(self, rank: int) -> Progress:
        """Return how far a rank has computed, as far as the lead knows."""

    def tell_rank(self, rank: int, word: RankWord) -> None:
        """Send a message to a follower. Never blocks for long."""


class FollowerPages:
    """The pages in a follower's memory, as its lead sees them: a `RankPages`."""

    def __init__(
        self,
        rank: int,
        array: PageArray,
        segment: SegmentRef,
        region_id: int,
        link: RankLink,
        *,
        verify: bool,
    ) -> None:
        """`verify`: whether the follower hashes what it has read."""
        self.array = array
        self.segment = segment
        self.region_id = region_id
        self._rank = rank
        self._link = link
        self._verify = verify
        self._last_number = 0
        self._fences: dict[int, Fence] = {}
        """The fences of grants that the follower was asked about; OPEN until it answers."""

    def start(self, op: Op, move: Move, deadline_s: float) -> int:
        number, after = self._next(), self._link.progress_of(self._rank)
        verify = self._verify and op is Op.READ
        self._link.tell_rank(self._rank, StartMove(number, op, move, after, deadline_s, verify))
        return number

    def cancel(self, number: int) -> None:
        self._link.tell_rank(self._rank, StopMove(number))

    def hash(self, pages: Sequence[int]) -> int:
        number = self._next()
        after = self._link.progress_of(self._rank)
        self._link.tell_rank(self._rank, HashPages(number, list(pages), after))
        return number

    def revoke(self, grant: int) -> None:
        self._link.tell_rank(self._rank, Revoke(grant))

    def on_fenced(self, grant: int, fence: Fence) -> None:
        self._fences[grant] = fence

    def fence(self, grant: int) -> Fence:
        found = self._fences.get(grant)
        if found is None:
            self._link.tell_rank(self._rank, AskFence(grant))
            found = self._fences[grant] = Fence.OPEN
        elif found is not Fence.OPEN:
            del self._fences[grant]
        return found

    def _next(self) -> int:
        self._last_number += 1
        return self._last_number


class Reached(msgspec.Struct, frozen=True):
    """An event: this follower has computed further."""


class FollowerMoves:
    """A follower's machine: it carries out what the lead says about the pages in its memory (see
    `base.machine.Machine`).
    """

    def __init__(self, pages: RankPages, answer: Callable[[RankAnswer], None]) -> None:
        self._pages = pages
        self._answer = answer
        self.progress: Progress = (0, 0)
        """Set by the thread that computes. If `waiting` is not empty then, that thread has
        `Reached` handled too.
        """
        self.waiting: list[StartMove | HashPages] = []
        """Moves in the order of the lead's messages, and so in the order of progress."""
        self._moves: dict[int, StartMove] = {}
        """Moves by number here."""
        self._hashes: dict[int, tuple[int, Moved | None]] = {}
        """Number here -> the lead's number, and the end of the move that brought these
        blocks.
        """
        self._fences: dict[int, float] = {}
        """Revoked grants that the lead has asked about -> when to look at each."""

    @property
    def quiet(self) -> bool:
        """True if nothing waits or is under way."""
        return not (self.waiting or self._moves or self._hashes)

    def handle(self, event: msgspec.Struct, now: float) -> None:
        match event:
            case StartMove() | HashPages():
                self.waiting.append(event)
                self._start_due()
            case StopMove():
                self._stop(event.number)
            case Revoke():
                self._pages.revoke(event.grant)
            case AskFence():
                self._fences[event.grant] = now + FIRST_LOOK_S
            case Reached():
                self._start_due()
            case TransferDone():
                self._on_done(event)
            case Hashed():
                self._on_hashed(event)

    def tick(self, now: float) -> float | None:
        for grant in [grant for grant, look_s in self._fences.items() if look_s <= now]:
            fence = self._pages.fence(grant)
            if fence is Fence.OPEN:
                self._fences[grant] = now + LOOK_AGAIN_S
            else:
                del self._fences[grant]
                self._answer(Fenced(grant, fence))
        return min(self._fences.values(), default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when something that is due still waits."""
        assert all(word.after > self.progress for word in self.waiting)

    def _start_due(self) -> None:
        while self.waiting and self.waiting[0].after <= self.progress:
            word = self.waiting.pop(0)
            if isinstance(word, HashPages):
                self._hashes[self._pages.hash(word.pages)] = (word.number, None)
            else:
                number = self._pages.start(word.op, word.move, word.deadline_s)
                self._moves[number] = word

    def _stop(self, number: int) -> None:
        for word in self.waiting:
            if isinstance(word, StartMove) and word.number == number:
                self.waiting.remove(word)
                self._answer(Moved(TransferDone(batch_id=number, error="cancelled")))
                return
        for here, word in self._moves.items():
            if word.number == number:
                self._pages.cancel(here)

    def _on_done(self, done: TransferDone) -> None:
        word = self._moves.pop(done.batch_id)
        moved = Moved(msgspec.structs.replace(done, batch_id=word.number))
        if word.verify and done.error is None:
            self._hashes[self._pages.hash(word.move.pages)] = (word.number, moved)
        else:
            self._answer(moved)

    def _on_hashed(self, done: Hashed) -> None:
        number, moved = self._hashes.pop(done.number)
        if moved is None:
            self._answer(Hashed(number, done.checksums))
        else:
            self._answer(msgspec.structs.replace(moved, checksums=done.checksums))
