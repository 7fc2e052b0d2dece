"""Chat completions as the official client sees them, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import openai
import pytest

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.text.chat_template import ChatTemplate
from mooncake.base import SeededIds
from tests.support.api.cache_use import NUM_CACHED_TOKENS, SHOWN, USE
from tests.support.api.server import (
    Script,
    ScriptedBackend,
    answer,
    live_api_server,
    says,
    tiny_model,
    tiny_tokenizer,
)
from tests.support.waiting import LONG_S

TEXT = "hello the 你好🙂 in the end"
ASK: list[Any] = [{"role": "user", "content": "hi"}]
TOKENIZER = tiny_tokenizer()


def run(
    script: Script, test: Callable[[openai.AsyncOpenAI, ScriptedBackend], Awaitable[None]]
) -> None:
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


class WatchedTemplate(ChatTemplate):
    """Remembers in which threads it was rendered."""

    threads: ClassVar[set[int]] = set()

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        self.threads.add(threading.get_ident())
        return super().render(messages, **settings)


def test_conversations_become_tokens_beside_the_loop() -> None:
    """A long one takes seconds, in which no other stream may stand still."""
    model = tiny_model(max_model_len=1024)
    watched = WatchedTemplate(model.template.source, TOKENIZER.special_tokens)
    bodies = {
        "/v1/chat/completions": {"messages": ASK},
        "/v1/responses": {"input": "hi"},
        "/v1/messages": {"messages": ASK, "max_tokens": 4},
        "/v1/messages/count_tokens": {"messages": ASK},
        "/tokenize": {"messages": ASK},
    }

    async def main() -> None:
        backend = ScriptedBackend(says(TEXT))
        api_server = live_api_server(backend, model=replace(model, template=watched))
        async with api_server as url, httpx.AsyncClient(base_url=url, timeout=LONG_S) as client:
            for path, body in bodies.items():
                watched.threads.clear()
                assert (await client.post(path, json=body)).status_code == 200
                assert watched.threads
                assert threading.get_ident() not in watched.threads, path

    asyncio.run(main())


def test_answer_with_usage() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(model="alias", messages=ASK, seed=5)
        [choice] = reply.choices
        assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
        assert choice.finish_reason == "stop"
        assert reply.id.startswith("chatcmpl-")
        assert (reply.object, reply.model) == ("chat.completion", "tiny")
        [asked] = backend.requests
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(asked.prompt_tokens)
        assert reply.usage.completion_tokens == len(TOKENIZER.encode(TEXT)) + 1
        assert reply.usage.total_tokens == sum(
            (reply.usage.prompt_tokens, reply.usage.completion_tokens)
        )
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == 7
        prompt = TOKENIZER.decode(asked.prompt_tokens)
        assert prompt.endswith(
            "<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
        )
        assert asked.sampling.seed == 5
        assert asked.sampling.max_tokens == 1024 - len(asked.prompt_tokens)

    run(says(TEXT + "<|im_end|>", cached=7), test)


def test_usage_says_where_cached_tokens_came_from_and_why_others_were_computed() -> None:
    tokens = TOKENIZER.encode(TEXT)
    settings: dict[str, Any] = {"model": "tiny", "messages": ASK, "n": 2}

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        whole = await client.chat.completions.create(**settings)
        assert whole.usage.prompt_tokens_details.mooncake == SHOWN, "of one of the two answers"
        stream = await client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        [usage] = [chunk.usage async for chunk in stream if chunk.usage]
        assert usage == whole.usage
        both = await client.completions.create(model="tiny", prompt=["a", "b"])
        found = both.usage.prompt_tokens_details.mooncake
        assert (found["hits"]["hbm"], found["misses"]["evicted"]) == (256, 512), "of both prompts"

    run(lambda asked: answer(asked, tokens, num_cached_tokens=NUM_CACHED_TOKENS, cache=USE), test)


def test_usage_says_nothing_of_the_cache_where_nothing_is_known() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(model="tiny", messages=ASK)
        assert reply.usage.prompt_tokens_details.model_dump(exclude_none=True) == {
            "cached_tokens": 7
        }

    run(says(TEXT, cached=7), test)


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("stop", [None, "好", ["zz", "the e"]])
def test_stream_and_whole_agree(group: int, stop: object) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        settings: dict[str, Any] = {
            "model": "tiny", "messages": ASK, "n": 2, "seed": 3, "logprobs": True,
            "top_logprobs": 2, "stop": stop,
        }  # fmt: skip
        whole = await client.chat.completions.create(**settings)
        stream = await client.chat.completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
        texts, ends, logprobs, usages = {0: "", 1: ""}, {}, {0: [], 1: []}, []
        async for chunk in stream:
            assert chunk.id.startswith("chatcmpl-")
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                if choice.logprobs is not None:
                    logprobs[choice.index] += choice.logprobs.content
                if choice.finish_reason:
                    assert choice.index not in ends
                    ends[choice.index] = (choice.finish_reason, choice.stop_reason)
            if chunk.usage is not None:
                assert chunk.choices == []
                usages.append(chunk.usage)
        assert usages == [whole.usage]
        for choice in whole.choices:
            assert texts[choice.index] == choice.message.content
            assert ends[choice.index] == (choice.finish_reason, choice.stop_reason)
            assert logprobs[choice.index] == choice.logprobs.content
        assert [asked.sampling.seed for asked in backend.requests] == [3, 4, 3, 4]

    run(says(TEXT, group=group), test)


def test_logprobs_spell_tokens_and_bytes() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, logprobs=True, top_logprobs=2, max_completion_tokens=2
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        first, second = logprobs.content
        assert (first.token, first.bytes, first.logprob) == ("hello", list(b"hello"), -0.5)
        assert [top.token for top in first.top_logprobs] == ["hello", " w"]
        assert second.token == " the"
        assert reply.choices[0].finish_reason == "length"

    run(says(TEXT), test)


@pytest.mark.parametrize("logprobs", [None, False])
def test_no_logprobs_of_which_none_are_top(logprobs: bool | None) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, logprobs=logprobs, top_logprobs=0
        )
        assert reply.choices[0].logprobs is None

    run(says(TEXT), test)


def test_logprobs_without_top_have_empty_lists() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny",
            messages=ASK,
            logprobs=True,
            extra_body={"return_tokens_as_token_ids": True},
        )
        logprobs = reply.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].top_logprobs == []
        assert logprobs.content[0].token == f"token_id:{TOKENIZER.encode('hello')[0]}"
        assert backend.requests[0].sampling.num_logprobs == 0

    run(says(TEXT), test)


def test_extras_reach_the_engine() -> None:
    extras = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [9], "allowed_token_ids": [1, 2], "cache_salt": "s", "priority": 3,
        "prompt_logprobs": 1, "return_token_ids": True, "some_new_field": 1, "user": "u",
    }  # fmt: skip

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, temperature=0.5, top_p=0.9, presence_penalty=0.1,
            frequency_penalty=0.2, logit_bias={"4": 2}, max_tokens=7, extra_body=extras,
        )  # fmt: skip
        [asked] = backend.requests
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
        assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
        assert (sampling.min_tokens, sampling.max_tokens) == (2, 7)
        assert (sampling.stop_token_ids, sampling.allowed_token_ids) == (frozenset({9}), [1, 2])
        assert sampling.logit_bias == {4: 2}
        assert (asked.cache_salt, asked.priority.value) == ("s", "batch")
        dump = reply.model_dump()
        assert dump["prompt_token_ids"] == asked.prompt_tokens.tolist()
        assert dump["choices"][0]["token_ids"] == TOKENIZER.encode(TEXT)[:7]
        assert dump["prompt_logprobs"][0] is None
        token = asked.prompt_tokens[1]
        assert dump["prompt_logprobs"][1][str(token)]["rank"] == 1
        assert len(dump["prompt_logprobs"]) == len(asked.prompt_tokens)

    run(says(TEXT), test)


def test_unknown_fields_are_logged_and_known_quiet_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        await client.chat.completions.create(
            model="tiny", messages=ASK, user="u", extra_body={"new_field": 1, "a\nb": 2}
        )

    run(says(TEXT), test)
    assert "'a\\nb', 'new_field'" in caplog.text
    assert "'user'" not in caplog.text


def test_token_ids_in_a_stream() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, extra_body={"return_token_ids": True}
        )
        prompt: list[int] = []
        tokens: list[int] = []
        async for chunk in stream:
            dump = chunk.model_dump()
            prompt += dump.get("prompt_token_ids") or []
            tokens += dump["choices"][0].get("token_ids") or []
        assert prompt == backend.requests[0].prompt_tokens.tolist()
        assert tokens == TOKENIZER.encode(TEXT + "<|im_end|>")

    run(says(TEXT), test)


def test_continuous_usage_counts_up() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        stream = await client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, max_tokens=4,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )  # fmt: skip
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (1, 4)

    run(says(TEXT), test)


def test_contents_in_parts_continuation_and_echo() -> None:
    messages: list[Any] = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
        },
        {"role": "user", "content": None},
        {"role": "assistant", "content": "It is"},
    ]

    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=messages,
            extra_body={"continue_final_message": True, "echo": True},
        )  # fmt: skip
        assert reply.choices[0].message.content == "It is" + TEXT
        assert TOKENIZER.decode(backend.requests[0].prompt_tokens) == (
            "<|im_system|>system<|im_middle|>be brief<|im_end|>"
            "<|im_user|>user<|im_middle|><|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>It is"
        )

    run(says(TEXT), test)


def test_stream_is_server_sent_events_and_ends_with_done() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with live_api_server(backend) as url, httpx.AsyncClient(timeout=LONG_S) as client:
            reply = await client.post(
                f"{url}/v1/chat/completions", json={"messages": ASK, "stream": True}
            )
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache"
        events = reply.text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert chunks[1]["choices"][0]["delta"] == {"content": "hello"}
        assert chunks[-1]["choices"][0]["delta"] == {}
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert all("usage" not in chunk for chunk in chunks)
        assert len({chunk["id"] for chunk in chunks}) == 1

    asyncio.run(main())


def test_request_ids_name_the_call_and_stay_apart() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            path = "/v1/chat/completions"
            named = {"X-Request-Id": "mine"}
            both = await asyncio.gather(
                client.post(path, json={"messages": ASK, "n": 2}, headers=named),
                client.post(path, json={"messages": ASK}, headers=named),
            )
            assert [reply.json()["id"] for reply in both] == ["chatcmpl-mine"] * 2
            assert [reply.headers["x-request-id"] for reply in both] == ["mine"] * 2
            in_body = await client.post(path, json={"messages": ASK, "request_id": "b-1"})
            assert in_body.json()["id"] == "chatcmpl-b-1"
            bad = await client.post(path, json={"messages": ASK}, headers={"X-Request-Id": "a b"})
            assert bad.headers["x-request-id"] != "a b"
            assert bad.json()["id"] == f"chatcmpl-{bad.headers['x-request-id']}"
        ids = [asked.request_id for asked in backend.requests]
        assert len(set(ids)) == 5
        assert all(name.startswith("chatcmpl-mine-") for name in ids[:3])

    asyncio.run(main())


def test_ids_of_two_gateways_stay_apart_even_with_the_same_luck() -> None:
    """A client gave both the same id, and both draw the same random part."""

    async def ids_at(gateway: str) -> list[str]:
        backend = ScriptedBackend(says("hello"))
        config = ApiConfig(gateway_id=gateway)
        app = create_app(backend, tiny_model(), config, ids=SeededIds(7))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in (
                ("/v1/chat/completions", {"messages": ASK, "n": 2}),
                ("/v1/completions", {"prompt": ["a", "b"]}),
                ("/v1/messages", {"messages": ASK, "max_tokens": 4}),
                ("/v1/responses", {"input": "hi"}),
            ):
                reply = await client.post(path, json=body, headers={"X-Request-Id": "mine"})
                assert reply.status_code == 200, reply.text
                assert gateway not in reply.text, "no client's business"
        return [asked.request_id for asked in backend.requests]

    async def main() -> None:
        first, second = await ids_at("gateway"), await ids_at("gateway-node7-a1b2c3")
        assert len(first) == len(second) == 6
        assert len({*first, *second}) == 12
        assert all("-gateway-node7-a1b2c3-" in name for name in second)

    asyncio.run(main())


def test_author_defaults_apply() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        from mooncake.api.model import GenerationDefaults

        model = tiny_model(defaults=GenerationDefaults(temperature=0.6))
        async with (
            live_api_server(backend, model=model) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            await client.post(f"{url}/v1/chat/completions", json={"messages": ASK})
        assert backend.requests[0].sampling.temperature == 0.6

    asyncio.run(main())


def test_seeds_are_drawn_when_none_is_given() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        for _ in range(2):
            await client.chat.completions.create(model="tiny", messages=ASK, n=2)
        seeds = [asked.sampling.seed for asked in backend.requests]
        assert seeds[1] == (seeds[0] + 1) % 2**64
        assert len(set(seeds)) == 4

    run(says(TEXT), test)


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "look-up", "parameters": {"type": "object", "properties": {}}},
    }
]
CALLS = (
    "<think>need it</think>ok<|tool_calls_section_begin|><|tool_call_begin|>functions.look-up:0"
    '<|tool_call_argument_begin|>{"q": "你好"}<|tool_call_end|>'
    "<|tool_call_begin|>functions.look-up:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)


def test_tool_calls_whole_and_streamed_agree() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        whole = await client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content == "ok"
        dump = message.model_dump()
        assert (dump["reasoning"], dump["reasoning_content"]) == ("need it", "need it")
        assert message.tool_calls is not None
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls]
        assert calls == [
            ("functions.look-up:0", "look-up", '{"q": "你好"}'),
            ("functions.look-up:1", "look-up", "{}"),
        ]
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("need it") + 1
        prompt = TOKENIZER.decode(backend.requests[0].prompt_tokens)
        assert prompt.startswith("<|im_system|>tool_declare<|im_middle|>[{")

        async with client.chat.completions.stream(
            model="tiny", messages=ASK, tools=TOOLS
        ) as stream:
            final = await stream.get_final_completion()
        streamed = final.choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert streamed.message.content == "ok"
        assert streamed.message.tool_calls is not None
        assert [
            (c.id, c.function.name, c.function.arguments) for c in streamed.message.tool_calls
        ] == calls

    run(says(CALLS), test)


def test_calls_without_text_have_null_content_and_one_call_when_not_parallel() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, parallel_tool_calls=False
        )
        message = reply.choices[0].message
        assert message.content is None
        assert message.tool_calls is not None
        assert [call.id for call in message.tool_calls] == ["functions.look-up:0"]

    run(says(CALLS[CALLS.index("<|tool_calls") :]), test)


def test_tool_choice_none_shows_no_tools_and_reads_no_calls() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, tools=TOOLS, tool_choice="none"
        )
        assert reply.choices[0].message.tool_calls is None
        assert "tool_declare" not in TOKENIZER.decode(backend.requests[0].prompt_tokens)

    run(says("hello"), test)


def test_reasoning_can_be_left_out() -> None:
    async def test(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
        reply = await client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"include_reasoning": False}
        )
        message = reply.choices[0].message.model_dump()
        assert message["content"] == "yes"
        assert "reasoning" not in message

    run(says("<think>hm</think>yes"), test)
