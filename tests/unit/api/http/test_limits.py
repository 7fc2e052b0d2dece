"""Budgets and permits of a key, at times that the test says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from mooncake.api.config import ApiKey
from mooncake.api.http.limits import (
    SLO_TBT,
    SLO_TTFT,
    Account,
    Budget,
    Limited,
    latency_limits,
)
from mooncake.base import InvalidRequest, Priority


def account(**limits: int) -> Account:
    return Account(ApiKey(digest=b"", name="alice", **limits))


def refusal(taken: Account, now: float) -> Limited:
    with pytest.raises(Limited) as caught:
        taken.enter(now)
    return caught.value


def test_a_key_without_limits_is_never_refused() -> None:
    free = account()
    for _ in range(1000):
        free.enter(0.0)
        free.charge(10**9, 0.0)
    assert free.num_running == 1000


def test_requests_a_minute() -> None:
    limited = account(requests_per_min=3)
    for _ in range(3):
        limited.enter(10.0)
    error = refusal(limited, 10.0)
    assert (error.reason, error.http_status) == ("key_requests_per_min", 429)
    assert error.retry_after_s == pytest.approx(20.0)
    assert "'alice': 3 requests a minute" in error.message
    assert refusal(limited, 25.0).retry_after_s == pytest.approx(5.0)
    limited.enter(30.0)
    refusal(limited, 30.0)


def test_tokens_are_paid_back_before_the_next_request() -> None:
    limited = account(tokens_per_min=60)
    limited.enter(0.0)
    limited.charge(50, 0.0)
    limited.enter(0.0)
    limited.charge(100, 0.0)
    error = refusal(limited, 0.0)
    assert error.reason == "key_tokens_per_min"
    assert error.retry_after_s == pytest.approx(91.0)
    refusal(limited, 90.0)
    limited.enter(91.0)


def test_requests_at_a_time() -> None:
    limited = account(max_concurrent=2)
    limited.enter(0.0)
    limited.enter(0.0)
    assert refusal(limited, 1e9).reason == "key_concurrency"
    limited.leave()
    limited.enter(0.0)
    assert limited.num_running == 2
    limited.leave()
    limited.leave()
    with pytest.raises(AssertionError, match="did not have"):
        limited.leave()


def test_repeats_take_no_permit() -> None:
    limited = account(max_concurrent=1)
    for _ in range(3):
        limited.enter(0.0, repeats=True)
    limited.enter(0.0)
    for _ in range(4):
        limited.enter(0.0, repeats=True)
        limited.leave(repeats=True)
        assert refusal(limited, 0.0).reason == "key_concurrency"
    limited.leave()
    limited.enter(0.0)


def test_repeats_count_among_the_requests_of_a_minute_and_need_no_tokens() -> None:
    limited = account(requests_per_min=3, tokens_per_min=10)
    limited.enter(0.0)
    limited.charge(20, 0.0)
    for _ in range(2):
        limited.enter(0.0, repeats=True)
    with pytest.raises(Limited, match="3 requests a minute"):
        limited.enter(0.0, repeats=True)


def test_a_refused_request_costs_nothing() -> None:
    limited = account(requests_per_min=2, max_concurrent=1)
    limited.enter(0.0)
    for _ in range(5):
        refusal(limited, 0.0)
    limited.leave()
    limited.enter(0.0)
    limited.leave()
    assert refusal(limited, 0.0).reason == "key_requests_per_min"


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), max_size=50),
    st.floats(0, 2000),
)
def test_advice_is_exact_and_nothing_is_given_twice(
    per_min: int, steps: list[tuple[float, float]], amount: float
) -> None:
    budget = Budget(per_min)
    now = spent = 0.0
    for pause_s, cost in steps:
        now += pause_s
        budget.spend(cost, now)
        spent += cost
        assert budget.level(now) <= per_min
        assert budget.level(now) + spent <= per_min * (1 + now / 60) + 1e-6
    wait_s = budget.wait_s(amount, now)
    assert wait_s >= 0
    assert budget.level(now + wait_s) >= min(amount, per_min) - 1e-6


def limits_of(
    *values: tuple[str, str], priority: Priority = Priority.INTERACTIVE, **of_key: int
) -> tuple[float | None, float | None]:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in values]
    key = ApiKey(digest=b"", name="alice", **of_key) if of_key else None
    return latency_limits(Headers(raw=raw), key, priority)


def test_limits_on_latency_come_from_headers_then_from_the_key() -> None:
    assert limits_of() == (None, None)
    assert limits_of((SLO_TTFT, "1500"), (SLO_TBT, "12.5")) == (1.5, 0.0125)
    defaults = {"slo_ttft_ms": 500, "slo_tbt_ms": 40}
    assert limits_of(**defaults) == (0.5, 0.04)
    assert limits_of((SLO_TBT, "80"), **defaults) == (0.5, 0.08)
    assert limits_of(priority=Priority.BATCH, **defaults) == (None, None)


@pytest.mark.parametrize("header", [SLO_TTFT, SLO_TBT])
@pytest.mark.parametrize(
    "value",
    ["", "0", "0.999", "-5", "nan", "1e3", "5 ms", "3600000.001", "99999999", "\u00b3", "1_0"],
)
def test_a_limit_on_latency_out_of_range_is_named_with_its_range(header: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{header}: .* from 1 to 3600000, not ") as caught:
        limits_of((header, value))
    assert caught.value.param == header


def test_the_ends_of_the_range_are_in_it() -> None:
    assert limits_of((SLO_TTFT, "1"), (SLO_TBT, "3600000")) == (0.001, 3600.0)


def test_a_limit_on_latency_is_given_once() -> None:
    with pytest.raises(InvalidRequest, match="not '5, 9'"):
        limits_of((SLO_TBT, "5"), (SLO_TBT, "9"))


def test_a_key_has_a_strictest_limit_on_latency() -> None:
    bounds = {"min_slo_ttft_ms": 200, "min_slo_tbt_ms": 30}
    assert limits_of((SLO_TTFT, "200"), (SLO_TBT, "30"), **bounds) == (0.2, 0.03)
    with pytest.raises(InvalidRequest, match="from 200 to 3600000 with this API key, not '199'"):
        limits_of((SLO_TTFT, "199"), **bounds)
    with pytest.raises(InvalidRequest, match="from 30 to 3600000 with this API key"):
        limits_of((SLO_TBT, "29.9"), **bounds)


def test_batch_work_has_no_limit_on_latency() -> None:
    with pytest.raises(InvalidRequest, match=f"^{SLO_TBT}: batch work waits"):
        limits_of((SLO_TBT, "100"), priority=Priority.BATCH)
