"""Responses as the official client sees them, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest

from mooncake.api.schema.chat import ChatRequest
from mooncake.base import Failure
from tests.support.api.cache_use import NUM_CACHED_TOKENS, SHOWN, USE
from tests.support.api.server import (
    Script,
    ScriptedBackend,
    answer,
    live_api_server,
    refusal,
    says,
    tiny_model,
    tiny_tokenizer,
)
from tests.support.waiting import LONG_S

TOKENIZER = tiny_tokenizer()
TOOL: Any = {
    "type": "function",
    "name": "look-up.v2",
    "description": "d",
    "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    "strict": True,
}
CALL = "<|tool_call_begin|>functions.look-up.v2:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
ANSWERS = {
    "text": "hello the 你好🙂",
    "thoughts": "<think>in the 好</think>hello",
    "calls": "hello <|tool_calls_section_begin|>"
    + CALL.format(0, '{"q": "你好"}')
    + CALL.format(1, '{"q": "the"}')
    + "<|tool_calls_section_end|>",
    "all": "<think>hm</think>the<|tool_calls_section_begin|>"
    + CALL.format(0, "{}")
    + "<|tool_calls_section_end|> end",
    "call in a thought": "<think>hm<|tool_calls_section_begin|>"
    + CALL.format(0, '{"q": ""}')
    + "<|tool_calls_section_end|>",
    "nothing": "",
}

Test = Callable[[openai.AsyncOpenAI, ScriptedBackend], Awaitable[None]]


def run(script: Script, test: Test) -> None:
    """Run `test` with the official client against a live API server."""

    async def main() -> None:
        backend = ScriptedBackend(script)
        async with (
            live_api_server(backend, model=tiny_model(max_model_len=1024)) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            await test(client, backend)
        assert backend.num_running == 0

    asyncio.run(main())


def without_ids(response: Any) -> dict[str, Any]:
    """Return what does not change from call to call."""
    fields = response.model_dump(exclude={"id", "created_at"})
    for item in fields["output"]:
        item.pop("id")
    return fields


def test_answer_with_usage() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        response = await client.responses.create(
            model="alias",
            input="hi",
            instructions="be brief",
            temperature=0.5,
            metadata={"a": "b"},
            extra_body={"seed": 5, "top_k": 3},
        )
        assert response.output_text == "hello"
        assert (response.object, response.model, response.status) == (
            "response", "tiny", "completed",
        )  # fmt: skip
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert response.output[0].content[0].text == "in the 好"
        [asked] = backend.requests
        prompt = TOKENIZER.decode(asked.prompt_tokens)
        assert prompt == (
            "<|im_system|>system<|im_middle|>be brief<|im_end|>"
            "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
        )
        usage = response.usage
        assert usage.input_tokens == len(asked.prompt_tokens)
        assert usage.input_tokens_details.cached_tokens == 7
        assert usage.output_tokens == len(TOKENIZER.encode(ANSWERS["thoughts"])) + 1
        assert (
            usage.output_tokens_details.reasoning_tokens == len(TOKENIZER.encode("in the 好")) + 1
        )
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert (asked.sampling.seed, asked.sampling.top_k) == (5, 3)
        assert (response.temperature, response.metadata) == (0.5, {"a": "b"})
        assert (response.store, response.previous_response_id) == (False, None)

    run(says(ANSWERS["thoughts"] + "<|im_end|>", cached=7), test)


def test_no_two_items_have_one_id() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        mine = {"X-Request-Id": "my_own-id"}
        ids = []
        for headers in ({}, {}, mine):
            response = await client.responses.create(
                model="tiny", input="hi", tools=[TOOL], extra_headers=headers
            )
            ids += [item.id for item in response.output]
        assert len(ids) == len(set(ids)) == 9
        assert ids[-3:] == ["rs_my_own-id_0", "msg_my_own-id_1", "fc_my_own-id_2"]

    run(says(ANSWERS["all"].removesuffix(" end") + "<|im_end|>"), test)


def test_usage_says_where_cached_tokens_came_from_and_why_others_were_computed() -> None:
    tokens = TOKENIZER.encode(ANSWERS["text"])

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        whole = await client.responses.create(model="tiny", input="hi")
        assert whole.usage.input_tokens_details.mooncake == SHOWN
        *_, last = [
            event async for event in await client.responses.create(
                model="tiny", input="hi", stream=True
            )
        ]  # fmt: skip
        assert last.type == "response.completed"
        assert last.response.usage == whole.usage

    run(lambda asked: answer(asked, tokens, num_cached_tokens=NUM_CACHED_TOKENS, cache=USE), test)


def test_usage_says_nothing_of_the_cache_where_nothing_is_known() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        response = await client.responses.create(model="tiny", input="hi")
        assert "mooncake" not in response.usage.input_tokens_details.model_dump()

    run(says(ANSWERS["text"], cached=7), test)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("limit", [None, 9])
def test_stream_and_whole_agree(name: str, limit: int | None) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        ask: dict[str, Any] = {
            "model": "tiny", "input": "hi", "tools": [TOOL], "max_output_tokens": limit,
            "include": ["message.output_text.logprobs"], "top_logprobs": 2,
        }  # fmt: skip
        whole = await client.responses.create(**ask)
        # What is built from the deltas alone has to be what the last event says.
        texts: dict[str, str] = {}
        numbers, kinds, final = [], [], None
        async for event in await client.responses.create(**ask, stream=True):
            numbers.append(event.sequence_number)
            kinds.append(event.type)
            if event.type.endswith(".delta"):
                texts[event.item_id] = texts.get(event.item_id, "") + event.delta
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds.index(kinds[-1]) == len(kinds) - 1
        assert numbers == list(range(len(numbers)))
        assert final is not None
        assert without_ids(final) == without_ids(whole)
        told = [
            item.arguments if item.type == "function_call" else item.content[0].text
            for item in final.output
        ]
        assert [texts.get(item.id, "") for item in final.output] == told
        assert kinds.count("response.output_item.done") == len(final.output)
        if limit is None:
            async with client.responses.stream(**ask) as stream:
                async for _ in stream:
                    pass
                parsed = await stream.get_final_response()
            assert [item.type for item in parsed.output] == [item.type for item in whole.output]

    run(says(ANSWERS[name], group=2), test)


def test_calls_and_their_results_go_back_and_forth() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        first = await client.responses.create(model="tiny", input="hi", tools=[TOOL])
        text, one, two = first.output
        assert text.content[0].text == "hello "
        assert (one.name, one.call_id, one.arguments) == (
            "look-up.v2", "functions.look-up.v2:0", '{"q": "你好"}',
        )  # fmt: skip
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
            for call in (one, two)
        ]
        await client.responses.create(model="tiny", input=items, tools=[TOOL])
        prompt = TOKENIZER.decode(backend.requests[1].prompt_tokens)
        assert f"assistant<|im_middle|>{ANSWERS['calls']}<|im_end|>" in prompt
        assert "<|im_middle|>## Return of functions.look-up.v2:1\nfound<|im_end|>" in prompt
        declared = json.loads(
            prompt.partition("tool_declare<|im_middle|>")[2].partition("<|im_end|>")[0]
        )
        function = {key: value for key, value in TOOL.items() if key != "type"}
        assert declared == [{"type": "function", "function": function}]

    run(says(ANSWERS["calls"]), test)


def test_forms_and_choices_reach_the_engine() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema}}

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        await client.responses.create(model="tiny", input="hi", text=text)
        other = {**TOOL, "name": "other"}
        choices: list[Any] = [
            "required",
            {"type": "function", "name": "other"},
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "other"}]},
            "none",
        ]  # fmt: skip
        for choice in choices:
            await client.responses.create(
                model="tiny", input="hi", tools=[TOOL, other], tool_choice=choice
            )
        grammars = [asked.sampling.grammar for asked in backend.requests]
        assert grammars[0] is not None
        assert '"integer"' in grammars[0].text
        assert grammars[1] is not None
        assert "look-up.v2" in grammars[1].text
        for grammar in grammars[2:4]:
            assert grammar is not None
            assert "functions.other" in grammar.text
            assert "look-up" not in grammar.text
        assert grammars[4] is None
        await client.responses.create(model="tiny", input="hi", reasoning={"effort": "none"})
        await client.responses.create(model="tiny", input="the " * 2000, truncation="auto")
        assert len(backend.requests[-1].prompt_tokens) <= 1024

    run(says("hello"), test)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"role": "user"}]}, "input[0]", "needs content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]", "needs call_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "not supported"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "only text",
    ),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "whole conversat"),
    ({"input": "x", "max_tokens": 5}, "max_tokens", "use max_output_tokens"),
    ({"input": "x", "n": 2}, "n", "/v1/chat/completions"),
    ({"input": "x", "stop": "a"}, "stop", "/v1/chat/completions"),
    ({"input": "x", "response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ({"input": "x", "chat_template": "{{ x }}"}, "chat_template", "checkpoint"),
    ({"input": "x", "background": True}, "background", "stream it"),
    ({"input": "x", "conversation": "c"}, "conversation", "nothing is stored"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": "x", "max_output_tokens": 5000}, "max_output_tokens", "maximum context length"),
    ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text", "schema is missing"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs", "limit of 20"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "frob"}}}},
        "text",
        "frob",
    ),
    (
        {"input": "x", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto",
         "tools": [{"type": "function", "name": "nobody"}]}},
        "tool_choice",
        "nobody",
    ),
]  # fmt: skip


def test_what_cannot_be_done_is_refused() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        async with httpx.AsyncClient(base_url=str(client.base_url), timeout=LONG_S) as http:
            for body, param, message in REFUSED:
                reply = await http.post("responses", json=body)
                assert reply.status_code == 400, (body, reply.text)
                error = reply.json()["error"]
                assert error["param"] == param, error
                assert message in error["message"], error
        assert backend.requests == []

    run(says("hello"), test)


def test_a_stream_that_breaks_says_so() -> None:
    def script(request: Any) -> Any:
        good = list(says("hello")(request))
        failure = Failure(status=500, error_type="InternalServerError", message="lost")
        return [good[0], *refusal(request, failure)]

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        events = [
            event
            async for event in await client.responses.create(model="tiny", input="hi", stream=True)
        ]
        assert events[-1].type == "response.failed"
        assert events[-1].response.status == "failed"
        assert events[-1].response.error.message == "lost"

    run(script, test)


def test_no_field_is_lost_between_the_apis() -> None:
    """Every shared field of the internal request is taken from the body as it is."""
    from mooncake.api.adapters.openai_responses import responses_chat
    from mooncake.api.schema.responses import ResponsesRequest

    given = {
        "seed": 1, "top_k": 2, "min_p": 0.1, "stop_token_ids": [1], "logit_bias": {"1": 1},
        "structured_outputs": {"json": {"type": "object"}}, "cache_salt": "s", "priority": "batch",
        "chat_template_kwargs": {"x": 1}, "stream": True, "truncate_prompt_tokens": 5,
    }  # fmt: skip
    chat = responses_chat(ResponsesRequest.model_validate({"input": "x"} | given))
    expected = ChatRequest.model_validate({"messages": [{"role": "user"}]} | given)
    for name in given:
        assert getattr(chat, name) == getattr(expected, name)
