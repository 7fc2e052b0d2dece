"""Anthropic's messages as its official client sees them, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import pytest

from mooncake.api.adapters.anthropic_messages import arguments_so_far
from mooncake.api.config import ApiConfig
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
ASK: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": "look-up.v2",
    "description": "d",
    "input_schema": {
        "type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"],
    },
}  # fmt: skip
CALL = "<|tool_call_begin|>functions.look-up.v2:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
ANSWERS = {
    "text": "hello the 你好🙂",
    "thoughts": "<think>in the 好</think>hello",
    "calls": "hello " + SECTION.format(CALL.format(0, '{"q": "你"}') + CALL.format(1, '{"q":1}')),
    "all": "<think>hm</think>the" + SECTION.format(CALL.format(0, "{}")) + " end",
    "call in a thought": "<think>hm" + SECTION.format(CALL.format(0, '{"q": ""}')),
    "nothing": "",
}

Test = Callable[[anthropic.AsyncAnthropic, ScriptedBackend], Awaitable[None]]


def run(script: Script, test: Test, **config: Any) -> None:
    """Run `test` with the official client against a live API server."""

    async def main() -> None:
        backend = ScriptedBackend(script)
        settings = ApiConfig(port=0, drain_s=0.2, **config)
        async with (
            live_api_server(backend, model=tiny_model(max_model_len=1024), config=settings) as url,
            anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client,
        ):
            await test(client, backend)
        assert backend.num_running == 0

    asyncio.run(main())


def test_answer_with_usage() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        message = await client.messages.create(
            model="alias", max_tokens=100, messages=ASK, system="be brief",
            metadata={"user_id": "u"}, extra_body={"temperature": 0.5, "top_k": 3},
        )  # fmt: skip
        thinking, text = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "in the 好")
        assert (text.type, text.text) == ("text", "hello")
        assert (message.role, message.model, message.stop_reason) == (
            "assistant", "tiny", "end_turn",
        )  # fmt: skip
        [asked] = backend.requests
        assert TOKENIZER.decode(asked.prompt_tokens) == (
            "<|im_system|>system<|im_middle|>be brief<|im_end|>"
            "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
        )
        assert message.usage.input_tokens == len(asked.prompt_tokens) - 7
        assert message.usage.cache_read_input_tokens == 7
        assert message.usage.output_tokens == len(TOKENIZER.encode(ANSWERS["thoughts"])) + 1
        assert (asked.sampling.temperature, asked.sampling.top_k) == (0.5, 3)
        assert asked.sampling.max_tokens == 100
        count = await client.messages.count_tokens(model="tiny", messages=ASK, system="be brief")
        assert count.input_tokens == len(asked.prompt_tokens)

    run(says(ANSWERS["thoughts"] + "<|im_end|>", cached=7), test, api_keys=("key",))


def test_usage_says_where_cached_tokens_came_from_and_why_others_were_computed() -> None:
    tokens = TOKENIZER.encode(ANSWERS["text"])
    ask: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": ASK}

    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        whole = await client.messages.create(**ask)
        assert whole.usage.mooncake == SHOWN
        events = [event async for event in await client.messages.create(**ask, stream=True)]
        [end] = [event for event in events if event.type == "message_delta"]
        assert end.usage.mooncake == SHOWN
        assert end.usage.cache_read_input_tokens == NUM_CACHED_TOKENS
        [start] = [event for event in events if event.type == "message_start"]
        assert "mooncake" not in start.message.usage.model_dump(), "it is not known yet"

    run(lambda asked: answer(asked, tokens, num_cached_tokens=NUM_CACHED_TOKENS, cache=USE), test)


def test_usage_says_nothing_of_the_cache_where_nothing_is_known() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        message = await client.messages.create(model="tiny", max_tokens=50, messages=ASK)
        assert "mooncake" not in message.usage.model_dump()

    run(says(ANSWERS["text"], cached=7), test)


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("limit", [9, 500])
def test_stream_and_whole_agree(name: str, limit: int) -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        ask: dict[str, Any] = {
            "model": "tiny", "max_tokens": limit, "messages": ASK, "tools": [TOOL],
        }  # fmt: skip
        whole = await client.messages.create(**ask)
        kinds = []
        async with client.messages.stream(**ask) as stream:
            async for event in stream:
                kinds.append(event.type)
            built = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert kinds.count("content_block_start") == len(whole.content)
        assert kinds.count("content_block_stop") == len(whole.content)
        assert without_ids(built) == without_ids(whole)

    run(says(ANSWERS[name], group=2, cached=5), test)


def without_ids(message: Any) -> dict[str, Any]:
    """Return what does not change from call to call."""
    fields = message.model_dump(exclude={"id"}, exclude_none=True)
    for block in fields["content"]:
        block.pop("signature", None)
    return json.loads(json.dumps(fields))


def test_calls_and_their_results_go_back_and_forth() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        first = await client.messages.create(
            model="tiny", max_tokens=200, messages=ASK, tools=[TOOL]
        )
        assert first.stop_reason == "tool_use"
        text, one, two = first.content
        assert text.text == "hello "
        assert (one.name, one.id, one.input) == (
            "look-up.v2", "functions.look-up.v2:0", {"q": "你"},
        )  # fmt: skip
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": one.id, "content": "found"},
            {
                "type": "tool_result",
                "tool_use_id": two.id,
                "content": [{"type": "text", "text": "lost"}],
                "is_error": True,
            },
            {"type": "text", "text": "go on"},
        ]
        history = [
            *ASK,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
        ]
        await client.messages.create(model="tiny", max_tokens=9, messages=history, tools=[TOOL])
        prompt = TOKENIZER.decode(backend.requests[1].prompt_tokens)
        said = ANSWERS["calls"].replace('{"q":1}', '{"q": 1}')
        assert f"assistant<|im_middle|>{said}<|im_end|>" in prompt
        tail = (
            "<|im_middle|>## Return of functions.look-up.v2:0\nfound<|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.look-up.v2:1\nlost<|im_end|>"
            "<|im_user|>user<|im_middle|>go on<|im_end|><|im_assistant|>assistant<|im_middle|>"
        )
        assert prompt.endswith(tail)
        assert '"parameters":{"type":"object"' in prompt

    run(says(ANSWERS["calls"]), test)


def test_the_last_turn_of_the_assistant_is_gone_on_with() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        history = [*ASK, {"role": "assistant", "content": "the answer is"}]
        await client.messages.create(model="tiny", max_tokens=9, messages=history)
        prompt = TOKENIZER.decode(backend.requests[0].prompt_tokens)
        assert prompt.endswith("<|im_assistant|>assistant<|im_middle|>the answer is")

    run(says("hello"), test)


def test_choices_and_forms_reach_the_engine() -> None:
    other = {**TOOL, "name": "other"}
    choices: list[Any] = [
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "other"},
        {"type": "auto"},
        {"type": "none"},
    ]

    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        for choice in choices:
            await client.messages.create(
                model="tiny", max_tokens=9, messages=ASK, tools=[TOOL, other], tool_choice=choice
            )
        form = {"type": "json_schema", "schema": {"type": "object", "required": ["zz"]}}
        await client.messages.create(
            model="tiny", max_tokens=9, messages=ASK, extra_body={"output_config": {"format": form}}
        )
        any_one, named, auto, none, formed = [asked.sampling.grammar for asked in backend.requests]
        assert not any_one.optional
        assert "call+" not in any_one.text
        assert "functions.other" in named.text
        assert "look-up" not in named.text
        assert auto.optional
        assert none is None
        assert "zz" in formed.text

    run(says("hello"), test)


def test_a_stop_sequence_is_named() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        message = await client.messages.create(
            model="tiny", max_tokens=50, messages=ASK, stop_sequences=["zz", "你"]
        )
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "你")
        assert message.content[0].text == "hello the "

    run(says(ANSWERS["text"]), test)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": ASK}, "max_tokens: field required"),
    ({"max_tokens": 5, "messages": []}, "messages"),
    ({"max_tokens": 0, "messages": ASK}, "max_tokens"),
    ({"max_tokens": 5000, "messages": ASK}, "maximum context length is 1024 tokens"),
    ({"max_tokens": 5, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "'image' is not supported",
    ),
    (
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "needs tool_use_id",
    ),
    (
        {"max_tokens": 5, "messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "", "content": "x"}]}]},
        "tool_call_id",
    ),
    ({"max_tokens": 5, "messages": ASK, "tools": [{"type": "bash_1", "name": "b"}]}, "tools[0]"),
    ({"max_tokens": 5, "messages": ASK, "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"max_tokens": 5, "messages": ASK, "tool_choice": {"type": "any"}}, "no tools"),
    ({"max_tokens": 5, "messages": ASK, "stop": "a"}, "use stop_sequences"),
    ({"max_tokens": 5, "messages": ASK, "n": 2}, "one answer a call"),
    ({"max_tokens": 5, "messages": ASK, "mcp_servers": [{"url": "x"}]}, "declare tools"),
    ({"max_tokens": 5, "messages": ASK, "stop_sequences": [""]}, "stop_sequences: a stop string"),
]  # fmt: skip


def test_errors_have_anthropics_shape() -> None:
    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="other", max_tokens=5, messages=ASK)
        assert missing.value.request_id, "what its user is to report"
        assert missing.value.body["error"]["type"] == "not_found_error"
        async with httpx.AsyncClient(base_url=str(client.base_url), timeout=LONG_S) as http:
            for body, message in REFUSED:
                reply = await http.post("v1/messages", json=body, headers={"x-api-key": "key"})
                assert reply.status_code == 400, (body, reply.text)
                answer = reply.json()
                assert answer["type"] == "error"
                assert answer["error"]["type"] == "invalid_request_error"
                assert message in answer["error"]["message"], answer
                assert reply.headers["request-id"] == reply.headers["x-request-id"]
            denied = await http.post("v1/messages", json={}, headers={"x-api-key": "wrong"})
            assert denied.status_code == 401
            assert denied.json()["error"]["type"] == "authentication_error"
            wrong = await http.get("v1/messages", headers={"x-api-key": "key"})
            assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
        assert backend.requests == []

    run(says("hello"), test, api_keys=("key",))


@pytest.mark.parametrize(("status", "kind"), [(503, "overloaded_error"), (500, "api_error")])
def test_failures_before_and_in_a_stream(status: int, kind: str) -> None:
    failure = Failure(status=status, error_type="x", message="lost")

    def script(request: Any) -> Any:
        good = list(says("hello")(request)) if request.sampling.top_k else []
        return [*good[:1], *refusal(request, failure)]

    async def test(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
        ask: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": ASK}
        with pytest.raises(anthropic.APIStatusError) as refused:
            await client.messages.create(**ask)
        assert refused.value.status_code == status
        assert refused.value.body["error"] == {"type": kind, "message": "lost"}
        with pytest.raises(anthropic.APIStatusError) as broken:
            async for _ in await client.messages.create(
                **ask, extra_body={"top_k": 1}, stream=True
            ):
                pass
        assert broken.value.body["error"] == {"type": kind, "message": "lost"}

    run(script, test)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}), ("{", {}), ('{"a": 1', {"a": 1}), ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "b"}', {"a": "b"}), ('{"a": "b', {}), ("[1]", {}), ("x", {}),
    ],
)  # fmt: skip
def test_arguments_of_a_call_that_was_cut_off(text: str, value: dict[str, Any]) -> None:
    assert arguments_so_far(text) == value
