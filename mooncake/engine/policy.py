"""The order of sequences: which is served first, and which yields. Pure; the only place that
defines it.

Sequences are ordered by turn, which the gateway assigns by class and tenant, then by class, then by
arrival. Turns order the waiting sequences. Running sequences hold seats and pages for long, so each
flow (a tenant in a class) is also due a share of both, by the weight of its class. Where flows
compete, one below its share goes first, and takes what others hold above theirs (`Standing`).
Otherwise the waiting queue is served from its front, and pages are taken back from its rear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from mooncake.base.request import Flow, fair_shares
from mooncake.engine.config import EngineConfig
from mooncake.engine.sequence import Sequence, SequenceState


def rank(sequence: Sequence) -> tuple[float, int, int]:
    """Return the sort key: smaller goes first. It is unique in an engine."""
    return sequence.turn, sequence.flow[0].order, sequence.arrival


def last_in_order(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the sequence that yields first: the last in turn."""
    return max(sequences, key=rank, default=None)


class Standing:
    """How many seats of the batch and pages each flow holds, and how many it is due. A page that
    several sequences share counts for each of them.
    """

    def __init__(
        self,
        config: EngineConfig,
        sequences: Iterable[Sequence],
        flow: Flow | None = None,
        outside: Mapping[Flow, int] = MappingProxyType({}),
    ) -> None:
        """sequences: those that run or wait. flow: a flow that wants a share too. outside: pages
        that flows hold for anything else.
        """
        self._seats: Counter[Flow] = Counter()
        self._pages: Counter[Flow] = Counter(outside)
        self._config = config
        for sequence in sequences:
            self._count(sequence)
        self._shares = fair_shares([*self._pages, *([] if flow is None else [flow])])

    def _count(self, sequence: Sequence, sign: int = 1) -> None:
        self._seats[sequence.flow] += sign * (sequence.state is SequenceState.RUNNING)
        self._pages[sequence.flow] += sign * len(sequence.pages)

    def is_within(self, flow: Flow, num_seats: int = 0, num_pages: int = 0) -> bool:
        """Return whether a flow holds no more than its share after it gets this many more. One seat
        is always within its share.
        """
        share = self._shares[flow]
        most_seats = max(1, int(share * self._config.max_num_seqs))
        return (
            self._seats[flow] + num_seats <= most_seats
            and self._pages[flow] + num_pages <= share * self._config.num_blocks
        )

    def others_above(self, flow: Flow) -> bool:
        """Return whether another flow than `flow` holds more than its share."""
        return any(other != flow and not self.is_within(other) for other in self._shares)

    def give_back(self, flow: Flow, num_pages: int) -> None:
        """Subtract `num_pages` pages from a flow's count."""
        self._pages[flow] -= num_pages

    def above(self, holders: Iterable[Sequence], flow: Flow) -> list[Sequence]:
        """Return the `holders` that other flows than `flow` have above their shares, the last in
        order first. The first sequence of each flow is never among them, so even one that is larger
        than its flow's share can finish.
        """
        ordered = sorted(holders, key=rank)
        firsts = {sequence.flow: sequence for sequence in reversed(ordered)}
        found: list[Sequence] = []
        for sequence in reversed(ordered):
            is_other = sequence.flow != flow and sequence is not firsts[sequence.flow]
            if is_other and not self.is_within(sequence.flow):
                found.append(sequence)
                self._count(sequence, -1)
        for sequence in found:
            self._count(sequence)
        return found
