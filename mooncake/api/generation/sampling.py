"""Turns a validated body into `SamplingParams`: fills in defaults, checks ids and lengths against
the model. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

import msgspec

from mooncake.api.bounds import (
    ALLOWED_IDS,
    ANSWER_IDS,
    ANSWER_LOGPROBS,
    BAD_WORD_TOKENS,
    BAD_WORDS,
    BEAM_CONTEXT,
    BEAM_TOKENS,
    BEAM_WIDTH,
    BIASED_IDS,
    PROMPT_IDS,
    PROMPT_LOGPROBS,
    SETTINGS_BYTES,
    STOP_IDS,
    WORD_TOKENS,
)
from mooncake.api.config import ApiConfig
from mooncake.api.errors import shorten
from mooncake.api.generation.generation import TextOptions
from mooncake.api.model import ServedModel
from mooncake.api.schema.fields import GenerationFields
from mooncake.api.text.answer import Marker
from mooncake.api.text.tokenizer import Window
from mooncake.base import ContextTooLong, Grammar, InvalidRequest, Priority, SamplingParams
from mooncake.base.large_settings import setting_bytes

SEED_SPACE = 2**64

MIN_TEMPERATURE = 1e-5
"""Lower temperatures count as 0: logits divided by less would leave the range of float32."""

Number = TypeVar("Number", int, float)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that chat and completions name differently."""

    max_tokens: int | None
    """The number given; None = `default_max_tokens` is used."""
    max_tokens_param: str
    default_max_tokens: int | None = None
    """The default; None = the rest of the context, which also limits any default."""
    num_logprobs: int | None
    logprobs_param: str
    num_prompt_logprobs: int | None


def sampling_params(
    fields: GenerationFields, wanted: Wanted, model: ServedModel, config: ApiConfig
) -> SamplingParams:
    """Return the settings of all choices, except the seed and a `max_tokens` that depends on the
    prompt.

    Raises:
        InvalidRequest: a field is out of range; the message names the first one.
    """
    _check_limits(fields, wanted, config)
    defaults = model.defaults
    temperature = _first(fields.temperature, defaults.temperature)
    stop_ids = frozenset(fields.stop_token_ids or [])
    STOP_IDS.check("stop_token_ids", len(stop_ids))
    check_ids("stop_token_ids", stop_ids, model)
    if not fields.ignore_eos:
        stop_ids |= frozenset(model.eos_token_ids)
    allowed = list(fields.allowed_token_ids or [])
    ALLOWED_IDS.check("allowed_token_ids", len(allowed))
    check_ids("allowed_token_ids", allowed, model)
    if fields.allowed_token_ids is not None and not allowed:
        raise InvalidRequest("allowed_token_ids: must not be empty", param="allowed_token_ids")
    return SamplingParams(
        max_tokens=wanted.max_tokens or wanted.default_max_tokens or 0,
        min_tokens=fields.min_tokens or 0,
        temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
        top_p=_first(fields.top_p, defaults.top_p),
        top_k=max(0, _first(fields.top_k, defaults.top_k)),
        min_p=_first(fields.min_p, defaults.min_p),
        repetition_penalty=_first(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields, model),
        allowed_token_ids=allowed,
        stop_token_ids=stop_ids,
        ignore_eos=bool(fields.ignore_eos),
        bad_words=_bad_words(fields, model, config),
        num_logprobs=_num_logprobs(fields, wanted),
        num_prompt_logprobs=wanted.num_prompt_logprobs,
    )


def with_grammar(sampling: SamplingParams, grammar: Grammar | None, param: str) -> SamplingParams:
    """Return `sampling` with the grammar that the field `param` asks for.

    Raises:
        InvalidRequest: all large settings together are too large; names the largest one's field.
    """
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    sizes = setting_bytes(sampling)
    largest = max(sizes, key=lambda name: sizes[name])
    SETTINGS_BYTES.check(param if largest == "grammar" else largest, sum(sizes.values()))
    return sampling


