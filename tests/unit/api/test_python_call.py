"""What `LLM` and `AsyncLLM` return, over a scripted backend: answers, how they grow, their ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from mooncake.api.adapters.python_call import (
    Prefix,
    RequestOutput,
    SamplingParams,
    answer,
    answers,
    chat_request,
    completion_request,
)
from mooncake.api.api_server import ApiServer
from mooncake.api.config import ApiConfig
from mooncake.base import Failure, InvalidRequest, MooncakeError, Overloaded, Unavailable
from tests.support.api.server import (
    Script,
    ScriptedBackend,
    refusal,
    says,
    tiny_model,
    tiny_tokenizer,
)
from tests.support.api.server import answer as scripted

HELLO = tiny_tokenizer().encode("hello")
HI = [{"role": "user", "content": "hi"}]


def run(
    script: Script, test: Callable[[ApiServer, ScriptedBackend], Coroutine[Any, Any, None]]
) -> None:
    async def main() -> None:
        backend = ScriptedBackend(script)
        await test(ApiServer(backend, tiny_model(), ApiConfig()), backend)

    asyncio.run(main())


def whole(script: Script, params: SamplingParams | None = None, **fields: Any) -> RequestOutput:
    """Return the whole answer to the prompt "the"."""
    found: list[RequestOutput] = []

    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        found.append(await answer(api_server, completion_request("the", params, fields)))
        assert api_server.num_calls == 0

    run(script, test)
    return found[0]


def test_a_whole_answer() -> None:
    output = whole(says("hello the", cached=2), max_tokens=20)
    [only] = output.outputs
    assert (output.text, only.text, only.index) == ("hello the", "hello the", 0)
    assert list(only.token_ids[:-1]) == tiny_tokenizer().encode("hello the")
    assert (only.finish_reason, only.stop_reason, only.message) == ("stop", None, None)
    assert (only.logprobs, output.prompt_logprobs) == (None, None)
    assert (output.prompt, output.finished, output.num_cached_tokens) == ("the", True, 2)
    assert output.prompt_token_ids == tuple(tiny_tokenizer().encode("the"))
    assert output.request_id.startswith("cmpl-")


def test_logprobs_of_prompt_and_answer() -> None:
    params = SamplingParams(logprobs=2, prompt_logprobs=1, max_tokens=9, ignore_eos=True)
    output = whole(lambda request: scripted(request, HELLO), params)
    [only] = output.outputs
    assert only.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(only.logprobs) == len(only.token_ids) == len(HELLO)
    for token, entry in zip(HELLO, only.logprobs, strict=True):
        assert entry is not None
        assert [(key, each.logprob, each.rank) for key, each in entry.items()] == [
            (token, -0.5, 1), (token + 1, -1.5, 2),
        ]  # fmt: skip
        assert entry[token].decoded_token == tiny_tokenizer().decode([token])
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * (
        output.num_prompt_tokens - 1
    )


def test_a_stop_string_and_its_name() -> None:
    output = whole(says("hello the hello"), stop=["the"], max_tokens=30)
    assert (output.text, output.outputs[0].stop_reason) == ("hello ", "the")


def test_several_answers_and_the_most_likely_of_several() -> None:
    assert [each.index for each in whole(says("a"), n=3, max_tokens=4).outputs] == [0, 1, 2]
    best = whole(says("a"), n=1, best_of=3, max_tokens=4)
    assert len(best.outputs) == 1
    assert best.outputs[0].logprobs is None


def test_a_chat_has_messages_as_http_has_them() -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        asked = chat_request(HI, SamplingParams(logprobs=1), {"max_completion_tokens": 30})
        output = await answer(api_server, asked)
        [only] = output.outputs
        assert only.message == {
            "role": "assistant", "content": "hello", "reasoning": "hm", "reasoning_content": "hm",
        }  # fmt: skip
        assert (only.text, output.prompt) == ("hello", None)
        assert only.logprobs is not None
        assert len(only.logprobs) == len(only.token_ids)

    run(says("<think>hm</think>hello"), test)


def test_an_answer_grows_and_ends_as_the_whole_one() -> None:
    params = SamplingParams(max_tokens=30, logprobs=1, n=2)

    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        request = completion_request("the", params, {"request_id": "mine"})
        seen = [output async for output in answers(api_server, request)]
        assert [output.finished for output in seen[:-1]] == [False] * (len(seen) - 1)
        for before, after in itertools.pairwise(seen):
            for old, new in zip(before.outputs, after.outputs, strict=True):
                assert new.text.startswith(old.text)
                assert new.token_ids[: len(old.token_ids)] == old.token_ids
        assert len(seen) > 3
        assert seen[-1] == await answer(api_server, request)
        assert seen[-1].request_id == "cmpl-mine"

    run(says("hello the hello"), test)


def test_outputs_so_far_share_their_tokens_and_do_not_change() -> None:
    params = SamplingParams(max_tokens=30, logprobs=1)

    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        request = completion_request("the", params, {})
        seen = [output.outputs[0] async for output in answers(api_server, request)]
        assert isinstance(seen[-1].token_ids, tuple)
        assert isinstance(seen[-1].logprobs, tuple)
        for number, output in enumerate(seen[:-1], 1):
            tokens, logprobs = output.token_ids, output.logprobs
            assert isinstance(tokens, Prefix)
            assert isinstance(logprobs, Prefix)
            assert tokens._items is seen[0].token_ids._items  # type: ignore[attr-defined]
            assert len(tokens) == len(logprobs) == number
            assert tokens == seen[-1].token_ids[:number] == tuple(tokens)
            assert tokens[-1] == seen[-1].token_ids[number - 1]
            assert (tokens[1:], hash(tokens)) == (tuple(tokens)[1:], hash(tuple(tokens)))
            with pytest.raises(IndexError):
                tokens[number]

    run(says("hello the hello"), test)


def test_the_most_likely_of_several_come_at_the_end_only() -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        request = completion_request("the", SamplingParams(best_of=3, max_tokens=4), {})
        [output] = [each async for each in answers(api_server, request)]
        assert (output.finished, len(output.outputs)) == (True, 1)

    run(says("hello"), test)


def hangs(request: Any) -> list[Any]:
    return [*scripted(request, HELLO)[:1], None]


def test_leaving_the_iterator_aborts() -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        async for output in answers(api_server, completion_request("the", None, {"n": 2})):
            assert not output.finished
            break
        await backend.abort_seen.wait()
        assert len(backend.aborted) == 2
        while api_server.num_calls:
            await asyncio.sleep(0)

    run(hangs, test)


@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling_the_task_aborts(streamed: bool) -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        async def read() -> None:
            request = completion_request("the", None, {})
            if not streamed:
                await answer(api_server, request)
            async for _ in answers(api_server, request):
                pass

        reader = asyncio.create_task(read())
        while not backend.num_hanging:
            await asyncio.sleep(0)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        assert (len(backend.aborted), api_server.num_calls) == (1, 0)

    run(hangs, test)


def test_a_closed_engine_fails_what_runs() -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        reader = asyncio.create_task(answer(api_server, completion_request("the", None, {})))
        while not backend.num_hanging:
            await asyncio.sleep(0)
        api_server.fail_all(Unavailable("closed"))
        with pytest.raises(Unavailable, match="closed"):
            await reader

    run(hangs, test)


def test_a_refusal_is_the_error_of_its_status() -> None:
    failure = Failure(status=429, error_type="RateLimitError", message="full", retry_after_s=2.0)
    with pytest.raises(Overloaded, match="full") as caught:
        whole(lambda request: refusal(request, failure))
    assert caught.value.retry_after_s == 2.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_token": 3}, "'max_token' is no known field; did you mean max_tokens?"),
        ({"max_new_tokens": 3}, "max_new_tokens is not supported: use max_tokens"),
        ({"stream": True}, "stream: is not available here; AsyncLLM yields answers while"),
        ({"temperature": 9}, "temperature: must be less than or equal to 2"),
        ({"structured_outputs": {"jsn": {}}}, "exactly one of json, regex, choice"),
        ({"model": "other"}, "The model 'other' does not exist here"),
    ],
)
def test_wrong_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(MooncakeError) as caught:
        whole(says("x"), **fields)
    assert message in str(caught.value)


def test_a_chat_refuses_unknown_fields_too() -> None:
    with pytest.raises(InvalidRequest, match="did you mean tool_choice"):
        chat_request(HI, None, {"tool_choise": "auto"})


def test_parameters_are_checked_where_they_are_made() -> None:
    with pytest.raises(InvalidRequest, match="did you mean temperature") as caught:
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]
    assert caught.value.param == "temprature"
    with pytest.raises(InvalidRequest, match="top_p: must be less than or equal to 1"):
        SamplingParams(top_p=3)
    with pytest.raises(InvalidRequest, match="stop: "):
        SamplingParams(stop=7)  # type: ignore[arg-type]


def test_fields_win_over_parameters_and_unset_ones_are_the_models() -> None:
    async def test(api_server: ApiServer, backend: ScriptedBackend) -> None:
        params = SamplingParams(max_tokens=3, top_k=5, seed=4)
        await answer(api_server, completion_request([5, 6], params, {"max_tokens": 2}))
        [request] = backend.requests
        assert request.prompt_tokens.tolist() == [5, 6]
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (2, 5, 4)
        assert sampling.temperature == 1.0

    run(says("x"), test)
