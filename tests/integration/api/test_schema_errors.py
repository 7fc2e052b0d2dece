"""Answers that are not valid against schemas which no grammar can follow: every API says so beside
the answer, whole and streamed alike, and says nothing where there is nothing to say.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anthropic
import httpx
import openai
import pytest

from mooncake.api import api_server
from mooncake.api.constrained.checker import SchemaChecker
from mooncake.base import GenerateRequest, OutputEvent
from tests.support.api.server import ScriptedBackend, live_api_server, says, tiny_model

ASK: Any = [{"role": "user", "content": "hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    "dependentRequired": {"tags": ["by"]},
}
CALL = "<|tool_call_begin|>functions.go:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
REFUSED = "uniqueItems|dependentRequired"
GOOD, BAD = '{"tags":["a","b"],"by":1}', '{"tags":["a","a"]}'
CALLS = SECTION.format(CALL.format(0, GOOD) + CALL.format(1, BAD))
FUNCTION = {"name": "go", "parameters": SCHEMA}
ANTHROPIC_TOOL: Any = {"name": "go", "input_schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
REMOTE = {"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}


@pytest.fixture(autouse=True)
def patient_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work the shipped limits end checks, which are reported then."""
    patient = partial(SchemaChecker, cpu_limit_s=60.0, wall_limit_s=600.0, queue_limit_s=600.0)
    monkeypatch.setattr(api_server, "SchemaChecker", patient)


@asynccontextmanager
async def serving(text: str, group: int = 2) -> AsyncIterator[str]:
    backend = ScriptedBackend(says(text, group=group))
    async with live_api_server(backend, model=tiny_model(max_model_len=2048)) as url:
        yield url


def of_keywords(errors: Any, call_id: str | None = "functions.go:1") -> None:
    """Check the errors of `BAD`, whatever the client made of them."""
    assert isinstance(errors, list), errors
    assert {(error["path"], error["keyword"]) for error in errors} == {
        ("/tags", "uniqueItems"),
        ("", "dependentRequired"),
    }
    for error in errors:
        assert error.get("tool_call_id") == call_id
        assert error["message"]


