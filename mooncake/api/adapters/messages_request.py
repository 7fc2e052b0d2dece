"""Translates the body of `/v1/messages` to the internal request, a `ChatRequest`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.api.adapters.translation import shared_fields, validated
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.messages import (
    Block,
    Blocks,
    MessagesRequest,
    MessagesTool,
    PromptFields,
    Turn,
)

PARAMS = {
    "max_completion_tokens": "max_tokens",
    "prompt": "messages",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
"""Field of the internal request -> the field of this API."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def messages_chat(body: PromptFields) -> ChatRequest:
    """Return the same request in the internal form.

    If the last turn is text of the assistant, the model continues it, as this API defines.
    """
    messages = [] if not body.system else [{"role": "system", "content": _text(body.system)}]
    for turn in body.messages:
        messages += _assistant_turns(turn) if turn.role == "assistant" else _other_turns(turn)
    chat = shared_fields(body) | _output_fields(body)
    chat |= {
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or []] or None,
    }
    if body.thinking is not None:
        given = body.chat_template_kwargs or {}
        chat["chat_template_kwargs"] = {"thinking": body.thinking.type != "disabled"} | given
    last = messages[-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat["continue_final_message"] = True
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = _CHOICES.get(choice.type, named)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if isinstance(body, MessagesRequest):
        chat["max_completion_tokens"] = body.max_tokens
        chat["stop"] = body.stop_sequences
    return validated(ChatRequest, chat)


def _output_fields(body: PromptFields) -> dict[str, Any]:
    """Return the internal fields for `output_config`."""
    asked = body.output_config
    if asked is None:
        return {}
    fields: dict[str, Any] = {"reasoning_effort": asked.effort}
    if asked.format is not None:
        # This API follows a schema as a whole, or refuses it.
        json_schema = {"name": "output", "schema": asked.format.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields


def _assistant_turns(turn: Turn) -> list[dict[str, Any]]:
    """Return an assistant's turn; its thoughts, text and calls become one turn."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(turn.content)}
    blocks = turn.content if isinstance(turn.content, list) else []
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    calls = [
        {"id": block.id, "type": "function", "function": _function(block)}
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return [message]


def _function(block: Block) -> dict[str, Any]:
    return {"name": block.name, "arguments": block.input or {}}


def _other_turns(turn: Turn) -> list[dict[str, Any]]:
    """Return the turns in another's turn; every result of a call becomes a separate turn."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    turns: list[dict[str, Any]] = []
    for block in turn.content:
        if block.type == "tool_result":
            text = _text(block.content or "")
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif block.type == "text":
            if not turns or turns[-1]["role"] != turn.role:
                turns.append({"role": turn.role, "content": ""})
            turns[-1]["content"] += block.text or ""
    return turns or [{"role": turn.role, "content": ""}]


def _text(content: Blocks | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text or "" for block in content if block.type == "text")


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}
