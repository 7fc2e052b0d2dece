"""Tokens leave in order and once, whatever order, overlap or repetition they come in."""

from random import Random

import pytest

from mooncake.base import FinishReason, RequestOutput, TokenLogprobs, unpacked_logprobs
from mooncake.base.request import Failure, FinishInfo, packed_logprobs
from mooncake.scheduler.fairness import QueuePosition
from mooncake.scheduler.requests.record import RequestRecord
from tests.support.scheduler.scheduling import request

END = FinishInfo(reason=FinishReason.LENGTH)


def record(max_tokens: int) -> RequestRecord:
    return RequestRecord(
        request=request("r", max_tokens=max_tokens),
        sink=lambda _: None,
        accepted_s=0.0,
        queue_position=QueuePosition((0.0, 0)),
    )


def out(start: int, tokens: list[int], finish: FinishInfo | None = None) -> RequestOutput:
    return RequestOutput(request_id="r", attempt=1, start=start, tokens=tokens, finish=finish)


def given(order: RequestRecord, output: RequestOutput) -> list[tuple[int, list[int]]]:
    return [(event.start, event.tokens) for event in order.add_output(output)]


def test_in_order_tokens_pass_at_once() -> None:
    order = record(10)
    assert given(order, out(0, [5])) == [(0, [5])]
    assert given(order, out(1, [6, 7])) == [(1, [6, 7])]
    assert not order.has_gap


def test_decode_ahead_of_prefill_is_held_back() -> None:
    order = record(10)
    assert given(order, out(1, [6])) == []
    assert given(order, out(2, [7], END)) == []
    assert order.has_gap
    assert order.due_finish() is None
    assert given(order, out(0, [5])) == [(0, [5]), (1, [6]), (2, [7])]
    assert not order.has_gap
    assert order.due_finish() == END


def test_repeats_and_overlaps_are_cut() -> None:
    order = record(10)
    given(order, out(0, [5, 6]))
    assert given(order, out(0, [5])) == []
    assert given(order, out(1, [6, 7])) == [(2, [7])]
    assert order.num_conflicts == 0


def test_a_repeat_with_another_token_is_counted_and_the_first_stands() -> None:
    order = record(10)
    given(order, out(0, [5, 6]))
    assert given(order, out(0, [5, 9, 7])) == [(2, [7])]
    assert order.num_conflicts == 1
    assert order.tokens == [5, 6, 7]


def test_logprobs_are_cut_with_their_tokens() -> None:
    order = record(10)
    given(order, out(0, [5]))
    probs = [TokenLogprobs(-0.1 * i, 1, []) for i in range(3)]
    output = RequestOutput(
        request_id="r", attempt=1, start=0, tokens=[5, 6, 7], logprobs=probs,
        prompt_logprobs=packed_logprobs([None]),
    )  # fmt: skip
    (event,) = order.add_output(output)
    assert event.logprobs == probs[1:]
    assert not memoryview(event.prompt_logprobs)


def test_prompt_logprobs_come_with_the_first_token() -> None:
    order = record(10)
    entries = [None, TokenLogprobs(-0.5, 2, [(7, -0.25)])]
    output = RequestOutput(
        request_id="r", attempt=1, start=0, tokens=[5], prompt_logprobs=packed_logprobs(entries)
    )
    packed = order.add_output(output)[0].prompt_logprobs
    assert packed is not None
    assert unpacked_logprobs(packed) == entries
    assert not memoryview(record(10).add_output(out(0, [5]))[0].prompt_logprobs)


def test_nothing_beyond_max_tokens_leaves() -> None:
    order = record(2)
    assert given(order, out(3, [1])) == []
    assert given(order, out(0, [5, 6, 7])) == [(0, [5, 6])]
    assert given(order, out(2, [7])) == []
    assert not order.has_gap


def test_an_end_without_tokens_waits_for_those_before_it() -> None:
    order = record(10)
    given(order, out(1, [], END))
    assert order.due_finish() is None
    assert order.has_gap
    given(order, out(0, [5]))
    assert order.due_finish() == END


def test_a_failure_waits_for_nothing() -> None:
    order = record(10)
    failed = FinishInfo(
        reason=FinishReason.ERROR, failure=Failure(status=500, error_type="x", message="broken")
    )
    given(order, out(7, [], failed))
    assert order.due_finish() == failed


def test_a_new_attempt_forgets_what_was_held() -> None:
    order = record(10)
    given(order, out(0, [5]))
    given(order, out(2, [7], END))
    order.drop_held()
    assert not order.has_gap
    assert order.due_finish() is None
    assert given(order, out(1, [6])) == [(1, [6])]


@pytest.mark.parametrize("seed", range(50))
def test_any_shuffle_of_overlapping_pieces_gives_the_sequence(seed: int) -> None:
    random = Random(seed)
    wanted = [random.randrange(100) for _ in range(random.randrange(1, 30))]
    pieces = [out(i, [token]) for i, token in enumerate(wanted)]
    for _ in range(20):
        start = random.randrange(len(wanted))
        pieces.append(out(start, wanted[start : start + random.randrange(1, 6)]))
    pieces.append(out(len(wanted), [], END))
    random.shuffle(pieces)
    order, received = record(100), []
    for piece in pieces:
        for event in order.add_output(piece):
            assert event.start == len(received)
            received.extend(event.tokens)
    assert received == wanted == order.tokens
    assert order.due_finish() == END
    assert not order.has_gap
    assert order.num_conflicts == 0
