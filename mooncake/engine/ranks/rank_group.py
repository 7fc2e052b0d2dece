"""What the lead of an instance of several ranks decides: one log of steps to all followers, and one
end for all of them. Pure: links, processes and exchanges are ports.

The ranks compute every step together. So whatever ends one of them ends the instance: a death, a
refusal, or an exchange that a rank does not join. Only the first such event counts, and it is the
reported reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import Drafted, RankMessage, StepWriter, UsePages, Way

SIGN_S = 1.0
"""Seconds between two signs of life of a rank."""
LEAD_SILENT_S = 30.0
"""When the lead gives no sign of life for this many seconds, its followers end, whatever they wait
for.
"""
SILENT_S = 10.0
"""When a follower gives no sign of life for this many seconds, the lead ends the instance."""


class Followers(Protocol):
    """The other ranks of an instance, as their lead reaches them."""

    def tell(self, message: RankMessage) -> None:
        """Send a message to all followers, in order. Raises OSError when one of them has gone."""

    def end(self) -> None:
        """End all followers at once, whatever they do."""


class LeadRanks:
    """The lead's state about its followers."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._writer = StepWriter()
        self._signs: dict[int, float] = {}
        """When each follower that has given a sign of life gave the last one."""
        self.lost: str | None = None
        """Why this instance cannot go on; None: it can."""

    def use_pages(self, pages: UsePages) -> None:
        """Tell all followers to compute over these pages, and to forget all sequences."""
        self._writer = StepWriter()
        self._followers.tell(pages)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Tell followers, with the next step, to forget sequences that ended or begin anew."""
        self._writer.forget(sequence_ids)

    def step(
        self,
        slots: Sequence[StepSlot],
        logprob_rows: Mapping[int, int],
        way: Way = Way.AS_IT_COMES,
        *,
        reported_as: int | None = None,
    ) -> None:
        """Tell all followers to compute the slots that this rank is about to compute.

        logprob_rows: sequences whose prompt tokens' log-probabilities are wanted -> rows.
        reported_as: see `RankStep`.
        """
        self._followers.tell(self._writer.pack(slots, logprob_rows, way, reported_as=reported_as))

    def drafted(self, slots: Sequence[StepSlot]) -> None:
        """Tell stages before the last which drafts were made for a step that they have heard of."""
        self._followers.tell(Drafted.of(slots))

    def gone(self, rank: int) -> None:
        """Record that a follower's process has ended."""
        self.fail(f"rank {rank} of this model has ended")

    def alive(self, rank: int, now: float) -> None:
        """Record a follower's sign of life."""
        self._signs[rank] = now

    def check_signs(self, now: float, silent_s: float) -> None:
        """Fail when a follower has given no sign of life for `silent_s`. Call `alive` for all signs
        that have come first, because this process may itself have been stopped.
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
        """Let every follower compare what it holds with the lead's view, and fail when that
        differs.

        Raises:
            AssertionError: the followers hold pages of other sequences than these.
        """
        held = self._writer.held
        others = held.num_pages.keys() - sequences
        assert not others, f"followers hold pages of sequences that have ended: {sorted(others)}"
        self._followers.tell(held)
