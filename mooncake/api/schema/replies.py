"""Replies of OpenAI's APIs, as msgspec structs: encoding one takes a microsecond, which token
streams need.

Fields left UNSET do not appear; None appears as null, as OpenAI's clients expect.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from mooncake.base.request import CacheUse

encode = msgspec.json.Encoder().encode


class CachedTokens(msgspec.Struct, frozen=True):
    """The part of the prompt that was reused."""

    cached_tokens: int
    mooncake: CacheUse | UnsetType = UNSET
    """Where the reused tokens came from, and why the rest was computed; our addition to OpenAI's
    fields.
    """


class ReasoningTokens(msgspec.Struct, frozen=True):
    """The part of the output that was reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """The cost of the call, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class TokenLogprob(msgspec.Struct):
    """One candidate in chat form."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """One sampled token in chat form, with the most likely candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    """`logprobs` of a chat choice."""

    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct):
    """`logprobs` of a completion choice: four columns of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Logprob(msgspec.Struct, frozen=True):
    """One candidate for a token, in vLLM's form."""

    logprob: float
    """Natural logarithm; -9999 stands for minus infinity."""
    rank: int
    """1 = the most likely token."""
    decoded_token: str


PromptLogprobs = list[dict[int, Logprob] | None]
"""The candidates of each prompt token, by token id. The first token has none."""


class FunctionText(msgspec.Struct):
    """Name and arguments of a call, or a piece of the arguments."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallReply(msgspec.Struct):
    """A call the model makes; in a stream, the piece of it with this index."""

    function: FunctionText
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class SchemaError(msgspec.Struct):
    """A place where an answer is not valid, or not known to be valid, against a schema that no
    grammar can follow as a whole.
    """

    path: str
    """JSON pointer into the answer or the call's arguments; "" = the whole."""
    keyword: str | None
    """The keyword of the schema that is not met; null = it could not be checked."""
    message: str
    tool_call_id: str | UnsetType = UNSET
    """The call whose arguments it is about; without it the error is about the text."""


class ChatText(msgspec.Struct):
    """A message, or the additions of a chunk to it."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    schema_errors: list[SchemaError] | UnsetType = UNSET


class ChatReply(msgspec.Struct):
    """The whole answer to a chat request."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The additions of a chunk to one answer."""

    index: int
    delta: ChatText
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    schema_errors: list[SchemaError] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """One continuation, or the additions of a chunk to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    schema_errors: list[SchemaError] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct):
    """The whole answer to a completion request, or one event of its stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct):
    """One name under which the model is served."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[Any]


class ModelList(msgspec.Struct):
    """`GET /v1/models`."""

    object: str
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfoReply(msgspec.Struct):
    """`GET /tokenizer_info`: evaluation harnesses ask for it before they tokenize here."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str
    model_max_length: int


class DetokenizeReply(msgspec.Struct):
    """`POST /detokenize`."""

    prompt: str