def check_chars(num_chars: int, model: ServedModel, param: str) -> None:
    """Refuse a text that cannot fit the context, however long its tokens are, before it is
    tokenized; `param` is the field it came in. If the text will be cut, only the part that
    `prompt_window` asks for is tokenized.

    Raises:
        ContextTooLong: the text is too long; the message says how many characters fit at most.
    """
    limit = model.max_model_len * model.tokenizer.longest_token
    if num_chars > limit:
        raise ContextTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens, at most {limit} "
            f"characters. However, the prompt has {num_chars} characters. Please shorten it.",
            param=param,
        )


def prompt_window(fields: GenerationFields, model: ServedModel) -> Window:
    """Return which tokens of a prompt `fit_prompt` and `fit_output` need."""
    keep, limit = fields.truncate_prompt_tokens, model.max_model_len
    if keep is None:
        return Window(limit)
    return Window(limit if keep == -1 else min(keep, limit), fields.truncation_side != "right")


MAX_COUNTED_CONTEXTS = 4
"""The longest text that may be only tokenized or counted, in contexts of the model."""


def counted_window(model: ServedModel) -> Window:
    """Return how many tokens are needed of a text that is only counted."""
    return Window(MAX_COUNTED_CONTEXTS * model.max_model_len)


def check_counted(tokens: Collection[int], model: ServedModel, param: str) -> None:
    """Refuse a text of more tokens than `counted_window` has; `param` is the field it came in."""
    limit = counted_window(model).num_tokens
    if len(tokens) > limit:
        raise ContextTooLong(
            f"{param}: more than {limit} tokens, {MAX_COUNTED_CONTEXTS} times this model's "
            "context; send it in parts",
            param=param,
        )


def fit_prompt(
    tokens: list[int], fields: GenerationFields, sampling: SamplingParams, model: ServedModel
) -> list[int]:
    """Return the prompt, cut as `truncate_prompt_tokens` asks.

    Raises:
        InvalidRequest: the prompt is empty, or has a token that the model lacks. A tokenizer may
            have more tokens than the model.
    """
    keep = fields.truncate_prompt_tokens
    if keep is not None:
        if keep == -1:  # an answer that is too long by itself is refused by `fit_output`
            keep = max(1, model.max_model_len - max(1, sampling.max_tokens))
        if len(tokens) > keep:
            right = fields.truncation_side == "right"
            tokens = tokens[:keep] if right else tokens[len(tokens) - keep :]
    if not tokens:
        raise InvalidRequest("the prompt is empty: it needs at least one token", param="prompt")
    check_ids("prompt", tokens, model)
    return tokens


def fit_output(
    num_prompt_tokens: int,
    sampling: SamplingParams,
    wanted: Wanted,
    model: ServedModel,
    most: int | None = None,
) -> SamplingParams:
    """Return `sampling` with this prompt's `max_tokens`: the given number, otherwise the rest of
    the context, but no more than `most` (`most_tokens`).

    Raises:
        ContextTooLong: prompt and output do not fit the context together.
    """
    limit = model.max_model_len
    if num_prompt_tokens >= limit:
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, the prompt has "
            f"at least {num_prompt_tokens} tokens, which leaves no room for an answer. Please "
            "shorten it.",
            param="messages" if wanted.max_tokens_param == "max_completion_tokens" else "prompt",
        )
    if wanted.max_tokens is None:
        left = min(limit - num_prompt_tokens, most or limit)
        default = wanted.default_max_tokens
        sampling = msgspec.structs.replace(
            sampling, max_tokens=left if default is None else min(default, left)
        )
    elif num_prompt_tokens + wanted.max_tokens > limit:
        raise ContextTooLong(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt_tokens + wanted.max_tokens} tokens ({num_prompt_tokens} in the prompt, "
            f"{wanted.max_tokens} in the answer). {wanted.max_tokens_param}: please ask for less, "
            "or shorten the prompt.",
            param=wanted.max_tokens_param,
        )
    if sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest(
            f"min_tokens: {sampling.min_tokens} is more than the answer's limit of "
            f"{sampling.max_tokens} tokens",
            param="min_tokens",
        )
    return sampling


