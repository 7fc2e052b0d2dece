"""The roots of what clients send, and the fields that several APIs have: OpenAI's names and vLLM's
extras.

    JsonObject                any object
    ├── RequestBody           a whole body
    └── SamplingFields        what every API and `mooncake.SamplingParams` have
        ├── AnswerFields      also how many answers, how long, where they stop
        └── SharedFields      also a body, with what only HTTP needs: streaming, ids
            GenerationFields  = both: the root of the chat and completion bodies

Unknown fields are accepted and logged. Known fields that this engine cannot honour are refused, so
that nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, field_validator

from mooncake.base import InvalidRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
"""All numbers are bounded: an error could not even repeat a number of thousands of digits."""
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]
MAX_ITEMS = 65_536
"""The most items that a list may have: more turns than any context holds."""
TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**21)]
"""Lists are bounded, and checked only up to the first wrong item. Neither many items nor many wrong
ones may cost seconds, in which no stream would move.
"""
Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]
MIN_BIAS, MAX_BIAS = -100, 100
CACHE_MARK = "cache_control"
"""Anthropic's mark for where a cached prefix ends, on requests, messages, their parts and tools."""
KEEP_S = {"5m": 300.0, "1h": 3600.0}
"""Anthropic's times to live -> seconds for which the pool keeps a marked prefix."""
MAX_SESSION_CHARS = 1024
QUIET_FIELDS = frozenset(
    {
        "metadata", "safety_identifier", "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip
"""Fields that are accepted silently: they have no effect on the tokens here."""
Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field -> (values that ask for nothing, advice for the error). null always asks for nothing."""
UNSUPPORTED_FIELDS: Unsupported = {
    "audio": ((), "this model writes text only"),
    "chat_template": ((), "templates come from the checkpoint"),
    "function_call": (("none",), "use tools and tool_choice"),
    "functions": (([],), "use tools"),
    "length_penalty": ((1, 1.0), "beam search is there in /v1/chat/completions"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "modalities": ((["text"],), "this model writes text only"),
    "prompt_embeds": ((), "send text or token ids"),
    "repetition_detection": ((), "use repetition_penalty"),
    "suffix": (("",), "this model does not fill in the middle"),
    "thinking_token_budget": ((), "limit the whole answer with max_tokens"),
    "use_beam_search": ((False,), "it is there in /v1/chat/completions"),
}
"""Fields that no API of this server honours."""
_ELSEWHERE: Unsupported = {
    "input": ((), "send messages or prompt, or use /v1/responses"),
    "max_length": ((), "use max_tokens"),
    "max_new_tokens": ((), "use max_tokens"),
    "max_output_tokens": ((), "use max_tokens"),
    "stop_sequences": (([],), "use stop"),
    "system": ((), "send a message of role system"),
}
"""Names that other APIs use for our fields. If they were ignored, the answer would change
silently.
"""


class JsonObject(BaseModel):
    """An object in a request's body, with OpenAI's strict types ("5" is no integer).

    Fields that the class does not know are kept in `model_extra`. The request as a whole decides
    whether they are refused, logged or ignored (`SharedFields.refuse_unsupported`).
    """

    model_config = ConfigDict(extra="allow", strict=True)


class CacheControl(JsonObject):
    """A mark: the pool keeps the prompt up to here."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """How long it is kept; 5 minutes by default. Each such request begins the time anew."""

    @property
    def keep_s(self) -> float:
        """Seconds for which the pool is to keep the prompt."""
        return KEEP_S[self.ttl or "5m"]


class Markable(JsonObject):
    """An object that may carry a mark."""

    cache_control: CacheControl | None = None

    @property
    def mark_s(self) -> float:
        """Seconds for which the pool is to keep the prompt up to here, or 0 if no mark says so."""
        return 0.0 if self.cache_control is None else self.cache_control.keep_s


class RequestBody(JsonObject):
    """A whole body."""

    model: str | None = None
    """The name of the model; None = the one that is served."""

    @property
    def json_texts(self) -> list[str]:
        """The strings in the body that will be parsed as JSON. They cost as much as the body."""
        return []


class JsonSchemaFormat(JsonObject):
    """The `json_schema` of a response format."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """True: a schema that no grammar can follow as a whole is refused. Otherwise the part that can
    be followed is, and the finished answer is checked against the whole (`schema_errors`).
    """


class ResponseFormat(JsonObject):
    """OpenAI's way to ask for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(JsonObject):
    """vLLM's way to ask for an answer in a certain form. Exactly one of the fields must be set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    """Lark or GBNF."""
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


def _check_bias(bias: dict[str, Any]) -> dict[str, Any]:
    for value in bias.values():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not MIN_BIAS <= value <= MAX_BIAS:
            raise ValueError(f"a bias is a number from {MIN_BIAS} to {MAX_BIAS}")
    return bias


LogitBias = Annotated[
    dict[str, Any],
    AfterValidator(_check_bias),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": MIN_BIAS, "maximum": MAX_BIAS},
        }
    ),
]
"""Token id (as text) -> the number that is added to its logit."""


def _texts(schema: dict[str, Any] | str | None) -> list[str]:
    return [schema] if isinstance(schema, str) else []


class StreamOptions(JsonObject):
    """Options for what a stream carries besides the answer."""

    include_usage: bool | None = None
    """Send one more chunk at the end, with usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk."""


class SamplingFields(JsonObject):
    """Fields that say how tokens are chosen and how the prompt is cut. None = the model's
    default.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    """0 and -1 turn it off."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: int | None = Field(default=None, ge=INT64_MIN, le=INT64_MAX)
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1, le=INT64_MAX)
    """Keep this many tokens of the prompt; -1 = as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The end that is cut off; left by default, so that the newest text stays."""


class AnswerFields(SamplingFields):
    """Fields that also say how many answers are made, how long they are and where they stop."""

    n: Positive | None = None
    max_tokens: Count | None = None
    stop: str | Texts | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    """Return the logprobs of the prompt's tokens, and this many most likely ones for each."""
    best_of: Positive | None = None
    """Generate this many answers and return the `n` most likely."""
    use_beam_search: bool | None = None
    """Look for the `n` most likely answers with `n` beams, or `best_of`; nothing is sampled."""
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    """With beam search, answers are compared by logprob / number of tokens ** length_penalty."""


class SharedFields(SamplingFields, RequestBody, Markable):
    """The fields of a generating call that all HTTP APIs have."""

    quiet: ClassVar[frozenset[str]] = QUIET_FIELDS
    unsupported: ClassVar[Unsupported] = UNSUPPORTED_FIELDS

    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template. They have no effect if there is no conversation."""
    priority: (
        Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
        | Literal["premium", "interactive", "batch"]
        | None
    ) = None
    """Lower is sooner, as in vLLM: below 0 premium, 0 interactive, above 0 batch."""
    service_tier: str | None = None
    """OpenAI's name for the same: "priority" is premium, "flex" is batch, all others are
    interactive. `priority` takes precedence over it.
    """
    cache_salt: str | None = Field(default=None, min_length=1, max_length=128)
    """Only requests with the same salt share cached blocks."""
    prompt_cache_key: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """The pool keeps the prompt for 5 minutes, whatever the key is."""
    session_id: str | None = Field(default=None, max_length=MAX_SESSION_CHARS)
    """The same as `prompt_cache_key`. A request may name it in a header instead."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """"24h": the pool keeps the prompt for an hour, the longest that it keeps anything."""
    request_id: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")

    @property
    def json_texts(self) -> list[str]:
        asked = self.structured_outputs
        return _texts(asked.json_ if asked is not None else None)

    @property
    def whole_keep_s(self) -> float:
        """Seconds for which the pool is to keep the whole prompt, or 0 if no field asks for it."""
        key_s = KEEP_S["5m"] if self.prompt_cache_key or self.session_id else 0.0
        retention_s = KEEP_S["1h"] if self.prompt_cache_retention == "24h" else 0.0
        return max(self.mark_s, key_s, retention_s)

    @property
    def keep_s(self) -> float:
        """Seconds for which the pool is to keep the prompt, or a part of it."""
        return self.whole_keep_s

    @field_validator("cache_salt")
    @classmethod
    def _salt_is_plain(cls, value: str | None) -> str | None:
        if value is not None and any(letter in value for letter in "@/\\\0"):
            raise ValueError("must not contain @ / \\ or NUL")
        return value

    def refuse_unsupported(self) -> list[str]:
        """Refuse the known fields that cannot be honoured; return the names of unknown fields.

        Raises:
            InvalidRequest: a field cannot be honoured; the message names it and what to do instead.
        """
        unknown: list[str] = []
        for name, value in (self.model_extra or {}).items():
            if name in self.unsupported:
                neutral, advice = self.unsupported[name]
                if value is not None and value not in neutral:
                    raise InvalidRequest(f"{name} is not supported: {advice}", param=name)
            elif name not in self.quiet:
                unknown.append(name)
        return unknown


_FORMS = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar",
)  # fmt: skip


class GenerationFields(AnswerFields, SharedFields):
    """The fields that the bodies of chat and completions have in common."""

    unsupported: ClassVar[Unsupported] = {**UNSUPPORTED_FIELDS, **_ELSEWHERE}

    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    echo: bool | None = None
    """Put the prompt (in a chat: the message that is continued) before the answer."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def json_texts(self) -> list[str]:
        return super().json_texts + _texts(self.guided_json)

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def asks_form(self) -> bool:
        """True if a field asks for a form of the answer."""
        return any(getattr(self, name) is not None for name in _FORMS)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def refuse_unsupported(self) -> list[str]:
        """Do the same, and refuse `stream_options` if nothing is streamed."""
        unknown = super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        return unknown
