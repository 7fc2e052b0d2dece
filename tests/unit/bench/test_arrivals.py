"""Arrival times: rates kept, gaps as bursty as asked for, ramps that grow."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import ConfigError
from mooncake.bench.arrivals import Arrivals, Ramp


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in pairwise([0.0, *times])]


@given(st.floats(0.1, 100), st.floats(0.1, 10), st.integers(1, 200), st.integers(0, 9))
def test_all_are_sent_in_the_time_that_the_rate_gives(
    rate: float, burstiness: float, count: int, seed: int
) -> None:
    times = Arrivals(rate=rate, burstiness=burstiness).times_s(count, seed)
    assert len(times) == count
    assert times == sorted(times)
    assert times[-1] == pytest.approx(count / rate)


def test_no_rate_means_all_at_once() -> None:
    assert Arrivals().times_s(3, 0) == [0.0, 0.0, 0.0]


def test_burstiness_is_the_shape_of_the_gaps() -> None:
    def variation(burstiness: float) -> float:
        found = gaps(Arrivals(rate=10, burstiness=burstiness).times_s(5000, 1))
        return statistics.stdev(found) / statistics.fmean(found)

    # Of a gamma distribution: 1 / sqrt(shape).
    assert variation(1) == pytest.approx(1, rel=0.1)
    assert variation(4) == pytest.approx(0.5, rel=0.1)
    assert variation(math.inf) == pytest.approx(0)


def test_seed_replays_the_times() -> None:
    arrivals = Arrivals(rate=5)
    assert arrivals.times_s(20, 3) == arrivals.times_s(20, 3)
    assert arrivals.times_s(20, 3) != arrivals.times_s(20, 4)


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_ramp_grows_from_its_first_rate_to_its_last(strategy: str) -> None:
    ramp = Ramp(strategy=strategy, start_rps=1, end_rps=16)  # type: ignore[arg-type]
    found = gaps(Arrivals(burstiness=math.inf, ramp=ramp).times_s(9, 0))
    assert found[0] == pytest.approx(1)
    assert found[-1] == pytest.approx(1 / 16)
    assert found == sorted(found, reverse=True)
    middle = 8.5 if strategy == "linear" else 4
    assert found[4] == pytest.approx(1 / middle)


def test_ramp_from_zero_begins_nevertheless() -> None:
    ramp = Ramp(strategy="linear", start_rps=0, end_rps=10)
    assert all(math.isfinite(time) for time in Arrivals(ramp=ramp).times_s(5, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Arrivals(rate=0),
        lambda: Arrivals(rate=math.nan),
        lambda: Arrivals(burstiness=0),
        lambda: Ramp(strategy="linear", start_rps=5, end_rps=5),
        lambda: Ramp(strategy="exponential", start_rps=0, end_rps=5),
        lambda: Arrivals(rate=1, ramp=Ramp(strategy="linear", start_rps=1, end_rps=5)),
    ],
)
def test_rates_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]
