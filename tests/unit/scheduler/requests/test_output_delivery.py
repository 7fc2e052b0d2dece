"""When a first token is given: at once, or with the second where gaps between tokens have a limit;
and every token exactly once, however the request ends.
"""

from __future__ import annotations

import pytest

from mooncake.base import FinishReason, OutputEvent, RequestOutput, Role
from mooncake.scheduler.requests.output_delivery import MAX_HELD_GAPS
from mooncake.telemetry.events import FirstToken
from tests.support.scheduler.scheduling import Client, Pair, SchedulerHarness, request

TBT_S = 0.5


@pytest.fixture
def harness() -> Pair:
    """A pair whose cluster has limits that no prediction comes near to."""
    return Pair(tbt_slo_s=TBT_S, ttft_slo_s=60.0)


def first_token_s(harness: SchedulerHarness) -> list[float]:
    return [event.at_s for event in harness.events.events if isinstance(event, FirstToken)]


def test_the_first_token_comes_with_the_second(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [7])
    assert client.tokens == []
    harness.tick(0.25)
    harness.output(harness.d0, "r", 1, [8])
    assert client.tokens == [7, 8]
    assert first_token_s(harness) == [0.25], "it counts from when it was given"
    harness.output(harness.d0, "r", 2, [9, 10], FinishReason.LENGTH)
    assert client.tokens == [7, 8, 9, 10]
    harness.close()


def test_without_a_limit_on_gaps_it_comes_at_once() -> None:
    harness = Pair(ttft_slo_s=60.0)
    client = harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [7])
    assert client.tokens == [7]


def test_a_request_s_own_limit_counts_too() -> None:
    harness = Pair()
    client = harness.submit(request("r", tbt_slo_s=TBT_S))
    harness.output(harness.p0, "r", 0, [7])
    assert client.tokens == []
    harness.output(harness.d0, "r", 1, [8])
    assert client.tokens == [7, 8]


def test_without_a_hand_over_it_comes_at_once() -> None:
    harness = SchedulerHarness(tbt_slo_s=TBT_S)
    whole = harness.join("d0", Role.DECODE)
    client = harness.submit(request("r"))
    harness.output(whole, "r", 0, [7])
    assert client.tokens == [7]


def test_a_hand_over_that_takes_long_is_not_waited_for(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [7])
    wake = harness.gateway.tick(harness.now)
    assert wake is not None
    assert wake <= MAX_HELD_GAPS * TBT_S
    harness.tick(MAX_HELD_GAPS * TBT_S)
    assert client.tokens == [7]
    harness.output(harness.d0, "r", 1, [8])
    assert client.tokens == [7, 8]
    assert len(first_token_s(harness)) == 1


def test_the_limit_on_the_first_token_goes_before(harness: Pair) -> None:
    client = harness.submit(request("r", ttft_slo_s=2.0))
    harness.tick(1.5)
    harness.output(harness.p0, "r", 0, [7])
    assert client.tokens == []
    harness.tick(0.5)
    assert client.tokens == [7]
    late = harness.submit(request("late", ttft_slo_s=1.0))
    harness.tick(1.5)
    harness.output(harness.p0, "late", 0, [7])
    assert late.tokens == [7], "too late already: not a moment more"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_at_the_first_token_waits_for_nothing(harness: Pair, reason: FinishReason) -> None:
    client = harness.submit(request("r", max_tokens=1))
    harness.output(harness.p0, "r", 0, [7], reason)
    assert client.tokens == [7]
    assert client.final.reason is reason
    harness.close()


def test_a_request_that_times_out_gives_what_it_has(harness: Pair) -> None:
    client = harness.submit(request("r", timeout_s=1.0))
    harness.output(harness.p0, "r", 0, [7])
    harness.tick(1.0)
    assert client.tokens == [7]
    assert client.final.reason is FinishReason.ERROR
    assert client.final.num_output_tokens == 1
    harness.close()


def test_a_client_that_has_gone_gets_no_more(harness: Pair) -> None:
    client = harness.submit(request("r"))
    harness.output(harness.p0, "r", 0, [7])
    harness.gateway.abort("r", harness.now)
    assert client.final.reason is FinishReason.ABORT
    harness.tick(10.0)
    assert client.tokens == []
    harness.close()


def test_what_is_kept_outlives_a_lost_decode_worker(harness: Pair) -> None:
    client = harness.submit(request("r", max_tokens=3))
    harness.output(harness.p0, "r", 0, [7])
    spare = harness.join("d1", Role.DECODE)
    failed = FinishReason.ERROR
    harness.output(harness.d0, "r", 1, [], failed)
    assert client.tokens == []
    (again,) = harness.tasks(spare)
    assert again.output_tokens == [7]
    harness.output(spare, "r", 1, [8, 9], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [7, 8, 9]
    harness.close()


def test_a_late_name_is_not_mixed_up_with_an_earlier_one(harness: Pair) -> None:
    """The moment until which the first one's token was kept is nothing to its namesake."""
    first = harness.submit(request("r", max_tokens=2))
    harness.output(harness.p0, "r", 0, [7])
    harness.output(harness.d0, "r", 1, [8], FinishReason.LENGTH)
    assert first.tokens == [7, 8]
    harness.tick(1.0)
    second = harness.submit(request("r", max_tokens=2))
    harness.output(harness.p0, "r", 0, [7], attempt=2)
    harness.tick(MAX_HELD_GAPS * TBT_S - 1.0)
    assert second.tokens == []
    harness.tick(1.0)
    assert second.tokens == [7]


class Leaver(Client):
    """A client that goes at its first token."""

    def __init__(self, harness: SchedulerHarness) -> None:
        super().__init__()
        self._harness = harness

    def __call__(self, event: OutputEvent) -> None:
        super().__call__(event)
        if isinstance(event, RequestOutput):
            self._harness.gateway.abort(event.request_id, self._harness.now)


@pytest.mark.parametrize("end", [None, FinishReason.LENGTH])
def test_a_client_that_goes_during_a_delivery_has_one_end(
    harness: Pair, end: FinishReason | None
) -> None:
    leaver = Leaver(harness)
    harness.gateway.submit(request("r", max_tokens=2), leaver, harness.now)
    harness.output(harness.p0, "r", 0, [7])
    harness.output(harness.d0, "r", 1, [8], end)
    assert leaver.tokens == [7]
    assert leaver.final.reason is FinishReason.ABORT
    harness.close()


def test_a_client_that_goes_at_the_token_before_a_failure_has_one_end(harness: Pair) -> None:
    leaver = Leaver(harness)
    harness.gateway.submit(request("r", timeout_s=1.0), leaver, harness.now)
    harness.output(harness.p0, "r", 0, [7])
    harness.tick(1.0)
    assert leaver.final.reason is FinishReason.ABORT
    harness.close()
