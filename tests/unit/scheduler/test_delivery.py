"""When a first token is given: at once, or with the second where gaps between tokens have a limit;
and every token exactly once, however the request ends.
"""

from __future__ import annotations

import pytest

from mooncake.base import FinishReason, OutputEvent, Role, TokensEvent
from mooncake.scheduler.delivery import MAX_HELD_GAPS
from mooncake.telemetry.events import FirstToken
from tests.support.scheduling import Client, House, Pair, request

TBT_S = 0.5


@pytest.fixture
def house() -> Pair:
    """A pair whose cluster has limits that no prediction comes near to."""
    return Pair(tbt_slo_s=TBT_S, ttft_slo_s=60.0)


def first_token_s(house: House) -> list[float]:
    return [event.at_s for event in house.events.events if isinstance(event, FirstToken)]


def test_the_first_token_comes_with_the_second(house: Pair) -> None:
    client = house.submit(request("r"))
    house.output(house.p0, "r", 0, [7])
    assert client.tokens == []
    house.tick(0.25)
    house.output(house.d0, "r", 1, [8])
    assert client.tokens == [7, 8]
    assert first_token_s(house) == [0.25], "it counts from when it was given"
    house.output(house.d0, "r", 2, [9, 10], FinishReason.LENGTH)
    assert client.tokens == [7, 8, 9, 10]
    house.close()


def test_without_a_limit_on_gaps_it_comes_at_once() -> None:
    house = Pair(ttft_slo_s=60.0)
    client = house.submit(request("r"))
    house.output(house.p0, "r", 0, [7])
    assert client.tokens == [7]


def test_a_request_s_own_limit_counts_too() -> None:
    house = Pair()
    client = house.submit(request("r", tbt_slo_s=TBT_S))
    house.output(house.p0, "r", 0, [7])
    assert client.tokens == []
    house.output(house.d0, "r", 1, [8])
    assert client.tokens == [7, 8]


def test_without_a_hand_over_it_comes_at_once() -> None:
    house = House(tbt_slo_s=TBT_S)
    whole = house.join("d0", Role.DECODE)
    client = house.submit(request("r"))
    house.output(whole, "r", 0, [7])
    assert client.tokens == [7]


def test_a_hand_over_that_takes_long_is_not_waited_for(house: Pair) -> None:
    client = house.submit(request("r"))
    house.output(house.p0, "r", 0, [7])
    wake = house.gateway.tick(house.now)
    assert wake is not None
    assert wake <= MAX_HELD_GAPS * TBT_S
    house.tick(MAX_HELD_GAPS * TBT_S)
    assert client.tokens == [7]
    house.output(house.d0, "r", 1, [8])
    assert client.tokens == [7, 8]
    assert len(first_token_s(house)) == 1


def test_the_limit_on_the_first_token_goes_before(house: Pair) -> None:
    client = house.submit(request("r", ttft_slo_s=2.0))
    house.tick(1.5)
    house.output(house.p0, "r", 0, [7])
    assert client.tokens == []
    house.tick(0.5)
    assert client.tokens == [7]
    late = house.submit(request("late", ttft_slo_s=1.0))
    house.tick(1.5)
    house.output(house.p0, "late", 0, [7])
    assert late.tokens == [7], "too late already: not a moment more"


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.LENGTH])
def test_an_end_at_the_first_token_waits_for_nothing(house: Pair, reason: FinishReason) -> None:
    client = house.submit(request("r", max_tokens=1))
    house.output(house.p0, "r", 0, [7], reason)
    assert client.tokens == [7]
    assert client.final.reason is reason
    house.close()


def test_a_request_that_times_out_gives_what_it_has(house: Pair) -> None:
    client = house.submit(request("r", timeout_s=1.0))
    house.output(house.p0, "r", 0, [7])
    house.tick(1.0)
    assert client.tokens == [7]
    assert client.final.reason is FinishReason.ERROR
    assert client.final.num_output_tokens == 1
    house.close()


def test_who_has_gone_gets_no_more(house: Pair) -> None:
    client = house.submit(request("r"))
    house.output(house.p0, "r", 0, [7])
    house.gateway.abort("r", house.now)
    assert client.final.reason is FinishReason.ABORT
    house.tick(10.0)
    assert client.tokens == []
    house.close()


def test_what_is_kept_outlives_a_lost_decode_worker(house: Pair) -> None:
    client = house.submit(request("r", max_tokens=3))
    house.output(house.p0, "r", 0, [7])
    spare = house.join("d1", Role.DECODE)
    failed = FinishReason.ERROR
    house.output(house.d0, "r", 1, [], failed)
    assert client.tokens == []
    (again,) = house.tasks(spare)
    assert again.output_tokens == [7]
    house.output(spare, "r", 1, [8, 9], FinishReason.LENGTH, attempt=2)
    assert client.tokens == [7, 8, 9]
    house.close()


def test_a_late_name_is_not_mixed_up_with_an_earlier_one(house: Pair) -> None:
    """The moment until which the first one's token was kept is nothing to its namesake."""
    first = house.submit(request("r", max_tokens=2))
    house.output(house.p0, "r", 0, [7])
    house.output(house.d0, "r", 1, [8], FinishReason.LENGTH)
    assert first.tokens == [7, 8]
    house.tick(1.0)
    second = house.submit(request("r", max_tokens=2))
    house.output(house.p0, "r", 0, [7], attempt=2)
    house.tick(MAX_HELD_GAPS * TBT_S - 1.0)
    assert second.tokens == []
    house.tick(1.0)
    assert second.tokens == [7]


class Leaver(Client):
    """A client that goes at its first token."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self._house = house

    def __call__(self, event: OutputEvent) -> None:
        super().__call__(event)
        if isinstance(event, TokensEvent):
            self._house.gateway.abort(event.request_id, self._house.now)


@pytest.mark.parametrize("end", [None, FinishReason.LENGTH])
def test_who_goes_while_it_is_given_has_one_end(house: Pair, end: FinishReason | None) -> None:
    leaver = Leaver(house)
    house.gateway.submit(request("r", max_tokens=2), leaver, house.now)
    house.output(house.p0, "r", 0, [7])
    house.output(house.d0, "r", 1, [8], end)
    assert leaver.tokens == [7]
    assert leaver.final.reason is FinishReason.ABORT
    house.close()


def test_who_goes_at_the_token_before_a_failure_has_one_end(house: Pair) -> None:
    leaver = Leaver(house)
    house.gateway.submit(request("r", timeout_s=1.0), leaver, house.now)
    house.output(house.p0, "r", 0, [7])
    house.tick(1.0)
    assert leaver.final.reason is FinishReason.ABORT
    house.close()
