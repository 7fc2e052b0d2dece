"""Which part of a prompt a request wants kept in the pool, and for how long. Fields and marks say
it, in each API by its own names.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from mooncake.api.adapters.anthropic_messages import messages_chat
from mooncake.api.adapters.chat_call import chat_prompt, new_chat_call
from mooncake.api.adapters.completion_call import new_completion_call
from mooncake.api.adapters.openai_responses import responses_chat
from mooncake.api.api_server import ApiServer
from mooncake.api.config import ApiConfig
from mooncake.api.generation.sampling import prompt_window
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.completion import CompletionRequest
from mooncake.api.schema.messages import MessagesRequest
from mooncake.api.schema.responses import ResponsesRequest
from mooncake.api.text.answer import Marker
from mooncake.api.text.chat_template import ChatTemplate
from mooncake.base import GenerateRequest
from tests.support.api.server import ScriptedBackend, answer, tiny_model

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what is it?"},
    {"role": "assistant", "content": "a fish"},
    {"role": "user", "content": "why?"},
]
TOOL = {"type": "function", "function": {"name": "f"}}


def marked(number: int, mark: dict[str, Any]) -> list[dict[str, Any]]:
    return [turn | mark if at == number else turn for at, turn in enumerate(TURNS)]


@pytest.mark.parametrize(
    ("fields", "num_messages", "seconds"),
    [
        ({}, 0, 0.0),
        (MARK, 4, 300.0),
        (HOUR, 4, 3600.0),
        ({"prompt_cache_key": "session-7"}, 4, 300.0),
        ({"prompt_cache_key": ""}, 0, 0.0),
        ({"session_id": "session-7"}, 4, 300.0),
        ({"session_id": ""}, 0, 0.0),
        ({"prompt_cache_retention": "24h"}, 4, 3600.0),
        ({"prompt_cache_retention": "in_memory"}, 0, 0.0),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "in_memory"}, 4, 300.0),
        ({"messages": marked(1, MARK)}, 2, 300.0),
        ({"messages": marked(0, HOUR)}, 1, 3600.0),
        ({"messages": [TURNS[0] | HOUR, TURNS[1], TURNS[2] | MARK, TURNS[3]]}, 3, 3600.0),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **HOUR},
                                                    {"type": "text", "text": "b"}]},
                       TURNS[3]]}, 1, 3600.0),
        ({"tools": [TOOL | MARK]}, 0, 300.0),
        ({"tools": [TOOL | {"function": TOOL["function"] | HOUR}]}, 0, 3600.0),  # type: ignore[operator]
    ],
)  # fmt: skip
def test_fields_and_marks_say_how_much_is_kept_and_for_how_long(
    fields: dict[str, Any], num_messages: int, seconds: float
) -> None:
    body = ChatRequest.model_validate({"messages": TURNS} | fields)
    assert (body.num_kept_messages, body.keep_s) == (num_messages, seconds)


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": {"type": "lasting"}},
        {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
        {"prompt_cache_retention": "48h"},
        {"messages": marked(1, {"cache_control": "yes"})},
    ],
)
def test_marks_that_mean_nothing_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ChatRequest.model_validate({"messages": TURNS} | fields)


def text(words: str, mark: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": words, **mark}


@pytest.mark.parametrize(
    ("fields", "num_messages", "seconds"),
    [
        ({}, 0, 0.0),
        (HOUR, 5, 3600.0),
        ({"system": [text("be brief", HOUR)]}, 1, 3600.0),
        ({"tools": [{"name": "f", "input_schema": {}, **MARK}]}, 0, 300.0),
        ({"messages": [{"role": "user", "content": [text("a", {}), text("b", MARK)]},
                       {"role": "user", "content": "c"}]}, 2, 300.0),
        ({"messages": [{"role": "user", "content": [text("a", HOUR), text("b", MARK)]},
                       {"role": "user", "content": "c"}]}, 2, 3600.0),
        ({"messages": [{"role": "user", "content": [text("a", HOUR)], **MARK},
                       {"role": "user", "content": "c"}]}, 2, 3600.0),
        ({"messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "1", "name": "f", "input": {}, **MARK}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [text("found", HOUR)]},
                text("go on", {})]},
        ]}, 4, 3600.0),
    ],
)  # fmt: skip
def test_marks_of_the_messages_api_lie_where_its_blocks_do(
    fields: dict[str, Any], num_messages: int, seconds: float
) -> None:
    asked = {"messages": TURNS[1:] + TURNS[1:2], "system": "s", "max_tokens": 5} | fields
    chat = messages_chat(MessagesRequest.model_validate(asked))
    assert (chat.num_kept_messages, chat.keep_s) == (num_messages, seconds)


def test_the_responses_api_has_the_fields_of_the_whole_prompt() -> None:
    asked = {"input": "hi", "prompt_cache_key": "k", "prompt_cache_retention": "24h"}
    chat = responses_chat(ResponsesRequest.model_validate(asked))
    assert (chat.num_kept_messages, chat.keep_s) == (len(chat.messages), 3600.0)


def requests(
    body: ChatRequest | CompletionRequest, *, thinks: bool = False
) -> tuple[list[GenerateRequest], ApiServer]:
    """Return the requests of a call, and the server that made it."""

    async def main() -> tuple[list[GenerateRequest], ApiServer]:
        backend = ScriptedBackend(lambda request: answer(request, [97]))
        model = tiny_model(max_model_len=1024)
        if thinks:
            source = model.template.source + "{# <think> #}"
            template = ChatTemplate(source, model.tokenizer.special_tokens)
            model = dataclasses.replace(model, template=template)
        api_server = ApiServer(backend, model, ApiConfig())
        try:
            if isinstance(body, ChatRequest):
                call = await new_chat_call(api_server, body, "chatcmpl-x")
            else:
                call, _ = await new_completion_call(api_server, body, "cmpl-x")
            return list(call.requests), api_server
        finally:
            api_server.close()

    return asyncio.run(main())


def test_the_tokens_up_to_the_last_marked_message_are_kept() -> None:
    body = ChatRequest.model_validate({"messages": marked(1, HOUR), "n": 2})
    made, api_server = requests(body)
    head = ChatRequest.model_validate({"messages": TURNS[:2], "add_generation_prompt": False})
    found = chat_prompt(api_server, head, prompt_window(head, api_server.model))
    for request in made:
        assert (request.num_kept_tokens, request.keep_s) == (len(found), 3600.0)
        assert list(request.prompt_tokens[: len(found)]) == found
        assert len(found) < len(request.prompt_tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": marked(3, MARK)},
        MARK,
        {"messages": marked(1, MARK), "truncate_prompt_tokens": 9},
    ],
)
def test_the_whole_prompt_is_kept_where_the_last_message_is_marked(fields: dict[str, Any]) -> None:
    [request] = requests(ChatRequest.model_validate({"messages": TURNS} | fields))[0]
    assert (request.num_kept_tokens, request.keep_s) == (len(request.prompt_tokens), 300.0)


def test_marked_tools_are_kept_and_what_follows_them_is_not() -> None:
    body = ChatRequest.model_validate({"messages": TURNS, "tools": [TOOL | MARK]})
    [request] = requests(body)[0]
    other = body.model_copy(update={"messages": body.messages[1:2]})
    [another] = requests(other)[0]
    kept = request.num_kept_tokens
    assert 0 < kept < len(request.prompt_tokens)
    assert request.prompt_tokens[:kept] == another.prompt_tokens[:kept]


def test_a_request_without_marks_keeps_nothing_and_completions_keep_each_prompt() -> None:
    [plain] = requests(ChatRequest.model_validate({"messages": TURNS}))[0]
    assert (plain.num_kept_tokens, plain.keep_s) == (0, 0.0)
    body = CompletionRequest.model_validate({"prompt": ["abc", "defgh"], "prompt_cache_key": "k"})
    made = requests(body)[0]
    assert [request.num_kept_tokens for request in made] == [
        len(request.prompt_tokens) for request in made
    ]
    assert {request.keep_s for request in made} == {300.0}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({}, False),
        ({"session_id": "s"}, True),
        ({"messages": marked(3, MARK)}, True),
        ({"messages": marked(1, MARK)}, False),
        ({"tools": [TOOL | MARK]}, False),
        ({"session_id": "s", "tools": [TOOL]}, True),
        ({"session_id": "s", "tools": [TOOL], "tool_choice": "none"}, True),
    ],
)
def test_an_answer_is_kept_where_the_next_turn_begins_with_it(
    fields: dict[str, Any], whole: bool, thinks: bool
) -> None:
    """What was thought before an answer is left out of the next prompt, but not what was thought
    before a call of a tool. So of a model that thinks only answers with calls are kept.
    """
    body = ChatRequest.model_validate({"messages": TURNS} | fields)
    [request], api_server = requests(body, thinks=thinks)
    assert api_server.thinks is thinks
    calls = bool(body.tools) and body.tool_choice != "none"
    [begin] = [
        token for token, marker in api_server.tool_markers.items() if marker is Marker.CALL_BEGIN
    ]
    assert request.keeps_answer is (whole and (calls or not thinks))
    assert request.call_token == (begin if whole and calls and thinks else None)


def test_no_beam_is_kept() -> None:
    fields = {"session_id": "s", "use_beam_search": True, "n": 2, "max_tokens": 4}
    for request in requests(ChatRequest.model_validate({"messages": TURNS} | fields))[0]:
        assert request.num_kept_tokens == len(request.prompt_tokens)
        assert not request.keeps_answer


def test_the_name_of_a_session_reaches_no_worker() -> None:
    """So thousands of them cost no more memory than one."""
    made = []
    for name in ("a", "b"):
        body = ChatRequest.model_validate({"messages": TURNS, "session_id": name, "seed": 1})
        [request] = requests(body)[0]
        made.append(msgspec.structs.replace(request, request_id=""))
    assert made[0] == made[1]
