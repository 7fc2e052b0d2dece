"""Permits are bounded and given back once; a cancelled one takes no turn."""

from __future__ import annotations

import pytest

from mooncake.scheduler.fairness import QueuePosition
from mooncake.scheduler.placement.admission import Rejection
from mooncake.scheduler.requests.permits import AdmissionPermits
from tests.support.scheduler.scheduling import request

A, B, C = (request(name) for name in "abc")


def test_permits_are_bounded_and_come_back() -> None:
    permits = AdmissionPermits(2)
    for one in (A, B):
        position = permits.acquire(one, 0.0)
        assert isinstance(position, QueuePosition)
        permits.confirm(one, position)
    refused = permits.acquire(C, 0.0)
    assert isinstance(refused, Rejection)
    assert refused.status == 429
    permits.release(A, 0)
    position = permits.acquire(C, 0.0)
    assert isinstance(position, QueuePosition)
    permits.confirm(C, position)
    permits.check_integrity([B, C])


def test_a_cancelled_permit_takes_no_turn() -> None:
    permits = AdmissionPermits(2)
    first = permits.acquire(A, 0.0)
    permits.cancel(A)
    assert permits.acquire(B, 0.0) == first
    permits.cancel(B)
    permits.check_integrity([])


def test_a_permit_cannot_be_given_back_twice() -> None:
    permits = AdmissionPermits(2)
    permits.acquire(A, 0.0)
    permits.cancel(A)
    with pytest.raises(AssertionError):
        permits.cancel(A)
    with pytest.raises(AssertionError):
        permits.check_integrity([A])


def acquired(permits: AdmissionPermits, name: str, tenant: str) -> bool:
    sequence = request(name, tenant=tenant)
    position = permits.acquire(sequence, 0.0)
    if isinstance(position, Rejection):
        return False
    permits.confirm(sequence, position)
    return True


def test_a_tenant_that_is_alone_leaves_permits_to_others() -> None:
    """One call of eight prompts with n=128 asks for all 1,024."""
    permits = AdmissionPermits(1024)
    taken = sum(acquired(permits, f"flood-{number}", "flood") for number in range(1024))
    assert taken == 878
    assert acquired(permits, "mine", "other"), "at once, not after the flood was noticed"


def test_a_newcomer_finds_a_permit_after_any_number_of_floods() -> None:
    permits = AdmissionPermits(1024)
    for tenant in ("a", "b", "c"):
        assert sum(acquired(permits, f"{tenant}-{number}", tenant) for number in range(1024)) > 1
    assert acquired(permits, "mine", "other")


def test_one_permit_is_given_to_one_tenant() -> None:
    permits = AdmissionPermits(1)
    assert acquired(permits, "mine", "only")
