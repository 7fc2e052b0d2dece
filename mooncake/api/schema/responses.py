"""The body of `POST /v1/responses`. Nothing is stored here: the client sends the whole conversation
in `input`. The replies are msgspec structs: the response, its output items, its events.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, field_validator, model_validator

from mooncake.api.schema.chat import MAX_TOOLS, FunctionSpec, OfFunction
from mooncake.api.schema.fields import (
    MAX_ITEMS,
    UNSUPPORTED_FIELDS,
    Count,
    JsonObject,
    Positive,
    SharedFields,
    Texts,
    Unsupported,
)
from mooncake.api.schema.replies import ChatLogprob, SchemaError
from mooncake.base.request import CacheUse

_TEXT_PARTS = frozenset(
    {"input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"}
)


class ItemPart(JsonObject):
    """A piece of an item's content; this model takes text only."""

    type: str
    text: str | None = None

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value not in _TEXT_PARTS:
            raise ValueError(f"content of type {value[:40]!r} is not supported, only text")
        return value


Parts = Annotated[list[ItemPart], Field(fail_fast=True, max_length=MAX_ITEMS)]
ItemContent = str | Parts | None

_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


class InputItem(JsonObject):
    """One entry of `input`: a message, a call the model made, its result, or its reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: ItemContent = None
    call_id: str | None = None
    name: str | None = Field(None, min_length=1)
    arguments: str | None = None
    output: ItemContent = None
    summary: Parts | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        if self.type not in _NEEDED:
            kinds = ", ".join(_NEEDED)
            raise ValueError(f"items of type {self.type[:40]!r} are not supported, only {kinds}")
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"an item of type {self.type} needs {name}")
        return self


class FunctionTool(FunctionSpec, OfFunction):
    """One entry of `tools`: only functions, because nothing is searched or run here."""


class ToolName(OfFunction):
    """A function by its name."""

    name: str


class AllowedTools(JsonObject):
    """`tool_choice` among some of the declared tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], Field(fail_fast=True, max_length=MAX_TOOLS)]


class TextFormat(JsonObject):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """The same as in `response_format` of chat completions."""


class TextSettings(JsonObject):
    """Settings for the answer's text."""

    format: TextFormat | None = None


class ReasoningSettings(JsonObject):
    """Settings for how much the model should reason before it answers."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(SharedFields):
    """Answer a conversation, given as items."""

    quiet: ClassVar[frozenset[str]] = SharedFields.quiet | {"stream_options"}
    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED_FIELDS,
        "background": ((False,), "wait for the answer, or stream it"),
        "conversation": ((), "nothing is stored here: send the whole conversation in input"),
        "logprobs": ((False,), "use top_logprobs"),
        "max_completion_tokens": ((), "use max_output_tokens"),
        "max_tokens": ((), "use max_output_tokens"),
        "max_tool_calls": ((), "it limits built-in tools, of which there are none"),
        "messages": ((), "use input"),
        "n": ((1,), "there is one answer a call; /v1/chat/completions gives several"),
        "previous_response_id": (
            (),
            "nothing is stored here: send the whole conversation in input",
        ),
        "prompt": ((), "send instructions and input"),
        "reasoning_effort": ((), "use reasoning.effort"),
        "response_format": (({"type": "text"},), "use text.format"),
        "stop": (([],), "it is there in /v1/chat/completions"),
    }

    input: (
        str | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    )
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolName | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Texts | None = None
    """"message.output_text.logprobs" has an effect; other values name things that do not exist
    here.
    """
    top_logprobs: Count | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """auto = cut off the beginning if the input is too long."""
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    """Accepted; nothing is stored."""


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of the model's reasoning."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """Text for the user."""

    id: str
    content: list[OutputText] = []
    role: str = "assistant"
    status: str = "in_progress"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's reasoning; there is no summary of it."""

    id: str
    content: list[ReasoningText] = []
    summary: list[Any] = []
    status: str = "in_progress"


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of one of the client's functions."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct, frozen=True):
    """The part of the input that was reused. Storing input costs nothing here."""

    cached_tokens: int
    cache_write_tokens: int = 0
    mooncake: CacheUse | UnsetType = UNSET
    """Where cached tokens came from, and why the rest was computed; our addition to OpenAI's."""


class OutputDetails(msgspec.Struct, frozen=True):
    """The part of the output that was reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """The cost of the call, in tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseReply(msgspec.Struct, kw_only=True):
    """The response: the settings of the request, and its output."""

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    """in_progress, completed, incomplete or failed."""
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    service_tier: str = "default"
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: Any = None
    schema_errors: list[SchemaError] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a response's stream; its fields depend on `type`."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
