"""Traces: read, refused with the line's number, replayed; prompts equal exactly where ids are."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError
from mooncake.base.blocks import block_keys
from mooncake.sim.workload import (
    MAX_TOKENS,
    STOP_TOKEN,
    TRACE_BLOCK_TOKENS,
    Workload,
    describe,
    parse_trace,
    prompt_tokens,
)
from tests.support.sim.traces import line, sessions


def test_lines_come_in_order_of_time() -> None:
    trace = parse_trace([line(500), "", line(100)], "t")
    assert [one.timestamp for one in trace] == [100, 500]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1"),
        ('{"timestamp": 0}', "input_length"),
        (line(ids=[1]), "1000 tokens need 2 hash_ids of 512 tokens each, there are 1"),
        (line(input_length=0, ids=[]), "need 0 hash_ids"),
        (line(ids=[-1, 2]), "from 0 on"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="t, line 1") as error:
        parse_trace([text], "t")
    assert said in error.value.message


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request"):
        parse_trace([""], "t")


def test_prompts_share_blocks_exactly_where_ids_are_equal() -> None:
    first, second = parse_trace(
        [line(0, 1600, ids=[0, 1, 2, 3]), line(1, 1536, ids=[0, 1, 9])], "t"
    )
    keys = [block_keys("f", prompt_tokens(one), TRACE_BLOCK_TOKENS) for one in (first, second)]
    assert [len(one) for one in keys] == [3, 3]
    assert keys[0][:2] == keys[1][:2]
    assert keys[0][2] != keys[1][2]


def test_prompts_have_the_recorded_length_and_no_stop_token() -> None:
    (one,) = parse_trace([line(0, 700, ids=[0, 5])], "t")
    tokens = prompt_tokens(one)
    assert len(tokens) == 700
    assert STOP_TOKEN not in tokens


def test_a_replay_can_be_faster_shorter_and_cut() -> None:
    trace = sessions(20, every_ms=1000)
    workload = Workload.replay(trace, speed=4.0, limit=9, max_output_tokens=3)
    assert len(workload.arrivals) == 9
    assert workload.duration_s == pytest.approx(2.0)
    assert max(workload.output_lengths) <= 3
    assert [a.index for a in workload.arrivals] == list(range(9))


def test_a_request_does_not_say_how_long_its_output_will_be() -> None:
    workload = Workload.replay(sessions(5))
    requests = [arrival.request(1 << 20) for arrival in workload.arrivals]
    assert {request.sampling.max_tokens for request in requests} == {MAX_TOKENS}
    assert all(request.sampling.stop_token_ids == frozenset({STOP_TOKEN}) for request in requests)


def test_a_trace_is_described_by_hand() -> None:
    trace = parse_trace(
        [line(0, 1024, 2, [0, 1]), line(1000, 1024, 4, [0, 2]), line(2000, 512, 6, [7])], "t"
    )
    facts = describe(trace)
    assert (facts.num_requests, facts.num_block_refs, facts.num_unique_blocks) == (3, 5, 4)
    assert facts.max_hit_rate == pytest.approx(1 / 5)
    assert facts.used_once_ratio == pytest.approx(3 / 4)
    assert facts.output_tokens["mean"] == pytest.approx(4)
    assert facts.requests_per_s == pytest.approx(1.5)
