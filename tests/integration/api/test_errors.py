"""Malformed requests: each has its status, names its field, and says what is wrong."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig
from tests.support.api.server import ScriptedBackend, live_api_server, says
from tests.support.waiting import LONG_S

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
GO: dict[str, Any] = {"prompt": "a"}
CALL = {"type": "function", "function": {"name": "f"}}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, ASK | fields


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, GO | fields


def says_who(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [fields]}


MALFORMED: list[tuple[tuple[str, Any], int, str | None, str]] = [
    # (path, body), status, param, part of the message
    ((CHAT, b""), 400, None, "not valid JSON"),
    ((CHAT, b"{"), 400, None, "not valid JSON"),
    ((CHAT, b"{'messages': []}"), 400, None, "not valid JSON"),
    ((CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}'), 400, None, "not valid JSON"),
    ((CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400, None, "JSON"),
    ((CHAT, b"[" * 100_000), 400, None, "not valid JSON"),
    ((CHAT, b"null"), 400, None, "object"),
    ((CHAT, []), 400, None, "object"),
    ((CHAT, {}), 400, "messages", "field required"),
    ((CHAT, {"messages": []}), 400, "messages", "at least 1"),
    ((CHAT, {"messages": "hi"}), 400, "messages", "must be a valid array"),
    ((CHAT, {"messages": [1]}), 400, "messages[0]", "must be"),
    (says_who(content="x"), 400, "messages[0].role", "field required"),
    (says_who(role="robot", content="x"), 400, "messages[0].role", "'assistant'"),
    (says_who(role="user", content=5), 400, "messages[0].content", "string or a valid array"),
    (
        says_who(role="user", content=[{"type": "image_url", "image_url": {"url": "x"}}]),
        400,
        "messages[0].content[0].type",
        "'image_url' is not supported",
    ),
    (
        says_who(role="assistant", content="", tool_calls=[{"function": {}}]),
        400,
        "messages[0].tool_calls[0].function.name",
        "field required",
    ),
    (chat(model="gpt-4"), 404, "model", "'gpt-4' does not exist"),
    (chat(model=5), 400, "model", "valid string"),
    (chat(model="x" * 5000), 404, "model", "does not exist"),
    (chat(temperature=-0.1), 400, "temperature", "greater than or equal to 0"),
    (chat(temperature=2.1), 400, "temperature", "less than or equal to 2"),
    (chat(temperature="hot"), 400, "temperature", "valid number"),
    ((CHAT, b'{"messages":[{"role":"user"}],"temperature":NaN}'), 400, "temperature", "finite"),
    ((CHAT, b'{"messages":[{"role":"user"}],"temperature":1e999}'), 400, "temperature", "finite"),
    (chat(top_p=0), 400, "top_p", "greater than 0"),
    (chat(top_p=1.5), 400, "top_p", "less than or equal to 1"),
    (chat(top_k=-2), 400, "top_k", "greater than or equal to -1"),
    (chat(top_k=1.5), 400, "top_k", "valid integer"),
    (chat(min_p=-1), 400, "min_p", "greater than or equal to 0"),
    (chat(presence_penalty=3), 400, "presence_penalty", "less than or equal to 2"),
    (chat(frequency_penalty=-3), 400, "frequency_penalty", "greater than or equal to -2"),
    (chat(repetition_penalty=0), 400, "repetition_penalty", "greater than or equal to 0.01"),
    (chat(n=0), 400, "n", "greater than or equal to 1"),
    (chat(n=129), 400, "n", "at most 128"),
    (chat(n=True), 400, "n", "valid integer"),
    (chat(stream="yes"), 400, "stream", "valid boolean"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "stream=true"),
    (chat(max_tokens=0), 400, "max_tokens", "at least 1"),
    (chat(max_tokens=-1), 400, "max_tokens", "greater than or equal to 0"),
    (chat(max_tokens="16"), 400, "max_tokens", "valid integer"),
    (chat(max_tokens=int("9" * 4300)), 400, "max_tokens", "less than or equal to"),
    (chat(n=int("9" * 4300)), 400, "n", "less than or equal to"),
    (chat(min_tokens=2**63), 400, "min_tokens", "less than or equal to"),
    (chat(prompt_logprobs=2**63), 400, "prompt_logprobs", "less than or equal to"),
    (chat(priority=-(2**64)), 400, "priority", "greater than or equal to"),
    (chat(max_output_tokens=4), 400, "max_output_tokens", "use max_tokens"),
    (chat(stop_sequences=["a"]), 400, "stop_sequences", "use stop"),
    (chat(max_completion_tokens=0), 400, "max_completion_tokens", "greater than or equal to 1"),
    (chat(max_tokens=200), 400, "max_tokens", "maximum context length is 256 tokens"),
    (chat(min_tokens=9, max_tokens=8), 400, "min_tokens", "more than the answer's limit of 8"),
    (chat(seed=2**63), 400, "seed", "less than or equal to"),
    (chat(seed="x"), 400, "seed", "valid integer"),
    (chat(stop=""), 400, "stop", "1 to 1024 characters"),
    (chat(stop=["x"] * 33), 400, "stop", "at most 32"),
    (chat(stop=["x" * 1025]), 400, "stop", "1 to 1024 characters"),
    (chat(stop=[1]), 400, "stop[0]", "valid string"),
    (chat(stop_token_ids=[10**6]), 400, "stop_token_ids", "out of range"),
    (chat(stop_token_ids=[-1]), 400, "stop_token_ids[0]", "greater than or equal to 0"),
    (chat(allowed_token_ids=[]), 400, "allowed_token_ids", "must not be empty"),
    (chat(allowed_token_ids=[10**6]), 400, "allowed_token_ids", "out of range"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias", "'x' is not a token id"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias", "from -100 to 100"),
    (chat(logit_bias={"999999": 1}), 400, "logit_bias", "out of range"),
    (chat(logit_bias={"5": "x"}), 400, "logit_bias", "a bias is a number"),
    (chat(logit_bias={"5": True}), 400, "logit_bias", "a bias is a number"),
    (chat(logit_bias=[1]), 400, "logit_bias", "must be an object"),
    (chat(logprobs=5), 400, "logprobs", "valid boolean"),
    (chat(top_logprobs=2), 400, "top_logprobs", "needs logprobs=true"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "limit of 20"),
    (chat(prompt_logprobs=21), 400, "prompt_logprobs", "limit of 20"),
    (chat(prompt_logprobs=1, stream=True), 400, "prompt_logprobs", "not available with stream"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format", "schema is missing"),
    (chat(structured_outputs={"regex": "(("}), 400, "structured_outputs", "invalid regex"),
    (chat(guided_json={"type": "frob"}), 400, "guided_json", "Invalid type"),
    (chat(use_beam_search=True, tools=[CALL]), 400, "use_beam_search", "not together with tools"),
    (chat(use_beam_search=True, logit_bias={"5": 1}), 400, "logit_bias", "use_beam_search"),
    (chat(length_penalty=2), 400, "length_penalty", "only with use_beam_search"),
    (chat(best_of=2, n=3), 400, "best_of", "less than n"),
    (chat(bad_words=[" "]), 400, "bad_words", "blank"),
    (chat(bad_words=["x" * 1025]), 400, "bad_words", "at most 1024 characters"),
    ((CHAT, {"messages": ASK["messages"] * 65_537}), 400, "messages", "at most 65536 items"),
    (chat(tools=[CALL] * 1025), 400, "tools", "at most 1024 items"),
    (chat(tools=[CALL] * 2), 400, "tools", "declared twice"),
    (chat(guided_choice=[str(i) for i in range(1001)]), 400, "guided_choice", "limit of 1000"),
    (chat(guided_regex="a" * 100_001), 400, "guided_regex", "limit of 100000 characters"),
    (chat(guided_grammar="#" * 100_001), 400, "guided_grammar", "limit of 100000 characters"),
    (chat(functions=[{"name": "f"}]), 400, "functions", "use tools"),
    (chat(modalities=["audio"]), 400, "modalities", "text only"),
    (chat(chat_template="{{ x }}"), 400, "chat_template", "checkpoint"),
    (chat(tools=[{"type": "web"}]), 400, "tools[0].type", "'function'"),
    (chat(tools=[{"type": "function"}]), 400, "tools[0].function", "field required"),
    (chat(tool_choice="required"), 400, "tool_choice", "no tools"),
    (chat(tools=[CALL], tool_choice={"type": "function"}), 400, "tool_choice.function", "required"),
    (says_who(role="tool", content="x"), 400, "messages[0]", "needs the tool_call_id"),
    (chat(cache_salt=""), 400, "cache_salt", "at least 1"),
    (chat(cache_salt="a/b"), 400, "cache_salt", "must not contain"),
    (chat(request_id="a b"), 400, "request_id", "pattern"),
    (chat(priority="urgent"), 400, "priority", "integer or 'premium'"),
    (chat(chat_template_kwargs={"messages": []}), 400, "chat_template_kwargs", "of its own"),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        400,
        "continue_final_message",
        "exclude each other",
    ),
    ((TEXT, {}), 400, "prompt", "field required"),
    (text(prompt=None), 400, "prompt", "valid string"),
    (text(prompt=""), 400, "prompt", "empty"),
    (text(prompt=[]), 400, "prompt", "empty"),
    (text(prompt=[[]]), 400, "prompt", "empty"),
    (text(prompt=["a", ""]), 400, "prompt", "empty"),
    (text(prompt=["a"] * 1025), 400, "prompt", "1025 prompts with n=1 are more than 768"),
    (text(prompt=[""] * 600, n=2), 400, "n", "600 prompts with n=2 are more than 768"),
    (text(prompt=[1] * (2**21 + 1)), 400, "prompt", "at most 2097152 items"),
    (text(prompt=["a", 1]), 400, "prompt[0]", "valid integer or a valid array"),
    (text(prompt=[1, "a"]), 400, "prompt[1]", "valid integer"),
    (text(prompt=[-1]), 400, "prompt[0]", "greater than or equal to 0"),
    (text(prompt=[10**6]), 400, "prompt", "out of range"),
    (text(prompt=[2**40]), 400, "prompt[0]", "less than or equal to"),
    (text(prompt=[[1], [10**6]]), 400, "prompt", "out of range"),
    (text(prompt="x" * 300), 400, "prompt", "maximum context length is 256 tokens"),
    (text(prompt=["a"] * 1000, n=2), 400, "n", "more than 768 sequences"),
    (text(max_tokens=0), 400, "max_tokens", "at least 1"),
    (text(max_tokens=256), 400, "max_tokens", "maximum context length is 256 tokens"),
    (text(logprobs=21), 400, "logprobs", "limit of 20"),
    (text(logprobs=True), 400, "logprobs", "valid integer"),
    (text(suffix="end"), 400, "suffix", "fill in the middle"),
    (text(truncate_prompt_tokens=0), 400, "prompt", "empty"),
    (text(truncate_prompt_tokens=-2), 400, "truncate_prompt_tokens", "greater than"),
    (("/tokenize", {}), 400, None, "exactly one of prompt and messages"),
    (("/tokenize", {"prompt": "a", "messages": ASK["messages"]}), 400, None, "exactly one"),
    (("/tokenize", {"prompt": "a", "model": "other"}), 404, "model", "does not exist"),
    (("/detokenize", {"tokens": "a"}), 400, "tokens", "valid array"),
    (("/detokenize", {"tokens": [10**6]}), 400, "tokens", "out of range"),
    (("/v1/embeddings", {"input": "a"}), 404, None, "Not Found"),
]


def test_malformed_requests() -> None:
    """One server for the whole table; whatever came before, the next request is judged alone."""

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        config = ApiConfig(port=0, drain_s=0.2, max_body_cost=1 << 22)
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            for (path, body), status, param, message in MALFORMED:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                reply = await client.post(
                    path, content=raw, headers={"Content-Type": "application/json"}
                )
                case = f"{path} {raw[:100]!r}: {reply.status_code} {reply.text[:400]}"
                assert reply.status_code == status, case
                error = reply.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}, case
                assert error["code"] == status, case
                assert error["param"] == param, case
                assert message in error["message"], case
                assert len(error["message"]) < 1000, case
                assert reply.headers["x-request-id"], case
            assert backend.requests == []
            good = await client.post(CHAT, json=ASK)
            assert good.status_code == 200

    assert len(MALFORMED) >= 40
    asyncio.run(main())


@pytest.mark.parametrize("streaming_body", [False, True])
def test_body_over_the_limit_is_refused_before_it_is_read(streaming_body: bool) -> None:
    async def main() -> None:
        config = ApiConfig(port=0, max_body_bytes=1000)
        backend = ScriptedBackend(says("hello"))

        async def parts() -> Any:
            for _ in range(20):
                yield b" " * 100

        content = parts() if streaming_body else b" " * 1001
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            reply = await client.post(
                url + CHAT, content=content, headers={"Content-Type": "application/json"}
            )
            assert reply.status_code == 413
            assert "limit of 1000 bytes" in reply.json()["error"]["message"]

    asyncio.run(main())


def test_a_body_of_too_many_values_is_refused_whatever_its_size() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, max_body_cost=1000)
        backend = ScriptedBackend(says("hello"))
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            for values in (["x"] * 1000, {f"k{i}": 1 for i in range(130)}, [[[]]] * 70):
                reply = await client.post(url + CHAT, json=ASK | {"metadata": values})
                assert reply.status_code == 413
                assert "the limit is 1000 (`max-body-cost`)" in reply.json()["error"]["message"]
            for values in (["x"] * 500, {f"k{i}": 1 for i in range(60)}, '{"a": [1, 2]},' * 1000):
                reply = await client.post(url + CHAT, json=ASK | {"metadata": values})
                assert reply.status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_other_content_types_are_refused(content_type: str) -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with live_api_server(backend) as url, httpx.AsyncClient(timeout=LONG_S) as client:
            reply = await client.post(
                url + CHAT, content=json.dumps(ASK), headers={"Content-Type": content_type}
            )
            assert reply.status_code == 415
            assert "application/json" in reply.json()["error"]["message"]
            bare = client.build_request("POST", url + CHAT, content=json.dumps(ASK))
            assert "content-type" not in bare.headers
            assert (await client.send(bare)).status_code == 415
            kind = "Application/JSON; charset=utf-8"
            fine = await client.post(
                url + CHAT, content=json.dumps(ASK), headers={"Content-Type": kind}
            )
            assert fine.status_code == 200

    asyncio.run(main())


def test_wrong_methods_are_named() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            reply = await client.get(url + CHAT)
            assert reply.status_code == 405
            assert reply.headers["allow"] == "POST"
            error = reply.json()["error"]
            assert error["type"] == "MethodNotAllowedError"
            assert error["message"] == f"Method Not Allowed: GET {CHAT}; /docs shows what there is"
            lost = (await client.post(url + "/v1/chat", json=ASK)).json()["error"]
            assert lost["message"] == "Not Found: POST /v1/chat; /docs shows what there is"
        plain = ApiConfig(port=0, docs=False)
        async with live_api_server(ScriptedBackend(says("x")), config=plain) as url:
            async with httpx.AsyncClient(timeout=LONG_S) as client:
                lost = (await client.get(url + "/docs")).json()["error"]
            assert lost["message"] == "Not Found: GET /docs"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, ASK),
        (TEXT, GO),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {**ASK, "max_tokens": 5}),
    ],
)
def test_unknown_fields_are_logged_and_quiet_ones_are_not(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            reply = await client.post(url + path, json=body | {"user": "u", "frobs": 1, "zag": {}})
            assert reply.status_code == 200, reply.text

    asyncio.run(main())
    [line] = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert line == "2 unknown request fields were ignored: 'frobs', 'zag'"
