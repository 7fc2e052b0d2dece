"""Whether a decode worker has room for one more request: pure arithmetic over blocks."""

from __future__ import annotations


def has_room(num_needed: int, num_available: int, num_running: int) -> bool:
    """Return whether `num_needed` pages may be reserved now.

    Every running sequence keeps one page to grow into, so that a reservation never forces a
    preemption at once.
    """
    return num_needed + num_running <= num_available


def may_reserve(num_needed: int, num_reserved: int, num_total: int) -> bool:
    """Return whether a request may hold `num_needed` pages while prefill computes its prompt.

    Such pages cannot be taken back, so all together have half, but for one request that is larger:
    the rest is of sequences that run, and yield to a tenant or class below its share.
    """
    half = num_total // 2
    return num_reserved + num_needed <= half or num_reserved <= half < num_needed


def can_ever_fit(num_blocks: int, num_total: int) -> bool:
    """Return whether a request of `num_blocks` blocks fits an otherwise empty worker of `num_total`
    pages, with one page to grow into.
    """
    return num_blocks + 1 <= num_total


MAX_PASSED = 32
"""Requests that may go past one which waits, where it might run before resting pages return."""
MAX_WAITING_LOOKED_AT = 16
"""Requests without room behind which no further one is looked at."""


def may_be_passed(
    num_needed: int,
    num_available: int,
    num_resting: int,
    num_running: int,
    num_total: int,
    num_passed: int,
) -> bool:
    """Return whether requests that fit may go past one which does not.

    They may where it waits for resting pages: those that a lost peer might still write to. Where
    it cannot run before these return, any number may pass: none makes it wait longer than its own
    time, for nobody passes any more once the pages are back. Where it could also run when others
    end, `MAX_PASSED` may.
    """
    if num_resting == 0:
        return False
    if not can_ever_fit(num_needed, num_total - num_resting):
        return True
    return num_passed < MAX_PASSED and has_room(
        num_needed, num_available + num_resting, num_running
    )
