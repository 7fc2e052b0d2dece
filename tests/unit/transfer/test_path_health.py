"""A broken path rests, is tried once, and comes back: never a blacklist."""

from __future__ import annotations

from mooncake.transfer.net.retries import Breaker, BreakerLimits

LIMITS = BreakerLimits(first_s=1.0, longest_s=4.0)


def test_closed_until_something_fails() -> None:
    breaker = Breaker(LIMITS)
    breaker.tried()
    assert breaker.may_try(0.0)
    assert breaker.is_closed
    assert breaker.next_try_s() is None


def test_after_one_failure_one_attempt_may_go_at_once() -> None:
    breaker = Breaker(LIMITS)
    breaker.failed(10.0)
    assert breaker.may_try(10.0)
    breaker.tried()
    assert not breaker.may_try(10.0)
    assert breaker.next_try_s() is None
    breaker.succeeded()
    assert breaker.is_closed
    assert breaker.may_try(10.0)


def test_each_further_failure_doubles_the_rest_up_to_a_bound() -> None:
    breaker = Breaker(LIMITS)
    breaker.failed(0.0)
    for rest_s in (1.0, 2.0, 4.0, 4.0, 4.0):
        breaker.tried()
        breaker.failed(100.0)
        assert breaker.next_try_s() == 100.0 + rest_s
        assert not breaker.may_try(100.0 + rest_s - 0.01)
        assert breaker.may_try(100.0 + rest_s)


def test_an_attempt_that_says_nothing_frees_the_way_for_the_next() -> None:
    breaker = Breaker(LIMITS)
    breaker.failed(0.0)
    breaker.tried()
    breaker.untried()
    assert breaker.may_try(0.0)
    assert not breaker.is_closed


def test_however_many_failures_it_is_tried_again() -> None:
    breaker = Breaker(LIMITS)
    for _ in range(10_000):
        breaker.failed(0.0)
    assert breaker.may_try(LIMITS.longest_s)
