"""Who goes first and who yields. Pure functions of sequences; the one place that knows the order.

One total order serves both ends: priority class, then the turn its gateway gave it, then arrival.
The waiting line is served from its front, pages are taken back from its rear. So the first sequence
of all can never be made to yield, and something always moves.
"""

from __future__ import annotations

from collections.abc import Iterable

from mooncake.engine.sequence import Sequence


def priority_class(sequence: Sequence) -> int:
    """Return 0 for premium, 1 for interactive, 2 for batch."""
    return sequence.request.priority.order


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Return the place in the order: smaller goes first. Unique in an engine."""
    return priority_class(sequence), sequence.turn, sequence.arrival


def last_in_order(sequences: Iterable[Sequence]) -> Sequence | None:
    """Return the one that yields first: the last in turn of the lowest class."""
    return max(sequences, key=rank, default=None)
