"""Events become text and ends: stops, special ids, order, failures, and calls of many choices."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from functools import partial

import pytest

from mooncake.api.backend import ABORTS_AT_ONCE, SUBMIT_S, EventStream
from mooncake.api.generation.generation import Call, Choice, TextOptions
from mooncake.api.http.response import call_usage
from mooncake.api.schema.replies import CachedTokens
from mooncake.api.text.answer import TOOL_MARKERS, Delta, find_markers
from mooncake.base import (
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    InternalError,
    MooncakeError,
    OutputEvent,
    RequestOutput,
    SamplingParams,
    Unavailable,
    pack_tokens,
)
from tests.support.api.server import ScriptedBackend, answer, says, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.special_id("<|im_end|>") or 0
TEXT = "hello the 你好 in the end"


def request(name: str = "r", **sampling: object) -> GenerateRequest:
    settings = {"max_tokens": 100, "stop_token_ids": frozenset({EOS})} | sampling
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens([1, 2, 3]),
        sampling=SamplingParams(**settings),  # type: ignore[arg-type]
    )


def choice(asked: GenerateRequest, **options: object) -> Choice:
    return Choice(0, asked, TOKENIZER, TextOptions(**options), [EOS])  # type: ignore[arg-type]


def play(
    text: str, *, group: int = 1, asked: GenerateRequest | None = None, **options: object
) -> Delta:
    """Return the whole of a choice that was answered with `text`."""
    asked = asked or request()
    it = choice(asked, **options)
    for event in answer(asked, TOKENIZER.encode(text), group=group):
        it.feed(event)
    return it.take()


@pytest.mark.parametrize("group", [1, 2, 3, 100])
def test_text_does_not_depend_on_grouping(group: int) -> None:
    delta = play(TEXT + "<|im_end|>", group=group)
    assert delta.text == TEXT
    assert delta.finish_reason == "stop"
    assert delta.stop_reason is None
    assert delta.tokens == TOKENIZER.encode(TEXT + "<|im_end|>")


def test_length_ends_text_with_what_is_held_back() -> None:
    asked = request(max_tokens=4)
    delta = play("hello E", asked=asked, stops=("END",))
    assert (delta.text, delta.finish_reason) == ("hello E", "stop")
    delta = play("hello END", asked=request(max_tokens=4), stops=("END.",))
    assert (delta.text, delta.finish_reason) == ("hello EN", "length")


@pytest.mark.parametrize("group", [1, 2, 100])
def test_stop_string_across_tokens_truncates_text_and_tokens(group: int) -> None:
    asked = request()
    it = choice(asked, stops=("o th",))
    for event in answer(asked, TOKENIZER.encode("hello the end"), group=group):
        it.feed(event)
    delta = it.take()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("hell", "stop", "o th")
    assert it.num_tokens == 2, "tokens are counted to the one that completed the stop string"
    assert delta.tokens == TOKENIZER.encode("hello the")


def test_stop_string_is_not_looked_for_before_min_tokens() -> None:
    delta = play("ababab<|im_end|>", asked=request(min_tokens=3), stops=("b",))
    assert delta.text == "aba"
    assert len(delta.tokens) == 4


def test_stop_id_ends_without_its_text_and_is_the_reason() -> None:
    x = ord("x")
    delta = play("abxcd", asked=request(stop_token_ids=frozenset({x, EOS})))
    assert (delta.text, delta.stop_reason, delta.tokens) == ("ab", x, [97, 98, x])
    kept = play("abxcd", asked=request(stop_token_ids=frozenset({x, EOS})), include_stop=True)
    assert kept.text == "abx"


def test_stop_id_that_does_not_stop_shows_with_the_next_token() -> None:
    asked = request(stop_token_ids=frozenset({ord("b")}), min_tokens=2)
    it = choice(asked)
    texts = []
    for event in answer(asked, TOKENIZER.encode("abcb")):
        it.feed(event)
        texts.append(it.take().text)
    assert texts == ["a", "", "bc", "", ""]


def test_special_tokens_show_only_when_asked() -> None:
    asked = request(ignore_eos=True, stop_token_ids=frozenset(), max_tokens=3)
    assert play("a<|im_end|>b", asked=asked).text == "ab"
    assert play("a<|im_end|>b", asked=asked, skip_special=False).text == "a<|im_end|>b"


@pytest.mark.parametrize("start", [0, 1, 3])
def test_lost_and_repeated_tokens_are_an_error(start: int) -> None:
    """The gateway passes on each position once, in order."""
    it = choice(request())
    it.feed(RequestOutput(request_id="r", attempt=0, start=0, tokens=[97, 98]))
    with pytest.raises(InternalError, match="lost"):
        it.feed(RequestOutput(request_id="r", attempt=0, start=start, tokens=[97]))


def final(name: str, reason: FinishReason, failure: Failure | None = None) -> FinalEvent:
    return FinalEvent(
        request_id=name, reason=reason, num_prompt_tokens=3, num_output_tokens=0, failure=failure
    )


def test_failures_keep_status_reason_and_advice() -> None:
    failure = Failure(status=429, error_type="RateLimitError", message="busy", retry_after_s=3.0)
    with pytest.raises(MooncakeError, match="busy") as caught:
        choice(request()).feed(final("r", FinishReason.REJECTED, failure))
    assert (caught.value.http_status, caught.value.retry_after_s) == (429, 3.0)


def test_abort_by_the_server_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        choice(request()).feed(final("r", FinishReason.ABORT))


def make_call(backend: ScriptedBackend, n: int, stops: tuple[str, ...] = ()) -> Call:
    asked = [request(f"r-{i}") for i in range(n)]
    options = TextOptions(stops=stops)
    choices = [Choice(i, one, TOKENIZER, options, [EOS]) for i, one in enumerate(asked)]
    return Call(partial(EventStream, backend), "r", asked, choices, n)


def test_many_sequences_are_submitted_and_aborted_a_few_a_turn_of_the_loop() -> None:
    submit_s = 0.001  # of one, at least

    def hang(request: GenerateRequest) -> list[None]:
        time.sleep(submit_s)
        return [None]

    async def main() -> None:
        backend = ScriptedBackend(hang)
        turns: list[tuple[int, int]] = []

        async def watch() -> None:
            while True:
                turns.append((len(backend.requests), len(backend.aborted)))
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        async with make_call(backend, 300):
            assert len(backend.requests) == 300
        while len(backend.aborted) < 300:
            await asyncio.sleep(0)
        watcher.cancel()
        for each, most in ((0, SUBMIT_S / submit_s + 1), (1, ABORTS_AT_ONCE)):
            counts = [turn[each] for turn in turns]
            assert max(b - a for a, b in itertools.pairwise(counts)) <= most

    asyncio.run(main())


def test_call_merges_choices_and_counts_the_prompt_once() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says(TEXT, cached=2))
        call = make_call(backend, 3)
        async with call:
            deltas = await call.finish()
        assert [delta.text for delta in deltas] == [TEXT] * 3
        assert [delta.index for delta in deltas] == [0, 1, 2]
        assert call.num_prompt_tokens == 3
        assert call.num_cached_tokens == 2
        assert call.num_output_tokens == 3 * len(TOKENIZER.encode(TEXT + "<|im_end|>"))
        assert backend.aborted == []

    asyncio.run(main())


class CountedList(list[Choice]):
    """Choices that count how often somebody looks at all of them."""

    num_looks = 0

    def __iter__(self) -> Iterator[Choice]:
        CountedList.num_looks += 1
        return super().__iter__()


def test_usage_in_all_chunks_of_a_step_is_counted_once() -> None:
    """Otherwise the time for a step of a stream grows with the square of the choices: that of a
    thousand held the event loop for a second.
    """

    async def main() -> None:
        call = make_call(ScriptedBackend(says(TEXT, cached=2)), 20)
        call.choices = CountedList(call.choices)
        num_steps = num_output = 0
        async with call:
            while deltas := await call.deltas():
                num_steps += 1
                num_output += sum(len(delta.tokens) for delta in deltas)
                usages = [call_usage(call) for _ in range(20)]
                assert {usage.completion_tokens for usage in usages} == {num_output}
        assert CountedList.num_looks <= 4 * num_steps
        assert call_usage(call).prompt_tokens_details == CachedTokens(2)

    asyncio.run(main())


def test_stop_string_aborts_the_request_once_and_keeps_the_cached_count() -> None:
    async def main() -> None:
        tokens = TOKENIZER.encode("abcdef")

        def endless(asked: GenerateRequest) -> list[OutputEvent | None]:
            return [*answer(asked, tokens)[:-1], None]

        backend = ScriptedBackend(endless)
        call = make_call(backend, 2, stops=("c",))
        async with call:
            deltas = await call.finish()
        assert [delta.text for delta in deltas] == ["ab", "ab"]
        assert sorted(backend.aborted) == ["r-0", "r-1"]
        assert call.num_cached_tokens == 3
        assert call.num_output_tokens == 6

    asyncio.run(main())


def test_streamed_deltas_add_up_to_the_whole() -> None:
    async def main() -> None:
        for group in (1, 2, 5):
            backend = ScriptedBackend(says(TEXT, group=group))
            streamed: dict[int, str] = {0: "", 1: ""}
            ends = []
            call = make_call(backend, 2, stops=("end",))
            async with call:
                while (deltas := await call.deltas()) is not None:
                    for delta in deltas:
                        streamed[delta.index] += delta.text
                        if delta.finish_reason:
                            ends.append((delta.index, delta.finish_reason, delta.stop_reason))
            assert streamed == {0: "hello the 你好 in the ", 1: "hello the 你好 in the "}
            assert sorted(ends) == [(0, "stop", "end"), (1, "stop", "end")]

    asyncio.run(main())


def test_leaving_a_call_aborts_what_runs() -> None:
    async def main() -> None:
        backend = ScriptedBackend(lambda asked: [*answer(asked, [97, 98])[:1], None])
        call = make_call(backend, 2)
        async with call:
            await call.deltas()
        assert sorted(backend.aborted) == ["r-0", "r-1"]
        assert backend.num_running == 0

    asyncio.run(main())


def test_failing_a_call_from_outside_wakes_its_reader() -> None:
    async def main() -> None:
        backend = ScriptedBackend(lambda asked: [None])
        call = make_call(backend, 1)
        async with call:
            waiting = asyncio.create_task(call.finish())
            await asyncio.sleep(0)
            call.fail(Unavailable("shutting down"))
            with pytest.raises(Unavailable, match="shutting down"):
                await waiting
        assert backend.aborted == ["r-0"]

    asyncio.run(main())


def test_one_refused_choice_fails_the_call_and_aborts_the_others() -> None:
    async def main() -> None:
        failure = Failure(status=503, error_type="ServiceUnavailableError", message="full")

        def script(asked: GenerateRequest) -> list[OutputEvent | None]:
            if asked.request_id == "r-1":
                return [final("r-1", FinishReason.REJECTED, failure)]
            return [None]

        backend = ScriptedBackend(script)
        call = make_call(backend, 3)
        with pytest.raises(MooncakeError, match="full"):
            async with call:
                await call.finish()
        assert sorted(backend.aborted) == ["r-0", "r-2"]

    asyncio.run(main())


def test_half_a_character_before_a_call_is_no_part_of_its_name() -> None:
    markers = find_markers(TOKENIZER, TOOL_MARKERS)
    asked = request()
    it = choice(asked, markers=markers)
    names = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    opening = [TOKENIZER.special_id(name) for name in names]
    half = TOKENIZER.encode("🙂")[:2]
    rest = TOKENIZER.encode("functions.go:0<|tool_call_argument_begin|>{}<|tool_call_end|>")
    for event in answer(asked, [*half, *(token for token in opening if token), *rest, EOS]):
        it.feed(event)
    [call] = it.take().tool_calls
    assert (call.name, call.call_id, call.text) == ("go", "functions.go:0", "{}")


def test_two_calls_never_share_an_id() -> None:
    markers = find_markers(TOKENIZER, TOOL_MARKERS)
    call = "<|tool_call_begin|>functions.go:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>" + call * 4 + "<|tool_calls_section_end|><|im_end|>"
    ids = [call.call_id for call in play(text, markers=markers).tool_calls]
    assert ids[0] == "functions.go:1"
    assert len(set(ids)) == 4
