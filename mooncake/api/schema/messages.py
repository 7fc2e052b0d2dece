"""The bodies of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`, and their replies:
msgspec structs of the message, its blocks and its events.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator

from mooncake.api.schema.chat import MAX_TOOLS
from mooncake.api.schema.fields import (
    MAX_ITEMS,
    UNSUPPORTED_FIELDS,
    JsonObject,
    Markable,
    Positive,
    SharedFields,
    Texts,
    Unsupported,
)
from mooncake.api.schema.replies import SchemaError
from mooncake.base.request import CacheUse

_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


class Block(Markable):
    """A piece of a turn: text, the model's thinking, a call it made, or a call's result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = Field(None, min_length=1)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Block:
        if self.type not in _NEEDED:
            raise ValueError(f"content of type {self.type[:40]!r} is not supported, only text")
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"a block of type {self.type} needs {name}")
        if isinstance(self.content, list) and any(part.type != "text" for part in self.content):
            raise ValueError(f"a block of type {self.type} can hold text only")
        return self


Blocks = str | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_ITEMS)]


class Turn(Markable):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(Markable):
    """One entry of `tools`: only the client's own tools, because nothing is searched or run
    here.
    """

    type: Literal["custom"] | None = None
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    """Calls must be valid against the schema unless this is false."""


class MessagesToolChoice(JsonObject):
    """Whether to call a tool, and which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> MessagesToolChoice:
        if self.type == "tool" and not self.name:
            raise ValueError("type tool needs the name of the tool")
        return self


class ThinkingSettings(JsonObject):
    """Whether the model should reason. A budget for reasoning is not enforced."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(JsonObject):
    """JSON that is valid against `schema`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputSettings(JsonObject):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptFields(SharedFields):
    """The fields of both calls: everything that goes into the prompt."""

    unsupported: ClassVar[Unsupported] = {
        **UNSUPPORTED_FIELDS,
        "container": ((), "nothing is kept or run here: declare tools"),
        "logprobs": ((False,), "they are there in /v1/chat/completions"),
        "max_completion_tokens": ((), "use max_tokens"),
        "max_output_tokens": ((), "use max_tokens"),
        "mcp_servers": (([],), "nothing is run here: declare tools"),
        "n": ((1,), "there is one answer a call; /v1/chat/completions gives several"),
        "parallel_tool_calls": ((True,), "use tool_choice.disable_parallel_tool_use"),
        "reasoning_effort": ((), "use output_config.effort"),
        "response_format": (({"type": "text"},), "use output_config.format"),
        "stop": (([],), "use stop_sequences"),
    }

    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS)]
    system: Blocks | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None


class CountTokensRequest(PromptFields):
    """A request for the length of such a message's prompt."""


class MessagesRequest(PromptFields):
    """Answer a conversation."""

    max_tokens: Positive
    stop_sequences: Texts | None = None


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text for the user."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The model's reasoning. The signature only tells clients that the block is complete."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of one of the client's tools."""

    id: str
    name: str
    input: dict[str, Any] = {}


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """The cost of the call, in tokens. The whole prompt is the sum of the three kinds of input."""

    input_tokens: int
    """Tokens of the prompt that were not found in a cache."""
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    mooncake: CacheUse | UnsetType = UNSET
    """Where cached tokens came from, and why the rest was computed; our addition to Anthropic's."""


class MessageReply(msgspec.Struct, kw_only=True):
    """The answer."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    schema_errors: list[SchemaError] | UnsetType = UNSET


class BlockDelta(msgspec.Struct):
    """What is added to a block, or the end of the message. Its fields depend on `type`; the end has
    none.
    """

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: str | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET
    schema_errors: list[SchemaError] | UnsetType = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """One event of a message's stream; its fields depend on `type`."""

    type: str
    message: MessageReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    """`POST /v1/messages/count_tokens`."""

    input_tokens: int
