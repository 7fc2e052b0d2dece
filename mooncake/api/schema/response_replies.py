"""Replies of `/v1/responses`, as msgspec structs: the response, its output items, its events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from mooncake.api.schema.replies import ChatLogprob, SchemaError
from mooncake.base.request import CacheUse


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
