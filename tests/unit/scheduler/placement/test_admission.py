"""Refusals say why and when to come back; permits are counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import Overloaded, SeededIds, Unavailable
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import (
    JITTER,
    MAX_RETRY_S,
    OWN_LIMIT_REASONS,
    Rejection,
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


def refused(
    config: SchedulerConfig, ttft_s: float, tbt_s: float, share: float = 1.0, **own: float
) -> Rejection:
    rejection = check_limits(config, request(**own), ttft_s, tbt_s, share)
    assert rejection is not None
    return rejection


def test_a_refusal_by_the_requests_own_limit_says_so_with_what_is_predicted() -> None:
    for config in (STRICT, SchedulerConfig()):
        late = refused(config, 1.5, 0.01, ttft_slo_s=0.05)
        assert (late.status, late.reason) == (429, "request_ttft_limit")
        assert "in about 1.5 s" in late.message
        assert "this request's own limit of 50 ms" in late.message
        slow = refused(config, 0.01, 0.02, tbt_slo_s=0.0125)
        assert (slow.status, slow.reason) == (429, "request_tbt_limit")
        assert "every 20 ms" in slow.message
        assert "this request's own limit of 12.5 ms" in slow.message
        assert not late.permanent


def test_a_longer_limit_on_the_first_token_replaces_the_clusters() -> None:
    patient = request(ttft_slo_s=10.0)
    assert check_limits(STRICT, patient, 5.0, 0.01) is None
    assert refused(STRICT, 11.0, 0.01, ttft_slo_s=10.0).reason == "ttft_limit"
    assert refused(STRICT, 8.6, 0.01, 0.85, ttft_slo_s=10.0).reason == "ttft_limit"


def test_a_longer_limit_on_gaps_lets_nobody_slow_the_others_of_the_batch() -> None:
    assert refused(STRICT, 0.1, 0.5, tbt_slo_s=1.0).reason == "tbt_limit"


def test_a_request_may_use_all_of_its_own_limit() -> None:
    assert check_limits(STRICT, request(ttft_slo_s=1.0), 0.99, 0.01, share=0.7) is None
    assert check_limits(STRICT, request(ttft_slo_s=1.9), 1.5, 0.01, share=0.7) is not None


TIMES = st.floats(0.001, 100.0)
LIMITS = st.none() | TIMES


@given(
    cluster=st.tuples(LIMITS, LIMITS), own=st.tuples(LIMITS, LIMITS),
    predicted=st.tuples(TIMES, TIMES), share=st.sampled_from([0.6, 0.85, 1.0]),
)  # fmt: skip
def test_own_limits_only_ever_refuse_more_save_a_longer_one_on_the_first_token(
    cluster: tuple[float | None, float | None],
    own: tuple[float | None, float | None],
    predicted: tuple[float, float],
    share: float,
) -> None:
    config = SchedulerConfig(ttft_slo_s=cluster[0], tbt_slo_s=cluster[1])
    asks = request(ttft_slo_s=own[0], tbt_slo_s=own[1])
    without = check_limits(config, request(), *predicted, share)
    found = check_limits(config, asks, *predicted, share)
    too_strict = any(
        mine is not None and seconds > mine and (shared is None or mine < share * shared)
        for mine, shared, seconds in zip(own, cluster, predicted, strict=True)
    )
    assert too_strict == (found is not None and found.reason in OWN_LIMIT_REASONS)
    if found is not None:
        late = "ttft" in found.reason
        limit_s = (config.ttft_limit_s if late else config.tbt_limit_s)(asks)
        assert limit_s is not None
        assert predicted[not late] > share * limit_s
    elif without is not None:
        assert without.reason == "ttft_limit"
        assert own[0] is not None
        assert cluster[0] is not None
        assert own[0] > cluster[0]
    if found is None:
        for seconds, limit_s in zip(predicted, own, strict=True):
            assert limit_s is None or seconds <= limit_s
        assert cluster[1] is None or predicted[1] <= share * cluster[1]


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
