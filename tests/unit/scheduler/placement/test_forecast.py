"""Who will decode when a request gets there: arrivals added, endings taken off, each once."""

from __future__ import annotations

import pytest

from mooncake.base import CostSample, Role
from mooncake.scheduler.placement.forecast import DecodeForecast
from mooncake.scheduler.placement.views import InstanceView
from tests.support.scheduler.scheduling import hello

STAY_S = 10.0
PROFILE = [
    CostSample(batch, batch * context, batch, 0.01 * batch)
    for batch in (1, 2, 4, 8)
    for context in (0, 100)
]
"""A worker whose gap between tokens is 10 ms a sequence."""


def view(max_num_seqs: int = 0) -> InstanceView:
    return InstanceView.of(hello("d0", Role.DECODE, profile=PROFILE, max_num_seqs=max_num_seqs))


def sequences(tbt_s: float) -> int:
    return round(tbt_s / 0.01)


def test_now_counts_only_what_decodes() -> None:
    forecast, worker = DecodeForecast(), view()
    forecast.add("a", "d0", 100, ready_s=1.0)
    forecast.add("b", "d0", 100, ready_s=1.0)
    forecast.add("elsewhere", "d1", 100, ready_s=1.0)
    assert sequences(forecast.tbt_now_s(worker, 100, 1.0)) == 1
    forecast.on_joined("a", 1.0)
    assert sequences(forecast.tbt_now_s(worker, 100, 1.0)) == 2


def test_arrivals_before_that_time_are_added() -> None:
    forecast, worker = DecodeForecast(), view()
    for index in range(4):
        forecast.add(f"r{index}", "d0", 100, ready_s=float(index))
    assert sequences(forecast.tbt_at_s(worker, 100, 0.0, 1.5, STAY_S)) == 3
    assert sequences(forecast.tbt_at_s(worker, 100, 0.0, 3.0, STAY_S)) == 5


def test_one_that_is_overdue_is_still_to_come() -> None:
    forecast, worker = DecodeForecast(), view()
    forecast.add("late", "d0", 100, ready_s=1.0)
    assert sequences(forecast.tbt_at_s(worker, 100, 500.0, 501.0, STAY_S)) == 2


def seven_that_decode(forecast: DecodeForecast) -> None:
    for index in range(7):
        forecast.add(f"r{index}", "d0", 100, ready_s=0.0)
        forecast.on_joined(f"r{index}", 0.0)


def test_those_that_will_have_ended_are_taken_off() -> None:
    forecast, worker = DecodeForecast(), view()
    for _ in range(500):  # an empty house lately: nobody else is to be expected
        forecast.tbt_at_s(worker, 100, 0.0, 0.0, STAY_S)
    seven_that_decode(forecast)
    at = [sequences(forecast.tbt_at_s(worker, 100, 0.0, t * STAY_S, STAY_S)) for t in (0.01, 1, 3)]
    assert at[0] == 8
    assert at[1] in (4, 5)
    assert at[2] == 1


def test_a_worker_that_is_always_full_is_expected_to_be_full() -> None:
    forecast, worker = DecodeForecast(), view()
    seven_that_decode(forecast)
    at = [sequences(forecast.tbt_at_s(worker, 100, 0.0, t * STAY_S, STAY_S)) for t in (0.01, 1, 3)]
    assert at == [8, 8, 8]


def growing_view() -> InstanceView:
    """A worker whose gap is 10 ms and 10 us for each token in its KV."""
    profile = [
        CostSample(batch, batch * context, batch, 0.01 + 1e-5 * batch * context)
        for batch in (1, 4, 16)
        for context in (10, 1000, 10_000)
    ]
    return InstanceView.of(hello("d0", Role.DECODE, profile=profile))


def test_what_decodes_has_grown_since_it_joined() -> None:
    forecast, worker = DecodeForecast(), growing_view()
    forecast.add("a", "d0", 1000, ready_s=0.0)
    forecast.on_joined("a", 0.0)
    young, old = (forecast.tbt_now_s(worker, 100, now) for now in (0.0, 5.0))
    assert young == pytest.approx(0.01 + 1e-5 * 1100, rel=0.1)
    assert old == pytest.approx(young + 1e-5 * 5.0 / 0.01, rel=0.1)


def test_a_worker_full_of_young_sequences_will_be_slower_than_it_is() -> None:
    forecast, worker = DecodeForecast(), growing_view()
    for index in range(20):
        forecast.add(f"r{index}", "d0", 100, ready_s=0.0)
        forecast.on_joined(f"r{index}", 0.0)
    now_s = forecast.tbt_now_s(worker, 100, 0.0)
    assert forecast.tbt_at_s(worker, 100, 0.0, 0.0, STAY_S) > 1.5 * now_s


def test_the_batch_ends_at_the_workers_seats() -> None:
    forecast, worker = DecodeForecast(), view(max_num_seqs=2)
    for index in range(6):
        forecast.add(f"r{index}", "d0", 100, ready_s=0.0)
        forecast.on_joined(f"r{index}", 0.0)
    assert sequences(forecast.tbt_now_s(worker, 100, 1.0)) == 2


def test_a_request_that_has_left_is_forgotten_once() -> None:
    forecast = DecodeForecast()
    forecast.add("a", "d0", 100, ready_s=0.0)
    assert forecast.num_requests == 1
    forecast.remove("a")
    forecast.remove("a")
    forecast.on_joined("a", 1.0)
    assert forecast.num_requests == 0
    assert forecast.tbt_now_s(view(), 1, 1.0) == pytest.approx(0.01, rel=0.2)
