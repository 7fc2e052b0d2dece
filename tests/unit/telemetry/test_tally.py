"""A tally gives what prometheus_client's own histogram gives for the same values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from mooncake.telemetry.series import Tally

_BOUNDS = (0.001, 0.5, 1, 16, 20_000)


@given(st.lists(st.one_of(st.floats(0, 1e6), st.sampled_from(_BOUNDS))))
def test_values_are_counted_as_by_the_library(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally(ours, "gap_seconds", "A gap.", {"model_name": "k2"}, _BOUNDS)
    plain = Histogram("gap_seconds", "A gap.", ["model_name"], buckets=_BOUNDS, registry=theirs)
    child = plain.labels("k2")
    for value in values:
        tally.observe(value)
        child.observe(value)
    shown = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == shown


def test_a_counter_is_the_sum_of_the_values() -> None:
    registry = CollectorRegistry()
    counter = ("tokens", "Tokens generated.")
    tally = Tally(registry, "burst", "Tokens.", {"model_name": "k2"}, (1, 2), counter=counter)
    for num_tokens in (1, 2, 30):
        tally.observe(num_tokens)
    assert registry.get_sample_value("tokens_total", {"model_name": "k2"}) == 33
