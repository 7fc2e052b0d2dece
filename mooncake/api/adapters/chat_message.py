"""Writes the messages of chat answers in OpenAI's form. Pure."""

from __future__ import annotations

from msgspec import UNSET

from mooncake.api.generation.delta import Delta
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.replies import ChatText, FunctionText, ToolCallReply
from mooncake.api.text.message_parser import ToolCallDelta


class MessageWriter:
    """Writes messages, and what chunks add to them, in the form that `body` asks for."""

    def __init__(self, body: ChatRequest) -> None:
        last = body.messages[-1]
        self.echo = last.text if body.echo and last.role == "assistant" else ""
        """The text of the continued message, if it is wanted before the answer."""
        self._with_reasoning = body.include_reasoning is not False

    def whole(self, delta: Delta) -> ChatText:
        """Return the whole message; its content is null when there are only tool calls."""
        content = self.echo + delta.text
        message = self.added(delta)
        message.role = "assistant"
        message.content = None if delta.tool_calls and not content else content
        for call in message.tool_calls or []:
            call.index = UNSET  # only a stream needs it, to tell calls apart
        return message

    def added(self, delta: Delta) -> ChatText:
        """Return what `delta` adds. Reasoning appears under both names that clients know."""
        text = ChatText()
        if delta.text:
            text.content = delta.text
        if delta.reasoning and self._with_reasoning:
            text.reasoning = text.reasoning_content = delta.reasoning
        if delta.tool_calls:
            text.tool_calls = [_tool_call(piece) for piece in delta.tool_calls]
        return text


def _tool_call(piece: ToolCallDelta) -> ToolCallReply:
    function = FunctionText(arguments=piece.arguments)
    reply = ToolCallReply(index=piece.index, function=function)
    if piece.call_id is not None and piece.name is not None:
        reply.id, reply.type, function.name = piece.call_id, "function", piece.name
    return reply
