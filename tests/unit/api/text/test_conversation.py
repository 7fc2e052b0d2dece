"""Messages reach templates in one form, whatever style of client wrote them."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.api.schema.chat import ChatMessage, ChatRequest, Tool
from mooncake.api.text.conversation import rename_calls, template_message


def message(**fields: Any) -> dict[str, Any]:
    return template_message(ChatMessage.model_validate(fields))


def call(name: str, call_id: str | None) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def test_content_is_always_text() -> None:
    assert message(role="user", content=None)["content"] == ""
    assert message(role="user", content=[])["content"] == ""
    assert message(role="user", content=[{"type": "text", "text": ""}])["content"] == ""
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert message(role="user", content=parts)["content"] == "ab"


def test_developers_are_system_and_absent_fields_are_absent() -> None:
    assert message(role="developer", content="x") == {"role": "system", "content": "x"}


def test_reasoning_has_both_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        turn = message(role="assistant", content="x", **{name: "why"})
        assert (turn["reasoning"], turn["reasoning_content"]) == ("why", "why")


def test_foreign_call_ids_become_kimis_and_results_follow() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("f", "call_1"), call("g-h.i", "toolu_2")]},
        {"role": "tool", "tool_call_id": "toolu_2"},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "assistant", "tool_calls": [call("f", "call_1")]},
        {"role": "tool", "tool_call_id": "call_1"},
        {"role": "tool", "tool_call_id": "unknown"},
    ]
    rename_calls(turns)
    ids = [one["id"] for one in turns[0]["tool_calls"]]
    assert ids == ["functions.f:0", "functions.g-h.i:1"]
    assert turns[1]["tool_call_id"] == "functions.g-h.i:1"
    assert turns[2]["tool_call_id"] == "functions.f:0"
    assert turns[3]["tool_calls"][0]["id"] == "functions.f:2"
    assert turns[4]["tool_call_id"] == "functions.f:2"
    assert turns[5]["tool_call_id"] == "unknown"


def test_own_ids_stay_so_that_the_prefix_stays() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [call("f", "functions.f:0")]},
        {"role": "tool", "tool_call_id": "functions.f:0"},
        {"role": "assistant", "tool_calls": [call("f", "functions.f:0"), call("g", "search:0")]},
    ]
    rename_calls(turns)
    assert turns[0]["tool_calls"][0]["id"] == "functions.f:0"
    assert turns[2]["tool_calls"][0]["id"] == "functions.f:0"
    assert turns[2]["tool_calls"][1]["id"] == "functions.g:2"


def test_tools_keep_the_clients_own_order() -> None:
    raw = {"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "x": None}, "type": "function"}
    assert list(Tool.model_validate(raw).raw) == ["function", "type"]
    assert Tool.model_validate(raw).raw == raw


def test_marks_for_caches_are_not_in_what_a_prompt_says_of_a_tool() -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"cache_control": {"type": "string"}}}
    mark = {"cache_control": {"type": "ephemeral"}}
    plain = {"function": function, "type": "function"}
    for raw in (plain | mark, plain | {"function": function | mark}, mark | plain):
        kept = Tool.model_validate(raw).raw
        assert kept == plain, "a parameter of that name stays"
        assert list(kept) == ["function", "type"]


@pytest.mark.parametrize(
    ("fields", "kwargs", "thinking"),
    [
        ({}, {}, None),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False}, False),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}, None),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "thinking": True},
            True,
        ),
    ],
)
def test_how_much_to_think_is_told_to_the_template(
    fields: dict[str, Any], kwargs: dict[str, Any], thinking: bool | None
) -> None:
    body = ChatRequest.model_validate({"messages": [{"role": "user"}], **fields})
    assert (body.template_kwargs, body.thinking) == (kwargs, thinking)
