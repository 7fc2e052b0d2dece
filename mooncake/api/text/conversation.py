"""Puts the messages and tools of a chat in the form that chat templates expect. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.api.schema.chat import ChatMessage, Tool
from mooncake.api.text.chat_template import ChatTemplate
from mooncake.api.text.guard import Guard
from mooncake.base import InvalidRequest


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: Mapping[str, Any] | None,
    guard: Guard | None,
) -> str:
    """Return the prompt text of a conversation; if there is a `guard`, it must encode that text.

    Raises:
        InvalidRequest: the two flags contradict each other, or the template refused the
            conversation.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if kwargs and (reserved := RESERVED_KWARGS & set(kwargs)):
        raise InvalidRequest(
            f"chat_template_kwargs: {min(reserved)} is a field of its own",
            param="chat_template_kwargs",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    turns = [template_message(message) for message in messages]
    rename_calls(turns)
    declared = [tool.raw for tool in tools] if tools else None
    if guard is not None:
        turns = [guard.turn(turn) for turn in turns]
        declared, kwargs = guard.value(declared), guard.value(dict(kwargs or {}))
    return template.render(
        turns,
        tools=declared,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        kwargs=kwargs,
    )


RESERVED_KWARGS = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message"}
)


_OWN_ID = re.compile(r"functions\.(.+):\d+")


def rename_calls(turns: Sequence[dict[str, Any]]) -> None:
    """Change the id of every tool call in the history, and of its result, to Kimi-K2's style,
    `functions.NAME:INDEX`: other styles mislead the model.

    Ids in that style stay, so that a conversation keeps its cached prefix. INDEX counts the calls
    of the whole conversation.
    """
    renamed: dict[str, str] = {}
    num_calls = 0
    for turn in turns:
        for call in turn.get("tool_calls") or []:
            name, given = call["function"]["name"], call.get("id") or ""
            match = _OWN_ID.fullmatch(given)
            if match is None or match[1] != name:
                call["id"] = f"functions.{name}:{num_calls}"
            renamed[given] = call["id"]
            num_calls += 1
        if turn["role"] == "tool":
            given = turn.get("tool_call_id") or ""
            turn["tool_call_id"] = renamed.get(given, given)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates know: content as text, role `developer` as
    `system`, the reasoning under both its names, no absent fields.
    """
    turn = message.model_dump(exclude_none=True)
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = message.text
    reasoning = message.reasoning or message.reasoning_content
    if reasoning is not None:
        turn["reasoning"] = turn["reasoning_content"] = reasoning
    return turn
