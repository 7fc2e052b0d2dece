"""Replies of `/v1/messages`, as msgspec structs: the message, its blocks, its events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mooncake.api.schema.replies import SchemaError
from mooncake.base.request import CacheUse


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