def most_tokens(
    fields: GenerationFields, sampling: SamplingParams, num_prompt_tokens: int
) -> int | None:
    """Return the longest answer that the limits on beams, log-probabilities and returned token ids
    allow; None = they set no limit.
    """
    width = max(fields.n or 1, fields.best_of or 1)
    limits: list[int] = []
    if fields.use_beam_search:
        limits += [BEAM_TOKENS.limit // width, BEAM_CONTEXT.limit // width - num_prompt_tokens]
    if sampling.num_logprobs is not None:
        limits.append(ANSWER_LOGPROBS.limit // (width * (sampling.num_logprobs + 1)))
    if fields.return_token_ids:
        limits.append(ANSWER_IDS.limit // width)
    return max(1, min(limits)) if limits else None


def check_amounts(
    prompts: Sequence[tuple[list[int], SamplingParams]], fields: GenerationFields
) -> None:
    """Refuse a call whose beams, log-probabilities and returned token ids are together too many.

    Raises:
        InvalidRequest: the message names the field, what it asks for and what is left.
    """
    width = max(fields.n or 1, fields.best_of or 1)
    prompt_ids = prompt_entries = answer_tokens = answer_entries = context = 0
    for tokens, sampling in prompts:
        prompt_ids += len(tokens)
        answer_tokens += width * sampling.max_tokens
        context += width * (len(tokens) + sampling.max_tokens)
        if sampling.num_prompt_logprobs is not None:
            prompt_entries += len(tokens) * (sampling.num_prompt_logprobs + 1)
        if sampling.num_logprobs is not None:
            answer_entries += width * sampling.max_tokens * (sampling.num_logprobs + 1)
    scored = "logprobs" if fields.prompt_logprobs is None else "prompt_logprobs"
    PROMPT_LOGPROBS.check(scored, prompt_entries)
    ANSWER_LOGPROBS.check("logprobs", answer_entries)
    if fields.return_token_ids:
        PROMPT_IDS.check("return_token_ids", prompt_ids)
        ANSWER_IDS.check("return_token_ids", answer_tokens)
    if fields.use_beam_search:
        BEAM_WIDTH.check("best_of" if fields.best_of else "n", width)
        BEAM_TOKENS.check("max_tokens", answer_tokens)
        BEAM_CONTEXT.check("use_beam_search", context)


def check_sequences(num_prompts: int, fields: GenerationFields, config: ApiConfig) -> None:
    """Raise InvalidRequest for a call with more sequences than `max_sequences`."""
    width = max(fields.n or 1, fields.best_of or 1)
    if num_prompts * width > config.max_sequences:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={width} are more than {config.max_sequences} "
            "sequences in one call",
            param="prompt" if width == 1 else "n",
        )


def check_ids(name: str, tokens: Collection[int], model: ServedModel) -> None:
    """Raise InvalidRequest for ids outside the vocabulary; `name` is the field they came in."""
    size = model.spec.vocab_size
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < size:
            raise InvalidRequest(
                f"{name}: token id {token} is out of range, the vocabulary has {size} ids",
                param=name,
            )


def text_options(
    fields: GenerationFields,
    *,
    markers: Mapping[int, Marker] | None = None,
    max_calls: int | None = None,
) -> TextOptions:
    """Return the options for turning the tokens of a call into text."""
    return TextOptions(
        stops=tuple(fields.stops),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special=fields.skip_special_tokens is not False,
        markers=markers or {},
        max_calls=max_calls,
    )


def choice_seed(seed: int, which: int) -> int:
    """Return the seed of sequence `which` of a call: the call's seed plus its number, modulo 2**64.

    So choice 0 of a seeded call equals the same call with n=1, and choice i equals the call with
    seed+i.
    """
    return (seed + which) % SEED_SPACE


SERVICE_TIERS = {"priority": Priority.PREMIUM, "flex": Priority.BATCH}
"""OpenAI's names of the classes of service; all others are interactive."""


def request_priority(fields: GenerationFields) -> Priority:
    """Return the class of service a request asks for."""
    if isinstance(fields.priority, str):
        return Priority(fields.priority)
    if fields.priority is None:
        return SERVICE_TIERS.get(fields.service_tier or "", Priority.INTERACTIVE)
    level = fields.priority
    if level < 0:
        return Priority.PREMIUM
    return Priority.BATCH if level > 0 else Priority.INTERACTIVE


def _first(asked: Number | None, default: Number) -> Number:
    return default if asked is None else asked


def _check_limits(fields: GenerationFields, wanted: Wanted, config: ApiConfig) -> None:
    if (fields.n or 1) > config.max_choices:
        raise InvalidRequest(
            f"n: ask for at most {config.max_choices} choices per prompt",
            param="n",
        )
    _check_best_of(fields, config)
    _check_beam_search(fields)
    stops = fields.stops
    if len(stops) > config.max_stops:
        raise InvalidRequest(f"stop: send at most {config.max_stops} stop strings", param="stop")
    if any(not 1 <= len(stop) <= config.max_stop_chars for stop in stops):
        raise InvalidRequest(
            f"stop: a stop string has 1 to {config.max_stop_chars} characters", param="stop"
        )
    for name, number in (
        (wanted.logprobs_param, wanted.num_logprobs),
        ("prompt_logprobs", wanted.num_prompt_logprobs),
    ):
        if number is not None and number > config.max_logprobs:
            raise InvalidRequest(
                f"{name}: {number} is more than the limit of {config.max_logprobs}", param=name
            )


def _num_logprobs(fields: GenerationFields, wanted: Wanted) -> int | None:
    """Return the number of logprobs to ask the engine for: `best_of` needs those of the answers."""
    chosen_from = fields.best_of or 1
    return (
        0 if wanted.num_logprobs is None and chosen_from > (fields.n or 1) else wanted.num_logprobs
    )


def _bad_words(fields: GenerationFields, model: ServedModel, config: ApiConfig) -> list[list[int]]:
    """Return the tokens of each bad word, without and with a space before it."""
    words = fields.bad_words or []
    BAD_WORDS.check("bad_words", len(words))
    if any(not word.strip() for word in words):
        raise InvalidRequest("bad_words: none of the words may be blank", param="bad_words")
    if any(len(word) > config.max_stop_chars for word in words):
        raise InvalidRequest(
            f"bad_words: a word has at most {config.max_stop_chars} characters", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for spelled in (f"{space}{word.strip()}" for word in words for space in ("", " ")):
        tokens = tuple(model.tokenizer.encode(spelled, allow_special=False))
        WORD_TOKENS.check("bad_words", len(tokens))
        num_tokens += len(tokens)
        BAD_WORD_TOKENS.check("bad_words", num_tokens)
        found[tokens] = None
    return [list(tokens) for tokens in found]


def _check_best_of(fields: GenerationFields, config: ApiConfig) -> None:
    best_of = fields.best_of
    if best_of is None:
        return
    if best_of > config.max_choices:
        raise InvalidRequest(
            f"best_of: ask for at most {config.max_choices} choices per prompt",
            param="best_of",
        )
    if best_of < (fields.n or 1):
        raise InvalidRequest(f"best_of: {best_of} is less than n={fields.n}", param="best_of")
    if fields.stream and best_of > (fields.n or 1) and not fields.use_beam_search:
        raise InvalidRequest("best_of is not available with stream=true", param="best_of")


def _check_beam_search(fields: GenerationFields) -> None:
    """Refuse beam search together with fields that change probabilities: it needs the model's
    own.
    """
    if not fields.use_beam_search:
        if fields.length_penalty not in (None, 1.0):
            raise InvalidRequest(
                "length_penalty: it works only with use_beam_search=true; leave it out",
                param="length_penalty",
            )
        return
    for name in _NOT_WITH_BEAMS:
        if getattr(fields, name):
            raise InvalidRequest(
                f"{name}: not together with use_beam_search; leave one of them out",
                param=name,
            )
    if fields.repetition_penalty not in (None, 1.0):
        raise InvalidRequest(
            "repetition_penalty: not together with use_beam_search; leave one of them out",
            param="repetition_penalty",
        )


_NOT_WITH_BEAMS = (
    "logit_bias", "allowed_token_ids", "bad_words", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _logit_bias(fields: GenerationFields, model: ServedModel) -> dict[int, float]:
    bias: dict[int, float] = {}
    BIASED_IDS.check("logit_bias", len(fields.logit_bias or {}))
    for key, value in (fields.logit_bias or {}).items():
        if not key.isdecimal() or not key.isascii() or len(key) > 10:
            raise InvalidRequest(
                f"logit_bias: {shorten(key)} is not a token id", param="logit_bias"
            )
        bias[int(key)] = value
    check_ids("logit_bias", bias, model)
    return bias
