"""The small words: errors, clocks, identifiers, sampling defaults, the table of request states."""

from __future__ import annotations

import inspect

import pytest

from mooncake.base import (
    ConfigError,
    MonotonicClock,
    MooncakeError,
    Overloaded,
    RequestState,
    SamplingParams,
    SeededIds,
    SystemIds,
    Unavailable,
    errors,
)
from mooncake.base.request import TRANSITIONS

ERROR_TYPES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, MooncakeError)
]


@pytest.mark.parametrize("kind", ERROR_TYPES, ids=lambda kind: kind.__name__)
def test_every_error_stands_in_the_tree_and_knows_its_status(kind: type[MooncakeError]) -> None:
    assert kind.__name__ in (errors.__doc__ or "")
    assert 400 <= kind.http_status < 600
    assert kind("what happened").message == "what happened"
    assert str(kind("what happened")) == "what happened"


def test_errors_carry_what_the_client_needs() -> None:
    error = Overloaded("too much", retry_after_s=1.5)
    assert (error.http_status, error.retryable, error.retry_after_s) == (429, True, 1.5)
    assert Unavailable("later").retryable
    assert not ConfigError("no").retryable
    assert ConfigError("no", param="port").param == "port"


def test_real_time_does_not_go_back() -> None:
    clock = MonotonicClock()
    assert clock.now() <= clock.now()


def test_seeded_ids_can_be_replayed() -> None:
    first, second, other = SeededIds(7), SeededIds(7), SeededIds(8)
    drawn = [first.hex(8), first.integer(64)]
    assert drawn == [second.hex(8), second.integer(64)]
    assert drawn != [other.hex(8), other.integer(64)]


@pytest.mark.parametrize("source", [SeededIds(1), SystemIds()])
def test_ids_have_the_asked_size(source: SeededIds | SystemIds) -> None:
    assert len(source.hex(8)) == 16
    assert int(source.hex(8), 16) < 2**64
    assert 0 <= source.integer(5) < 32
    assert len({source.hex(16) for _ in range(20)}) == 20


def test_sampling_defaults_are_those_of_the_public_api() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert not params.greedy
    assert SamplingParams(temperature=0.0).greedy


def test_finished_is_final_and_every_state_can_get_there() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert TRANSITIONS[RequestState.FINISHED] == frozenset()
    for state in RequestState:
        if state is not RequestState.FINISHED:
            assert RequestState.FINISHED in TRANSITIONS[state]
            assert state not in TRANSITIONS[state]
