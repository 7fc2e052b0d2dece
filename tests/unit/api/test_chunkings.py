"""However an engine groups its tokens, a stream of any API tells what the whole answer says: text,
reasoning, calls, logprobs, ends, usage. Every single cut, and every token by itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from mooncake.api.adapters.anthropic_messages import MessageStream, messages_chat
from mooncake.api.adapters.chat_call import ChatRenderer, new_chat_call
from mooncake.api.adapters.openai_responses import new_response_stream, responses_chat
from mooncake.api.api_server import ApiServer
from mooncake.api.config import ApiConfig
from mooncake.api.generation.generation import Call
from mooncake.api.http.response import Renderer
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.messages import MessagesRequest
from mooncake.api.schema.responses import ResponsesRequest
from mooncake.base import FinalEvent, GenerateRequest, OutputEvent, RequestOutput
from tests.support.api.server import ScriptedBackend, answer, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = tiny_model(max_model_len=1024)
PARAMETERS = {"type": "object", "properties": {"q": {"type": "string"}}}
FUNCTION = {"name": "look-up.v2", "parameters": PARAMETERS}
CALL = "<|tool_call_begin|>functions.look-up.v2:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
TEXTS = {
    "text": "the 你好🙂 end",
    "thoughts": "<think>in 好</think>🙂 hello",
    "calls": "hi " + SECTION.format(CALL.format(0, '{"q": "好"}') + CALL.format(1, "{}")),
    "text after a call": "<think>a</think>b" + SECTION.format(CALL.format(0, "{}")) + "c",
    "two thoughts": "<think>a</think>b<think>c</think>d",
    "a call in a thought": "<think>a" + SECTION.format(CALL.format(0, '{"q":""}')),
}
STOP = "🙂 h"


class Cut:
    """A script that gives an answer in pieces."""

    def __init__(self, text: str) -> None:
        self.tokens = TOKENIZER.encode(text + "<|im_end|>")
        self.cuts: Sequence[int] = ()

    def __call__(self, request: GenerateRequest) -> list[OutputEvent]:
        whole, final = answer(request, self.tokens, group=10**6, num_cached_tokens=3)
        assert isinstance(whole, RequestOutput)
        assert isinstance(final, FinalEvent)
        borders = [0, *self.cuts, len(whole.tokens)]
        events: list[OutputEvent] = [
            RequestOutput(
                request_id=whole.request_id,
                attempt=0,
                start=begin,
                tokens=whole.tokens[begin:end],
                logprobs=None if whole.logprobs is None else whole.logprobs[begin:end],
            )
            for begin, end in itertools.pairwise(borders)
            if begin < end
        ]
        return [*events, final]


async def chat(api_server: ApiServer) -> tuple[Call, Renderer]:
    body = ChatRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "hi"}], "n": 2, "logprobs": True,
            "tools": [{"type": "function", "function": FUNCTION}], "stop": STOP, "stream": True,
            "stream_options": {"include_usage": True}, "top_logprobs": 1,
        }
    )  # fmt: skip
    return await new_chat_call(api_server, body, "chatcmpl-x"), ChatRenderer(api_server, body)


async def responses(api_server: ApiServer) -> tuple[Call, Renderer]:
    body = ResponsesRequest.model_validate(
        {
            "input": "hi", "tools": [{"type": "function", **FUNCTION}], "top_logprobs": 1,
        }
    )  # fmt: skip
    asked = responses_chat(body)
    call = await new_chat_call(api_server, asked, "resp-x")
    return call, new_response_stream(api_server, body, asked, call)


async def messages(api_server: ApiServer) -> tuple[Call, Renderer]:
    body = MessagesRequest.model_validate(
        {
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99,
            "tools": [{"name": "look-up.v2", "input_schema": PARAMETERS}],
            "stop_sequences": [STOP],
        }
    )  # fmt: skip
    call = await new_chat_call(api_server, messages_chat(body), "msg-x")
    return call, MessageStream(call, api_server.names[0])


def events_of(frames: list[bytes]) -> list[Any]:
    """Return the JSON of server-sent events."""
    lines = b"".join(frames).decode().split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) for text in data if text != "[DONE]"]


def joined_chat(events: list[Any]) -> dict[str, Any]:
    """Return what a client that puts chunks together ends with."""
    choices: dict[int, Any] = {}
    for event in events:
        for part in event["choices"]:
            choice = choices.setdefault(
                part["index"],
                {"message": {"content": ""}, "logprobs": {"content": []}, "index": part["index"]},
            )
            choice["logprobs"]["content"] += (part["logprobs"] or {"content": []})["content"]
            for name in ("finish_reason", "stop_reason"):
                choice[name] = part.get(name)
            for name, value in part["delta"].items():
                if name != "tool_calls":
                    choice["message"][name] = (
                        value if name == "role" else choice["message"].get(name, "") + value
                    )
                    continue
                calls = choice["message"].setdefault("tool_calls", [])
                for piece in value:
                    if piece["index"] == len(calls):
                        calls.append({"id": piece["id"], "type": piece["type"],
                                      "function": {"name": piece["function"]["name"],
                                                   "arguments": ""}})  # fmt: skip
                    calls[piece["index"]]["function"]["arguments"] += piece["function"].get(
                        "arguments", ""
                    )
    for choice in choices.values():
        if "tool_calls" in choice["message"] and not choice["message"]["content"]:
            choice["message"]["content"] = None
    return {"choices": [choices[index] for index in sorted(choices)], "usage": events[-1]["usage"]}


def joined_response(events: list[Any]) -> dict[str, Any]:
    """Return the last event's response; what the deltas say must be in it."""
    told: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            told[event["item_id"]] = told.get(event["item_id"], "") + event["delta"]
    reply: dict[str, Any] = events[-1]["response"]
    for item in reply["output"]:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert told.get(item["id"], "") == text
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == reply["output"]
    return reply


def joined_message(events: list[Any]) -> dict[str, Any]:
    """Return what a client that puts a message together ends with."""
    message: dict[str, Any] = events[0]["message"]
    arguments: dict[int, str] = {}
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            kind = delta.pop("type")
            [(name, value)] = delta.items()
            if kind == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + value
            else:
                block[name] += value
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    for index, text in arguments.items():
        message["content"][index]["input"] = json.loads(text)
    return message


APIS: dict[str, tuple[Any, Any]] = {
    "chat": (chat, joined_chat),
    "responses": (responses, joined_response),
    "messages": (messages, joined_message),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("api", APIS)
def test_every_chunking_tells_the_same(api: str, name: str) -> None:
    make, join = APIS[api]
    script = Cut(TEXTS[name])

    async def main() -> None:
        api_server = ApiServer(ScriptedBackend(script), MODEL, ApiConfig(), wall_s=lambda: 1.0)
        call, renderer = await make(api_server)
        async with call:
            whole = json.loads(renderer.whole(call, await call.finish()))
        length = len(script.tokens)
        chunkings = [(), tuple(range(1, length)), *((cut,) for cut in range(1, length))]
        for cuts in chunkings:
            script.cuts = cuts
            call, renderer = await make(api_server)
            frames: list[bytes] = []
            async with call:
                while (deltas := await call.deltas()) is not None:
                    if not frames:
                        frames = renderer.begin(call)
                    for delta in deltas:
                        frames += renderer.chunk(call, delta)
                frames += renderer.end(call)
            joined = join(events_of(frames))
            assert {key: whole[key] for key in joined} == joined, cuts

    asyncio.run(main())
