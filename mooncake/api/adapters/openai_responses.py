"""Translates OpenAI's Responses API: the body of `/v1/responses` to the internal request, a
`ChatRequest`, and the pieces of an answer to the output items of a response, with an event for each
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from mooncake.api.adapters.parts_renderer import PartsRenderer
from mooncake.api.adapters.translation import shared_fields, validated
from mooncake.api.api_server import ApiServer
from mooncake.api.generation.generation import Call
from mooncake.api.generation.logprobs import LogprobSpeller
from mooncake.api.http.response import event
from mooncake.api.schema.chat import ChatRequest
from mooncake.api.schema.replies import ChatLogprob, encode
from mooncake.api.schema.responses import (
    AllowedTools,
    CallItem,
    FunctionTool,
    InputDetails,
    InputItem,
    Item,
    ItemContent,
    MessageItem,
    OutputDetails,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseReply,
    ResponsesRequest,
    ResponseUsage,
    ToolName,
)
from mooncake.api.text.answer import Delta, Piece
from mooncake.base import InvalidRequest, MooncakeError, SamplingParams

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
    for turn in turns:
        if "reasoning" in turn:
            turn["reasoning"] = "".join(turn["reasoning"])
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
        turn.setdefault("reasoning", []).append(_text(item.content) or _text(item.summary))


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
        raise InvalidRequest(
            "text: format.schema is missing; send the JSON schema of the answer",
            param="text",
        )
    given = {"name": form.name, "schema": form.schema_, "strict": form.strict}
    return {"type": form.type, "json_schema": given}


class ResponseStream(PartsRenderer[Item]):
    """Writes one response and its events, which are encoded and ready to be sent."""

    reply: ResponseReply

    def __init__(self, reply: ResponseReply, speller: LogprobSpeller | None) -> None:
        """`speller` is given when the client asked for the logprobs of the text's tokens."""
        super().__init__(reply, reply.output)
        self._speller = speller
        self._key = reply.id.partition("-")[2]
        self._num_events = 0
        self._status = "completed"
        """The status of items that end."""
        self._logprobs: list[tuple[int | None, ChatLogprob]] = []
        self._run = -1
        """The number of the message's run of text; each has a message of its own."""

    def begin(self, call: Call) -> list[bytes]:
        del call
        return [
            self._event("response.created", response=self.reply),
            self._event("response.in_progress", response=self.reply),
        ]

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        if self._speller is not None:
            entries = self._speller.chat(delta.tokens, delta.logprobs).content
            self._logprobs += zip(delta.runs, entries, strict=True)
        return super().chunk(call, delta)

    def end(self, call: Call) -> list[bytes]:
        cut = self.finish_reason == "length"
        self._status = self.reply.status = "incomplete" if cut else "completed"
        events = self.close()
        self.reply.incomplete_details = {"reason": "max_output_tokens"} if cut else None
        self.reply.usage = response_usage(call)
        return [*events, self._event(f"response.{self._status}", response=self.reply)]

    def failed(self, call: Call, error: MooncakeError) -> list[bytes]:
        """End the response with `error` and return its last event."""
        del call
        self._status = "incomplete"
        self.close()
        self.reply.status = "failed"
        self.reply.error = {"code": "server_error", "message": error.message}
        return [self._event("response.failed", response=self.reply)]

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = ResponseEvent(type=kind, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event(encode(body), kind)

    def _item_event(self, kind: str, item: Item, **fields: Any) -> bytes:
        index = len(self.reply.output) - 1
        return self._event(kind, output_index=index, item_id=item.id, **fields)

    def _text_event(self, kind: str, item: Item, **fields: Any) -> bytes:
        return self._item_event(kind, item, content_index=0, **fields)

    def _part(self, piece: Piece) -> Item:
        number = len(self.reply.output)
        if piece.call is not None:
            assert piece.call_id is not None
            assert piece.name is not None
            return CallItem(f"fc_{self._key}_{number}", piece.call_id, piece.name)
        if piece.is_reasoning:
            return ReasoningItem(f"rs_{self._key}_{number}")
        self._run += 1
        return MessageItem(f"msg_{self._key}_{number}")

    def _begun(self, part: Item) -> list[bytes]:
        index = len(self.reply.output) - 1
        events = [self._event("response.output_item.added", output_index=index, item=part)]
        kind = "response.content_part.added"
        if isinstance(part, ReasoningItem):
            events.append(self._text_event(kind, part, part=ReasoningText()))
            part.content.append(ReasoningText())
        elif isinstance(part, MessageItem):
            events.append(self._text_event(kind, part, part=OutputText()))
            part.content.append(OutputText())
        return events

    def _grown(self, part: Item, text: str) -> list[bytes]:
        if isinstance(part, CallItem):
            return [self._item_event("response.function_call_arguments.delta", part, delta=text)]
        if isinstance(part, ReasoningItem):
            return [self._text_event("response.reasoning_text.delta", part, delta=text)]
        logprobs = self._take_logprobs(part)
        kind = "response.output_text.delta"
        return [self._text_event(kind, part, delta=text, logprobs=logprobs)]

    def _ended(self, part: Item, text: str) -> list[bytes]:
        part.status = self._status
        events: list[bytes] = []
        if isinstance(part, CallItem):
            part.arguments = text
            kind = "response.function_call_arguments.done"
            events.append(self._item_event(kind, part, arguments=text))
        elif isinstance(part, ReasoningItem):
            part.content[0].text = text
            events.append(self._text_event("response.reasoning_text.done", part, text=text))
        else:
            self._take_logprobs(part)
            part.content[0].text = text
            logprobs, kind = part.content[0].logprobs, "response.output_text.done"
            events.append(self._text_event(kind, part, text=text, logprobs=logprobs))
        if not isinstance(part, CallItem):
            kind = "response.content_part.done"
            events.append(self._text_event(kind, part, part=part.content[0]))
        index = len(self.reply.output) - 1
        events.append(self._event("response.output_item.done", output_index=index, item=part))
        return events

    def _take_logprobs(self, item: MessageItem) -> list[ChatLogprob]:
        """Move the logprobs that have arrived since the message's last text into it."""
        taken = [entry for run, entry in self._logprobs if run == self._run]
        self._logprobs = [pair for pair in self._logprobs if (pair[0] or 0) > self._run]
        item.content[0].logprobs += taken
        return taken


def response_usage(call: Call) -> ResponseUsage:
    """Return the tokens of `call` so far, in the form of this API."""
    return ResponseUsage(
        input_tokens=call.num_prompt_tokens,
        input_tokens_details=InputDetails(call.num_cached_tokens, mooncake=call.cache or UNSET),
        output_tokens=call.num_output_tokens,
        output_tokens_details=OutputDetails(call.num_reasoning_tokens),
        total_tokens=call.num_prompt_tokens + call.num_output_tokens,
    )


def new_response_stream(
    api_server: ApiServer, body: ResponsesRequest, chat: ChatRequest, call: Call
) -> ResponseStream:
    """Return the object that writes the response to `body`, which was translated to `chat`, or its
    events.
    """
    speller = None
    if chat.logprobs:
        speller = LogprobSpeller(api_server.model.tokenizer, as_ids=False)
    reply = response_reply(body, call.call_id, call.requests[0].sampling)
    reply.created_at, reply.model = api_server.now_s(), api_server.names[0]
    return ResponseStream(reply, speller)


def response_reply(body: ResponsesRequest, name: str, sampling: SamplingParams) -> ResponseReply:
    """Return a response without output, which repeats the settings of the request."""
    sent = body.model_dump(mode="json", by_alias=True, exclude_none=True, include=_REPEATED)
    text: dict[str, Any] = {"format": {"type": "text"}} | sent.get("text", {})
    return ResponseReply(
        id=name,
        created_at=0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model="",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning={"effort": None, "summary": None} | sent.get("reasoning", {}),
        temperature=sampling.temperature,
        text=text,
        tool_choice=sent.get("tool_choice", "auto"),
        tools=[_NO_TOOL | tool for tool in sent.get("tools", [])],
        top_logprobs=body.top_logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=sent.get("user"),
    )


_REPEATED = {"text", "reasoning", "tool_choice", "tools", "user"}
"""The fields that a response repeats as they were sent. The input, which may be long, is none."""
_NO_TOOL = {"description": None, "parameters": None, "strict": None}