async def chat_errors(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    """Return the errors of the whole reply and of the stream."""
    whole = await client.chat.completions.create(model="tiny", messages=ASK, **asked)
    found = [(whole.choices[0].model_extra or {}).get("schema_errors")]
    stream = await client.chat.completions.create(model="tiny", messages=ASK, stream=True, **asked)
    chunks = [chunk async for chunk in stream]
    told = [(c.choices[0].model_extra or {}).get("schema_errors") for c in chunks if c.choices]
    assert told[:-1] == [None] * (len(told) - 1), "not with the chunk that ends the choice"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    return [*found, told[-1]]


async def response_errors(client: openai.AsyncOpenAI, **asked: Any) -> list[Any]:
    whole = await client.responses.create(model="tiny", input="hi", **asked)
    async with client.responses.stream(model="tiny", input="hi", **asked) as stream:
        async for _ in stream:
            pass
        last = await stream.get_final_response()
    return [(each.model_extra or {}).get("schema_errors") for each in (whole, last)]


async def message_errors(client: anthropic.AsyncAnthropic, **asked: Any) -> list[Any]:
    fields: Any = {"model": "tiny", "messages": ASK, "max_tokens": 900, **asked}
    whole = await client.messages.create(**fields)
    found = []
    async with client.messages.stream(**fields) as stream:
        async for event in stream:
            if event.type == "message_delta":
                found.append((event.delta.model_extra or {}).get("schema_errors"))
        last = await stream.get_final_message()
        assert [block.type for block in last.content] == [block.type for block in whole.content]
    return [(whole.model_extra or {}).get("schema_errors"), *found]


async def of_chat(url: str, **asked: Any) -> list[Any]:
    tools = [{"type": "function", "function": FUNCTION | asked}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await chat_errors(client, tools=tools)


async def of_responses(url: str, **asked: Any) -> list[Any]:
    tools = [{"type": "function", **FUNCTION, **asked}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return await response_errors(client, tools=tools)


async def of_messages(url: str, **asked: Any) -> list[Any]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        return await message_errors(client, tools=[ANTHROPIC_TOOL | asked])


@pytest.mark.parametrize("ask", [of_chat, of_responses, of_messages])
def test_calls_of_tools(ask: Any) -> None:
    async def main() -> None:
        async with serving(CALLS) as url:
            for asked in ({}, {"strict": False}):
                errors = await ask(url, **asked)
                assert len(errors) == 2
                for each in errors:
                    of_keywords(each)
            refused = openai.BadRequestError, anthropic.BadRequestError
            with pytest.raises(refused, match=REFUSED):
                await ask(url, strict=True)
        for text in (SECTION.format(CALL.format(0, GOOD)), "hello"):
            async with serving(text) as url:
                assert await ask(url) == [None, None]

    asyncio.run(main())


def test_texts_of_a_format() -> None:
    async def main() -> None:
        async with (
            serving(BAD) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            for each in await chat_errors(client, response_format=FORMAT):
                of_keywords(each, None)
            text_format = {"type": "json_schema", "name": "x", "schema": SCHEMA}
            for strict in ({}, {"strict": False}):
                text: Any = {"format": text_format | strict}
                for each in await response_errors(client, text=text):
                    of_keywords(each, None)
            with pytest.raises(openai.BadRequestError, match=f"text: .*{REFUSED}"):
                await response_errors(client, text={"format": text_format | {"strict": True}})
            completion = await client.completions.create(
                model="tiny", prompt="x", max_tokens=900, extra_body={"response_format": FORMAT}
            )
            of_keywords((completion.choices[0].model_extra or {})["schema_errors"], None)
            config = {"format": {"type": "json_schema", "schema": SCHEMA}}
            body = {"messages": ASK, "max_tokens": 9, "output_config": config}
            reply = await asyncio.to_thread(httpx.post, f"{url}/v1/messages", json=body)
            assert reply.status_code == 400, "this API is always exact"
            assert re.search(REFUSED, reply.text)
        async with (
            serving(GOOD) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            assert await chat_errors(client, response_format=FORMAT) == [None, None]

    asyncio.run(main())


def test_every_choice_has_its_own_errors() -> None:
    async def main() -> None:
        scripts = iter([says(text, group=3) for text in (GOOD, BAD, GOOD, BAD)])

        def script(request: GenerateRequest) -> Iterable[OutputEvent | None]:
            return next(scripts)(request)

        backend = ScriptedBackend(script)
        async with live_api_server(backend, model=tiny_model(max_model_len=2048)) as url:
            body = {"messages": ASK, "n": 4, "response_format": FORMAT}
            reply = await asyncio.to_thread(httpx.post, f"{url}/v1/chat/completions", json=body)
        errors = [choice.get("schema_errors") for choice in reply.json()["choices"]]
        assert [each is None for each in errors] == [True, False, True, False]
        of_keywords(errors[1], None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "schema", "max_tokens", "expected"),
    [
        (BAD, SCHEMA, 5, None),  # cut off, which its finish_reason says
        ("{" * 3, SCHEMA, 900, ("type", "it is not valid JSON")),
        ('{"a":1}', REMOTE, 900, (None, "not checked: the schema refers to 'https://")),
        ('{"a":1}', {"not": 5}, 900, (None, "not checked: ")),
    ],
)
def test_what_is_cut_off_or_cannot_be_checked(
    text: str, schema: Any, max_tokens: int, expected: tuple[str | None, str] | None
) -> None:
    async def main() -> None:
        asked = {"type": "json_schema", "json_schema": {"schema": schema}}
        body = {"messages": ASK, "response_format": asked, "max_tokens": max_tokens}
        async with serving(text) as url:
            reply = await asyncio.to_thread(httpx.post, f"{url}/v1/chat/completions", json=body)
        errors = reply.json()["choices"][0].get("schema_errors")
        if expected is None:
            assert errors is None
        else:
            assert [error["keyword"] for error in errors] == [expected[0]]
            assert errors[0]["message"].startswith(expected[1])

    asyncio.run(main())


def test_reasoning_is_no_part_of_the_text() -> None:
    async def main() -> None:
        async with serving(f"<think>{BAD}</think>{GOOD}") as url:
            body = {"messages": ASK, "response_format": FORMAT}
            reply = await asyncio.to_thread(httpx.post, f"{url}/v1/chat/completions", json=body)
        choice = reply.json()["choices"][0]
        assert "schema_errors" not in choice
        assert json.loads(choice["message"]["content"]) == json.loads(GOOD)

    asyncio.run(main())
