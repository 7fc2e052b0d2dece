"""Refusals say why and when to come back; permits are counted."""

import pytest

from mooncake.base import Overloaded, SeededIds, Unavailable
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import (
    JITTER,
    MAX_RETRY_S,
    check_limits,
    draining,
    no_decode,
    reject,
    spread_retry,
    too_large,
)
from tests.support.scheduler.scheduling import request

STRICT = SchedulerConfig(ttft_slo_s=2.0, tbt_slo_s=0.1)


def test_no_limit_lets_everything_in() -> None:
    assert check_limits(SchedulerConfig(), request(), 1e6, 1e6) is None


def test_limits_are_inclusive() -> None:
    assert check_limits(STRICT, request(), 2.0, 0.1) is None


@pytest.mark.parametrize(
    ("ttft_s", "tbt_s", "reason", "text"),
    [(3.5, 0.01, "ttft_limit", "3.5 s"), (1.0, 0.25, "tbt_limit", "250 ms")],
)
def test_a_missed_limit_is_429_with_reason(
    ttft_s: float, tbt_s: float, reason: str, text: str
) -> None:
    rejection = check_limits(STRICT, request(), ttft_s, tbt_s)
    assert rejection is not None
    assert (rejection.status, rejection.reason) == (429, reason)
    assert text in rejection.message
    assert rejection.retry_after_s is not None
    assert rejection.retry_after_s >= 1
    assert not rejection.permanent
    failure = rejection.failure()
    assert (failure.status, failure.error_type) == (429, Overloaded.error_type)


def test_the_requests_own_limits_go_first() -> None:
    assert check_limits(STRICT, request(ttft_slo_s=10.0, tbt_slo_s=1.0), 5.0, 0.5) is None
    assert check_limits(SchedulerConfig(), request(ttft_slo_s=1.0), 5.0, 0.0) is not None
    assert check_limits(SchedulerConfig(), request(tbt_slo_s=0.1), 0.0, 0.5) is not None


def test_advice_stays_in_bounds_and_is_spread() -> None:
    rejection = reject(Overloaded, "x", "text", 1e9)
    assert rejection.retry_after_s == MAX_RETRY_S
    ids = SeededIds(1)
    advice = {spread_retry(rejection, ids).retry_after_s for _ in range(20)}
    assert len(advice) > 10
    assert all(MAX_RETRY_S <= a <= MAX_RETRY_S * (1 + JITTER) for a in advice if a is not None)
    assert spread_retry(too_large(10), ids) == too_large(10)


def test_what_can_be_retried_is_told_from_what_cannot() -> None:
    assert too_large(5).permanent
    assert too_large(5).status == 400
    assert not no_decode().permanent
    assert not draining().permanent
    assert no_decode().status == draining().status == Unavailable.http_status
