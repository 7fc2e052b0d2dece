"""Decides whether a decode worker has room for one more request: pure arithmetic over blocks."""

from __future__ import annotations


def has_room(num_needed: int, num_available: int, num_running: int) -> bool:
    """Return whether `num_needed` pages may be reserved now.

    Every running sequence keeps one page to grow into, so a reservation never forces a preemption
    at once.
    """
    return num_needed + num_running <= num_available


def may_reserve(num_needed: int, num_reserved: int, num_total: int) -> bool:
    """Return whether a request may hold `num_needed` pages while prefill computes its prompt.

    Such pages cannot be taken back. So all of them together may take half of the pages, except for
    a single larger request. The rest belongs to running sequences, which yield to a tenant or class
    below its share.
    """
    half = num_total // 2
    return num_reserved + num_needed <= half or num_reserved <= half < num_needed


def can_ever_fit(num_blocks: int, num_total: int) -> bool:
    """Return whether a request of `num_blocks` blocks fits an otherwise empty worker of `num_total`
    pages, with one page to grow into.
    """
    return num_blocks + 1 <= num_total


MAX_PASSED = 32
"""Requests that may pass a waiting one that might run before resting pages return."""
MAX_WAITING_LOOKED_AT = 16
"""After this many requests without room, no further one is considered."""


def may_be_passed(
    num_needed: int,
    num_available: int,
    num_resting: int,
    num_running: int,
    num_total: int,
    num_passed: int,
) -> bool:
    """Return whether requests that fit may pass one that does not fit.

    They may if it waits for resting pages, to which a lost peer might still write. If it cannot run
    before these return, any number may pass: nobody passes any more once the pages are back, so
    none delays it by more than its own time. If it could also run when others end, `MAX_PASSED` may
    pass.
    """
    if num_resting == 0:
        return False
    if not can_ever_fit(num_needed, num_total - num_resting):
        return True
    return num_passed < MAX_PASSED and has_room(
        num_needed, num_available + num_resting, num_running
    )
