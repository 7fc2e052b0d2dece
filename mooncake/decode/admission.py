"""Whether a decode worker has room for one more request: pure arithmetic over blocks."""

from __future__ import annotations


def has_room(num_needed: int, num_available: int, num_running: int) -> bool:
    """Return whether `num_needed` pages may be reserved now.

    Every running sequence keeps one page to grow into, so that a reservation never forces a
    preemption at once.
    """
    return num_needed + num_running <= num_available


def can_ever_fit(num_blocks: int, num_total: int) -> bool:
    """Return whether a request of `num_blocks` blocks fits an otherwise empty worker of `num_total`
    pages, with one page to grow into.
    """
    return num_blocks + 1 <= num_total
