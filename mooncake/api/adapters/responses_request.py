"""Translates the body of `/v1/responses` to the internal request, a `ChatRequest`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mooncake.api.adapters.translation import shared_fields, validated
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.responses import (
    AllowedTools,
    FunctionTool,
    InputItem,
    ItemContent,
    ResponsesRequest,
    ToolName,
)
from mooncake.base import InvalidRequest

LOGPROBS = "message.output_text.logprobs"

PARAMS = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
}
"""Field of the internal request -> the field of this API."""


def responses_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the same request in the internal form.

    Raises:
        InvalidRequest: `tool_choice` names a tool that is not declared.
    """
    messages = _messages(body)
    tools = _tools(body)
    wants_logprobs = LOGPROBS in (body.include or []) or bool(body.top_logprobs)
    chat = shared_fields(body) | {
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        "tools": [_tool(tool) for tool in tools] or None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _response_format(body),
        "logprobs": wants_logprobs,
        "top_logprobs": body.top_logprobs if wants_logprobs else None,
    }
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        chat["truncate_prompt_tokens"] = -1
    return validated(ChatRequest, chat)


def _messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _turns(body.input)
    return messages


def _turns(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Return the turns of `items`; successive items of the model become one assistant's turn."""
    turns: list[dict[str, Any]] = []
    for item in items:
        if item.type == "function_call_output":
            output = _text(item.output)
            turns.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        elif item.type == "message" and item.role != "assistant":
            turns.append({"role": item.role, "content": _text(item.content)})
        else:
            if not _goes_on(turns, item):
                turns.append({"role": "assistant", "content": ""})
            _add(turns[-1], item)
    return turns


def _goes_on(turns: Sequence[dict[str, Any]], item: InputItem) -> bool:
    """Return whether `item` belongs to the last turn: reasoning, then text, then calls form one
    turn.
    """
    if not turns or turns[-1]["role"] != "assistant":
        return False
    if item.type == "function_call":
        return True
    return not (turns[-1]["content"] or "tool_calls" in turns[-1])


def _add(turn: dict[str, Any], item: InputItem) -> None:
    if item.type == "message":
        turn["content"] = _text(item.content)
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        text = _text(item.content) or _text(item.summary)
        turn["reasoning"] = turn.get("reasoning", "") + text


def _text(content: ItemContent) -> str:
    if isinstance(content, list):
        return "".join(part.text or "" for part in content)
    return content or ""


def _tools(body: ResponsesRequest) -> list[FunctionTool]:
    tools = body.tools or []
    if not isinstance(body.tool_choice, AllowedTools):
        return tools
    allowed = {tool.name for tool in body.tool_choice.tools}
    if missing := allowed - {tool.name for tool in tools}:
        raise InvalidRequest(
            f"tool_choice: no tool is named {min(missing)[:100]!r}", param="tool_choice"
        )
    return [tool for tool in tools if tool.name in allowed]


def _tool(tool: FunctionTool) -> dict[str, Any]:
    function = tool.model_dump(exclude_unset=True, exclude={"type"})
    return {"type": "function", "function": function}


def _tool_choice(body: ResponsesRequest) -> Any:
    choice = body.tool_choice
    if isinstance(choice, ToolName):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode if isinstance(choice, AllowedTools) else choice


def _response_format(body: ResponsesRequest) -> dict[str, Any] | None:
    form = None if body.text is None else body.text.format
    if form is None:
        return None
    if form.type != "json_schema":
        return {"type": form.type}
    if form.schema_ is None:
        raise InvalidRequest("text: format.schema is missing", param="text")
    given = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": given}
