"""The order of sequences: which is served first, and which yields. Pure; the only place that
defines it.

One total order serves both ends: priority class, then the turn that the gateway assigned, then
arrival. The waiting queue is served from its front, and pages are taken back from its rear. So the
first sequence of all never yields, and there is always progress.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.engine.sequence import Sequence


def priority_class(sequence: Sequence) -> int:
    """Return 0 for premium, 1 for interactive, 2 for batch."""
    return sequence.request.priority.order


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Return the sort key: smaller goes first. Unique in an engine."""
    return priority_class(sequence), sequence.turn, sequence.arrival


def last_in_order(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the sequence that yields first: the last in turn of the lowest class."""
    return max(sequences, key=rank, default=None)
