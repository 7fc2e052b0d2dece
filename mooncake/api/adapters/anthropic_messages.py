"""Translates Anthropic's Messages API: the body of `/v1/messages` to the internal request, a
`ChatRequest`, and the pieces of an answer to the blocks of a message, with Anthropic's events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from pydantic_core import from_json

from mooncake.api.adapters.parts_renderer import PartsRenderer
from mooncake.api.adapters.translation import shared_fields, validated
from mooncake.api.errors import anthropic_error
from mooncake.api.generation.generation import Call
from mooncake.api.http.response import event
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.fields import CACHE_MARK, Markable
from mooncake.api.schema.messages import (
    AnswerBlock,
    Block,
    BlockDelta,
    Blocks,
    MessageEvent,
    MessageReply,
    MessagesRequest,
    MessagesTool,
    MessageUsage,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Turn,
)
from mooncake.api.schema.replies import encode
from mooncake.api.text.answer import Piece
from mooncake.base import MooncakeError

PARAMS = {
    "max_completion_tokens": "max_tokens",
    "prompt": "messages",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
"""Field of the internal request -> the field of this API."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def messages_chat(body: PromptFields) -> ChatRequest:
    """Return the same request in the internal form.

    If the last turn is text of the assistant, the model continues it, as this API defines.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
        _mark(messages[-1], body.system)
    for turn in body.messages:
        messages += _assistant_turns(turn) if turn.role == "assistant" else _other_turns(turn)
        _mark(messages[-1], [turn])
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
    _mark(message, turn.content)
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
    """Return the turns for a turn of the user; each result of a call becomes a turn of its own."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    turns: list[dict[str, Any]] = []
    for block in turn.content:
        if block.type == "tool_result":
            texts = [_text(block.content or "")]
            turns.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": texts})
        elif block.type == "text":
            if not turns or turns[-1]["role"] != turn.role:
                turns.append({"role": turn.role, "content": []})
            turns[-1]["content"].append(block.text or "")
        if turns:
            _mark(turns[-1], [block])
    for each in turns:
        each["content"] = "".join(each["content"])
    return turns or [{"role": turn.role, "content": ""}]


def _text(content: Blocks | Sequence[Block]) -> str:
    if isinstance(content, str):
        return content
    return "".join(block.text or "" for block in content if block.type == "text")


def _mark(message: dict[str, Any], content: str | Sequence[Markable]) -> None:
    """Give a message of this content the mark that asks for longest, of the content's and its
    own.
    """
    marked = [] if isinstance(content, str) else content
    marks = [part.cache_control for each in marked for part in (each, *_parts(each))]
    own = [mark for mark in (message.get(CACHE_MARK), *marks) if mark is not None]
    if own:
        message[CACHE_MARK] = max(own, key=lambda mark: mark.keep_s)


def _parts(marked: Markable) -> Sequence[Block]:
    content = marked.content if isinstance(marked, Block) else None
    return content if isinstance(content, list) else []


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    made: dict[str, Any] = {"type": "function", "function": function}
    if tool.cache_control is not None:
        made[CACHE_MARK] = tool.cache_control
    return made


class MessageStream(PartsRenderer[AnswerBlock]):
    """Writes one message and its events, which are encoded and ready to be sent."""

    reply: MessageReply

    def __init__(self, call: Call, model: str) -> None:
        reply = MessageReply(id=call.call_id, model=model, usage=message_usage(call))
        super().__init__(reply, reply.content)

    def begin(self, call: Call) -> list[bytes]:
        del call
        return [_event("message_start", message=self.reply)]

    def end(self, call: Call) -> list[bytes]:
        events, reply = self.close(), self.reply
        reply.stop_reason = _STOP_REASONS.get(self.finish_reason or "stop", "end_turn")
        if isinstance(self.stop_reason, str) and reply.stop_reason == "end_turn":
            reply.stop_reason, reply.stop_sequence = "stop_sequence", self.stop_reason
        reply.usage = message_usage(call)
        end = BlockDelta(
            stop_reason=reply.stop_reason,
            stop_sequence=reply.stop_sequence,
            schema_errors=reply.schema_errors,
        )
        events.append(_event("message_delta", delta=end, usage=reply.usage))
        events.append(_event("message_stop"))
        return events

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        del call
        return [event(anthropic_error(error), "error")]

    def _part(self, piece: Piece) -> AnswerBlock:
        if piece.call is not None:
            assert piece.call_id is not None
            assert piece.name is not None
            return ToolUseBlock(piece.call_id, piece.name)
        return ThinkingBlock() if piece.is_reasoning else TextBlock()

    def _begun(self, part: AnswerBlock) -> list[bytes]:
        return [self._block_event("content_block_start", content_block=part)]

    def _grown(self, part: AnswerBlock, text: str) -> list[bytes]:
        if isinstance(part, ToolUseBlock):
            delta = BlockDelta("input_json_delta", partial_json=text)
        elif isinstance(part, ThinkingBlock):
            delta = BlockDelta("thinking_delta", thinking=text)
        else:
            delta = BlockDelta("text_delta", text=text)
        return [self._block_event("content_block_delta", delta=delta)]

    def _ended(self, part: AnswerBlock, text: str) -> list[bytes]:
        events: list[bytes] = []
        if isinstance(part, ToolUseBlock):
            part.input = arguments_so_far(text)
        elif isinstance(part, TextBlock):
            part.text = text
        else:
            part.thinking, part.signature = text, self.reply.id
            signed = BlockDelta("signature_delta", signature=part.signature)
            events.append(self._block_event("content_block_delta", delta=signed))
        return [*events, self._block_event("content_block_stop")]

    def _block_event(self, kind: str, **fields: Any) -> bytes:
        return _event(kind, index=len(self.reply.content) - 1, **fields)


def _event(kind: str, **fields: Any) -> bytes:
    return event(encode(MessageEvent(type=kind, **fields)), kind)


def message_usage(call: Call) -> MessageUsage:
    """Return the tokens of `call` so far, in Anthropic's form."""
    cached = call.num_cached_tokens
    return MessageUsage(
        input_tokens=call.num_prompt_tokens - cached,
        output_tokens=call.num_output_tokens,
        cache_read_input_tokens=cached,
        mooncake=call.cache or UNSET,
    )


def arguments_so_far(text: str) -> dict[str, Any]:
    """Return the arguments of a call, or those that are complete if the call was cut off."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
