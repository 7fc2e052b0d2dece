"""What the lead of an instance of several ranks decides: one log of steps to all followers, and one
end for all of them. Pure: links, processes and exchanges are ports.

The ranks compute every step together. So whatever ends one of them, a death, a refusal, an exchange
that another did not come to, ends the instance: the first such thing is the reason, and is acted
upon once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import RankMessage, StepWriter, UsePages, Way

SIGN_S = 1.0
"""Between two signs of life of a rank."""
LEAD_SILENT_S = 30.0
"""A lead that gives none for so long stands still: its followers end, whatever they wait for."""
SILENT_S = 10.0
"""A follower that gives none for so long stands still, whatever it was doing."""


class Followers(Protocol):
    """The other ranks of an instance, as its lead reaches them."""

    def tell(self, message: RankMessage) -> None:
        """Send to all of them, in order; OSError where one has gone."""

    def end(self) -> None:
        """End all of them at once, whatever they do."""


class LeadRanks:
    """What a lead knows of its followers."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._writer = StepWriter()
        self._signs: dict[int, float] = {}
        """When each follower gave its last sign of life, from its first one on."""
        self.lost: str | None = None
        """Why this instance cannot go on; None: it can."""

    def use_pages(self, pages: UsePages) -> None:
        """Have all followers compute over these pages, with no sequence known any more."""
        self._writer = StepWriter()
        self._followers.tell(pages)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Have followers forget sequences that ended or begin anew, with the next step."""
        self._writer.forget(sequence_ids)

    def step(
        self,
        slots: Sequence[StepSlot],
        logprob_rows: Mapping[int, int],
        way: Way = Way.AS_IT_COMES,
        *,
        reported_as: int | None = None,
    ) -> None:
        """Have all followers compute the slots that this rank is about to compute.

        logprob_rows: sequences whose prompt tokens' log-probabilities are wanted -> rows.
        reported_as: see `RankStep`.
        """
        self._followers.tell(self._writer.pack(slots, logprob_rows, way, reported_as=reported_as))

    def gone(self, rank: int) -> None:
        """A follower's process has ended."""
        self.fail(f"rank {rank} of this model has ended")

    def alive(self, rank: int, now: float) -> None:
        """A follower has given a sign of life."""
        self._signs[rank] = now

    def check_signs(self, now: float, silent_s: float) -> None:
        """Fail where a follower has given none for `silent_s`. All that came must have been told of
        before: this process may itself have stood still.
        """
        for rank, given in self._signs.items():
            if now - given > silent_s:
                self.fail(f"rank {rank} of this model gave no sign of life for {silent_s:g} s")

    def fail(self, why: str) -> None:
        """End all ranks. Only the first call counts."""
        if self.lost is None:
            self.lost = why
            self._followers.end()

    def check_integrity(self, sequences: Collection[int]) -> None:
        """Have every follower compare what it holds, and fail where that differs.

        Raises AssertionError: they hold pages of others than these sequences.
        """
        held = self._writer.held
        others = held.num_pages.keys() - sequences
        assert not others, f"followers hold pages of sequences that have ended: {sorted(others)}"
        self._followers.tell(held)
