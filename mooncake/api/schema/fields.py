"""What every generating call may ask for: OpenAI's fields and vLLM's extras.

Types are strict as OpenAI's are ("5" is no integer). Unknown fields are accepted and logged, known
ones that this engine cannot honour are refused, so that nothing is ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
)

from mooncake.api.schema.structure import ResponseFormat, StructuredOutputs
from mooncake.base import InvalidRequest

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

Count = Annotated[int, Field(ge=0, le=INT64_MAX)]
"""Bounded as all numbers are: one of thousands of digits cannot even be repeated in an error."""
Positive = Annotated[int, Field(ge=1, le=INT64_MAX)]

MAX_ITEMS = 65_536
"""Of a list: more turns than any context holds."""

TokenId = Annotated[int, Field(ge=0, le=2**32 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**21)]
"""Lists are bounded, and checked to the first wrong item only: neither many items nor many wrong
ones must cost seconds, in which no stream moves."""

Texts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_ITEMS)]


def _check_bias(bias: dict[str, Any]) -> dict[str, Any]:
    for value in bias.values():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not MIN_BIAS <= value <= MAX_BIAS:
            raise ValueError(f"a bias is a number from {MIN_BIAS} to {MAX_BIAS}")
    return bias


MIN_BIAS, MAX_BIAS = -100, 100

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
"""Token id -> what is added to its logit."""

QUIET_FIELDS = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
        "session_id", "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip
"""Accepted without a word: they have no effect on the tokens here."""

Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Field -> (values that ask for nothing, what to do instead). null always asks for nothing."""

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
"""In any API."""

_ELSEWHERE: Unsupported = {
    "input": ((), "send messages or prompt, or use /v1/responses"),
    "max_length": ((), "use max_tokens"),
    "max_new_tokens": ((), "use max_tokens"),
    "max_output_tokens": ((), "use max_tokens"),
    "stop_sequences": (([],), "use stop"),
    "system": ((), "send a message of role system"),
}
"""What other APIs call things: ignored, it would change the answer without a word."""


class StreamOptions(BaseModel):
    """What else a stream carries."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    """One more chunk at the end, with usage and no choices."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every chunk."""


class SharedFields(BaseModel):
    """What a generating call of any API may ask for. None = the model's default."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    quiet: ClassVar[frozenset[str]] = QUIET_FIELDS
    unsupported: ClassVar[Unsupported] = UNSUPPORTED_FIELDS

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    """0 and -1 = off."""
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    min_tokens: Count | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    structured_outputs: StructuredOutputs | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=INT64_MAX)
    """Keep so many tokens of the prompt; -1 = as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """Which end is cut off; left by default, so that the newest text stays."""
    chat_template_kwargs: dict[str, Any] | None = None
    """What the chat template is told; of no meaning where there is no conversation."""
    priority: (
        Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]
        | Literal["premium", "interactive", "batch"]
        | None
    ) = None
    """Lower is sooner, as in vLLM: below 0 premium, 0 interactive, above 0 batch."""
    service_tier: str | None = None
    """The same as OpenAI says it: "priority" is premium, "flex" batch, all others interactive;
    `priority` goes before it.
    """
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    request_id: str | None = Field(None, pattern=r"^[\x21-\x7e]{1,128}$")

    @field_validator("cache_salt")
    @classmethod
    def _salt_is_plain(cls, value: str | None) -> str | None:
        if value is not None and any(letter in value for letter in "@/\\\0"):
            raise ValueError("must not contain @ / \\ or NUL")
        return value

    def refuse_unsupported(self) -> list[str]:
        """Refuse fields we know and cannot honour; return the names of those we do not know.

        Raises:
            InvalidRequest: names the field and what to do instead.
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


class GenerationFields(SharedFields):
    """Root of the chat and completion requests."""

    unsupported: ClassVar[Unsupported] = {**UNSUPPORTED_FIELDS, **_ELSEWHERE}

    n: Positive | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    stop: str | Texts | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    best_of: Positive | None = None
    """Generate so many and keep the `n` most likely."""
    use_beam_search: bool | None = None
    """Look for the `n` most likely answers with `n` beams, or `best_of`; nothing is sampled."""
    length_penalty: float | None = Field(None, ge=-10, le=10)
    """Of beam search: answers compare by logprob / number of tokens ** length_penalty."""
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def refuse_unsupported(self) -> list[str]:
        """Also refuse `stream_options` where nothing is streamed."""
        unknown = super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        return unknown
