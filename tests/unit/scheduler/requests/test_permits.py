"""Permits are bounded and given back once; a cancelled one takes no turn."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import GenerateRequest, Priority
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


def test_log_probabilities_of_a_prompt_delay_the_tenants_next_turn() -> None:
    """They are computed without a cache: each counts as one more token of the prompt."""
    turns: list[float] = []
    for wanted in (None, 0, 3):
        permits = AdmissionPermits(9)
        scored = request("scored", num_prompt_logprobs=wanted)
        position = permits.acquire(scored, 0.0)
        assert isinstance(position, QueuePosition)
        permits.confirm(scored, position)
        after = permits.acquire(request("after"), 0.0)
        assert isinstance(after, QueuePosition)
        turns.append(after.order[0] * Priority.INTERACTIVE.weight - len(A.prompt_tokens))
        permits.cancel(request("after"))
        permits.release(scored, 5)
        permits.check_integrity([])
    num_tokens = len(A.prompt_tokens)
    assert turns == [num_tokens, 2 * num_tokens, 5 * num_tokens]


def test_a_permit_cannot_be_given_back_twice() -> None:
    permits = AdmissionPermits(2)
    permits.acquire(A, 0.0)
    permits.cancel(A)
    with pytest.raises(AssertionError):
        permits.cancel(A)
    with pytest.raises(AssertionError):
        permits.check_integrity([A])


def acquired(
    permits: AdmissionPermits, name: str, tenant: str, priority: Priority = Priority.INTERACTIVE
) -> GenerateRequest | None:
    sequence = request(name, tenant=tenant, priority=priority)
    position = permits.acquire(sequence, 0.0)
    if isinstance(position, Rejection):
        return None
    permits.confirm(sequence, position)
    return sequence


def test_a_tenant_that_is_alone_leaves_permits_to_others() -> None:
    """Its calls ask for all 1,024."""
    permits = AdmissionPermits(1024)
    taken = [acquired(permits, f"flood-{number}", "flood") for number in range(1024)]
    assert len(taken) - taken.count(None) == 878
    assert acquired(permits, "mine", "other"), "at once, not after the flood was noticed"


PRESENT = st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(Priority))
"""Who asks or gives back: a tenant, in a class."""


@given(
    bound=st.integers(1, 40),
    floods=st.lists(st.tuples(PRESENT, st.integers(1, 60), st.booleans()), max_size=12),
    newcomers=st.lists(PRESENT, min_size=1, max_size=12, unique=True),
)
def test_a_newcomer_is_admitted_at_once_after_any_floods_whatever_the_bound(
    bound: int, floods: list[tuple[tuple[str, Priority], int, bool]],
    newcomers: list[tuple[str, Priority]],
) -> None:  # fmt: skip
    """Tenants ask for many permits, in any class, and some give a few of theirs back. Then all who
    have none of a class get one of it, and the bound is passed by these alone.
    """
    permits, names = AdmissionPermits(bound), count()
    held: list[GenerateRequest] = []
    for (tenant, priority), asked, gives_back in floods:
        got = [acquired(permits, f"r{next(names)}", tenant, priority) for _ in range(asked)]
        held += [one for one in got if one is not None]
        if gives_back:
            for one in [one for one in held if one.tenant == tenant][::2]:
                permits.release(one, 0)
                held.remove(one)
        permits.check_integrity(held)
    for tenant, priority in newcomers:
        has_one = any((one.tenant, one.priority) == (tenant, priority) for one in held)
        mine = acquired(permits, f"r{next(names)}", f"new-{tenant}", priority)
        again = acquired(permits, f"r{next(names)}", tenant, priority)
        assert mine is not None
        assert again is not None or has_one
        held += [one for one in (mine, again) if one is not None]
        permits.check_integrity(held)
    flows = {(one.tenant, one.priority) for one in held}
    assert len(held) <= bound + len(flows) - 1
    for one in held:
        permits.release(one, 0)
    permits.check_integrity([])


def test_four_floods_and_six_permits() -> None:
    """What was found: the floods took all, one after another, and so did one tenant all of six."""
    for bound, tenants in ((1024, "abcd"), (6, "a")):
        permits = AdmissionPermits(bound)
        for tenant in tenants:
            for number in range(bound):
                acquired(permits, f"{tenant}-{number}", tenant)
        assert acquired(permits, "mine", "other")
        assert not acquired(permits, "mine too", "other"), "until one ends: no more are free"


def test_one_permit_is_given_to_one_tenant() -> None:
    permits = AdmissionPermits(1)
    assert acquired(permits, "mine", "only")
