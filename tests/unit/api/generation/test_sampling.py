"""Bodies become sampling settings: defaults, precedence, ranges, lengths, seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from mooncake.api.bounds import ALLOWED_IDS, BIASED_IDS, STOP_IDS
from mooncake.api.config import ApiConfig
from mooncake.api.generation.sampling import (
    Wanted,
    check_amounts,
    choice_seed,
    fit_output,
    fit_prompt,
    most_tokens,
    request_priority,
    sampling_params,
    with_grammar,
)
from mooncake.api.model import GenerationDefaults
from mooncake.api.schema.completion import CompletionRequest
from mooncake.base import ContextTooLong, Grammar, InvalidRequest, Priority, SamplingParams
from mooncake.base.large_settings import MAX_SETTINGS_BYTES
from tests.support.api.server import tiny_model

MODEL = tiny_model(max_model_len=100)
WANTED = Wanted(
    max_tokens=None,
    max_tokens_param="max_tokens",
    num_logprobs=None,
    logprobs_param="logprobs",
    num_prompt_logprobs=None,
)


def wanted(**changes: object) -> Wanted:
    return msgspec.structs.replace(WANTED, **changes)


def body(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", **fields})


def params(**fields: object) -> SamplingParams:
    return sampling_params(body(**fields), WANTED, MODEL, ApiConfig())


def test_defaults_are_those_of_the_api() -> None:
    made = params()
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (1.0, 1.0, 0, 0.0)
    assert made.stop_token_ids == frozenset(MODEL.eos_token_ids)


def test_author_defaults_come_before_ours_and_requests_before_both() -> None:
    model = tiny_model(defaults=GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20))
    made = sampling_params(body(top_p=0.5, top_k=-1), WANTED, model, ApiConfig())
    assert (made.temperature, made.top_p, made.top_k) == (0.6, 0.5, 0)
    made = sampling_params(body(temperature=0), WANTED, model, ApiConfig())
    assert made.greedy


@pytest.mark.parametrize(("asked", "made"), [(5e-324, 0.0), (1e-6, 0.0), (1e-3, 1e-3)])
def test_a_temperature_that_would_overflow_is_none(asked: float, made: float) -> None:
    assert params(temperature=asked).temperature == made


def test_a_repetition_penalty_that_would_overflow_is_refused() -> None:
    with pytest.raises(ValidationError):
        body(repetition_penalty=5e-324)


def test_end_of_text_stops_unless_ignored() -> None:
    eos = list(MODEL.eos_token_ids)
    assert params(stop_token_ids=[7, *eos, 7]).stop_token_ids == frozenset({7, *eos})
    ignoring = params(stop_token_ids=[7], ignore_eos=True)
    assert (ignoring.stop_token_ids, ignoring.ignore_eos) == (frozenset({7}), True)


def test_logit_bias_keys_become_ids() -> None:
    assert params(logit_bias={"5": -100, "7": 1.5}).logit_bias == {5: -100, 7: 1.5}


@pytest.mark.parametrize("key", ["-1", "x", "", "99999", "1.0", "٣", "9" * 400])
def test_logit_bias_keys_that_are_no_ids_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(logit_bias={key: 1})
    assert caught.value.param == "logit_bias"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": 2}, [3, 4]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
        ({"truncate_prompt_tokens": 9}, [1, 2, 3, 4]),
        ({"truncate_prompt_tokens": -1}, [1, 2, 3, 4]),
    ],
)
def test_prompts_are_cut_on_request(fields: dict[str, object], kept: list[int]) -> None:
    assert fit_prompt([1, 2, 3, 4], body(**fields), SamplingParams(), MODEL) == kept


def test_cutting_to_what_fits_leaves_room_for_the_answer() -> None:
    sampling = SamplingParams(max_tokens=30)
    cut = fit_prompt(list(range(200)), body(truncate_prompt_tokens=-1), sampling, MODEL)
    assert cut == list(range(130, 200))
    fit_output(len(cut), sampling, wanted(max_tokens=30), MODEL)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("asked", [100, 101, 10**9])
def test_cutting_to_what_fits_is_not_blamed_for_an_answer_that_never_fits(
    side: str, asked: int
) -> None:
    sampling = SamplingParams(max_tokens=asked)
    fields = body(truncate_prompt_tokens=-1, truncation_side=side)
    cut = fit_prompt([1, 2, 3], fields, sampling, MODEL)
    with pytest.raises(ContextTooLong, match=f"{asked} in the answer"):
        fit_output(len(cut), sampling, wanted(max_tokens=asked), MODEL)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        fit_prompt([], body(), SamplingParams(), MODEL)
    with pytest.raises(InvalidRequest, match="empty"):
        fit_prompt([1], body(truncate_prompt_tokens=0), SamplingParams(), MODEL)


def test_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    """The lookup in the embedding would fail in the engine, for all requests of the step."""
    size = MODEL.spec.vocab_size
    with pytest.raises(InvalidRequest, match=f"token id {size} is out of range"):
        fit_prompt([1, size], body(), SamplingParams(), MODEL)


@pytest.mark.parametrize(
    ("default", "num_prompt_tokens", "expected"),
    [(None, 40, 60), (None, 99, 1), (16, 40, 16), (16, 95, 5)],
)
def test_default_length_never_exceeds_the_context(
    default: int | None, num_prompt_tokens: int, expected: int
) -> None:
    asked = wanted(default_max_tokens=default)
    assert fit_output(num_prompt_tokens, SamplingParams(), asked, MODEL).max_tokens == expected


@pytest.mark.parametrize(("num_prompt_tokens", "asked"), [(100, None), (101, 1), (60, 41)])
def test_too_long_says_the_phrase_that_clients_look_for(
    num_prompt_tokens: int, asked: int | None
) -> None:
    sampling = SamplingParams(max_tokens=asked or 0)
    with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens"):
        fit_output(num_prompt_tokens, sampling, wanted(max_tokens=asked), MODEL)


def test_exact_fit_is_accepted() -> None:
    sampling = SamplingParams(max_tokens=40)
    assert fit_output(60, sampling, wanted(max_tokens=40), MODEL) is sampling


def test_min_tokens_must_fit_max_tokens() -> None:
    sampling = SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(InvalidRequest) as caught:
        fit_output(1, sampling, wanted(max_tokens=4), MODEL)
    assert caught.value.param == "min_tokens"


def test_choice_seeds_wrap_around() -> None:
    assert choice_seed(7, 0) == 7
    assert choice_seed(7, 2) == choice_seed(9, 0)
    assert choice_seed(-1, 0) == 2**64 - 1
    assert choice_seed(-1, 1) == 0


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, Priority.INTERACTIVE),
        (0, Priority.INTERACTIVE),
        (-3, Priority.PREMIUM),
        (4, Priority.BATCH),
        ("batch", Priority.BATCH),
    ],
)
def test_priorities(asked: object, expected: Priority) -> None:
    assert request_priority(body(priority=asked)) is expected


@pytest.mark.parametrize(
    ("tier", "priority", "expected"),
    [
        ("flex", None, Priority.BATCH),
        ("priority", None, Priority.PREMIUM),
        ("auto", None, Priority.INTERACTIVE),
        ("default", None, Priority.INTERACTIVE),
        ("flex", 0, Priority.INTERACTIVE),
        ("priority", "batch", Priority.BATCH),
    ],
)
def test_a_service_tier_is_a_class_unless_a_priority_says_otherwise(
    tier: str, priority: object, expected: Priority
) -> None:
    assert request_priority(body(service_tier=tier, priority=priority)) is expected


ONE_OVER: dict[str, tuple[dict[str, Any], str]] = {
    "bad_words, in all": ({"bad_words": ["ab cd ef gh" * 2] * 256}, "bad_words"),
    "bad_words, one": ({"bad_words": ["ab cd" * 40]}, "bad_words"),
    "bad_words, their number": ({"bad_words": ["a"] * 257}, "bad_words"),
    "stop_token_ids": ({"stop_token_ids": list(range(STOP_IDS.limit + 1))}, "stop_token_ids"),
    "allowed_token_ids": (
        {"allowed_token_ids": [1] * (ALLOWED_IDS.limit + 1)}, "allowed_token_ids",
    ),
    "logit_bias": (
        {"logit_bias": {str(at): 1 for at in range(BIASED_IDS.limit + 1)}}, "logit_bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_OVER)
def test_lists_above_their_bound_are_refused_by_name(case: str) -> None:
    fields, param = ONE_OVER[case]
    with pytest.raises(InvalidRequest, match=f"{param}: .* limit of") as caught:
        params(**fields)
    assert caught.value.param == param


def test_settings_that_are_too_large_together_name_the_largest() -> None:
    lists = params(allowed_token_ids=[1] * ALLOWED_IDS.limit)
    half = Grammar(text="x" * (MAX_SETTINGS_BYTES // 4), end_ids=[1])
    assert with_grammar(lists, half, "tools").grammar is half
    with pytest.raises(InvalidRequest) as caught:
        with_grammar(lists, Grammar(text="x" * (MAX_SETTINGS_BYTES // 2), end_ids=[]), "tools")
    assert caught.value.param == "allowed_token_ids"
    with pytest.raises(InvalidRequest, match=r"tools: .* make this one smaller") as caught:
        with_grammar(lists, Grammar(text="x" * MAX_SETTINGS_BYTES, end_ids=[]), "tools")
    assert caught.value.param == "tools"


def amounts(num_prompt: int, num_prompts: int = 1, **settings: Any) -> None:
    fields = {name: settings.pop(name) for name in list(settings) if name not in SAMPLING}
    prompt = [1] * num_prompt
    check_amounts([(prompt, SamplingParams(**settings))] * num_prompts, body(**fields))


SAMPLING = SamplingParams.__struct_fields__
BEAMS = {"use_beam_search": True}
AMOUNTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # what is accepted, what is one too many, the field that is named
    "prompt_logprobs": (
        {"num_prompt": 1 << 17, "num_prompt_logprobs": 1, "prompt_logprobs": 1},
        {"num_prompt": (1 << 17) + 1, "num_prompt_logprobs": 1, "prompt_logprobs": 1},
        "prompt_logprobs",
    ),
    "of several prompts, echoed": (
        {"num_prompt": 1 << 8, "num_prompts": 1 << 10, "num_prompt_logprobs": 0},
        {"num_prompt": 1 << 8, "num_prompts": (1 << 10) + 1, "num_prompt_logprobs": 0},
        "logprobs",
    ),
    "logprobs": (
        {"num_prompt": 1, "n": 128, "max_tokens": 1 << 10, "num_logprobs": 3},
        {"num_prompt": 1, "n": 128, "max_tokens": (1 << 10) + 1, "num_logprobs": 3},
        "logprobs",
    ),
    "return_token_ids": (
        {"num_prompt": 1 << 8, "num_prompts": 1 << 10, "return_token_ids": True},
        {"num_prompt": 1 << 8, "num_prompts": (1 << 10) + 1, "return_token_ids": True},
        "return_token_ids",
    ),
    "return_token_ids of answers": (
        {"num_prompt": 1, "n": 128, "max_tokens": 1 << 12, "return_token_ids": True},
        {"num_prompt": 1, "n": 128, "max_tokens": (1 << 12) + 1, "return_token_ids": True},
        "return_token_ids",
    ),
    "beams": (
        {"num_prompt": 1, "best_of": 32, "max_tokens": 2048, **BEAMS},
        {"num_prompt": 1, "best_of": 33, "max_tokens": 1, **BEAMS},
        "best_of",
    ),
    "their tokens": (
        {"num_prompt": 1, "n": 8, "max_tokens": 8192, **BEAMS},
        {"num_prompt": 1, "n": 8, "max_tokens": 8193, **BEAMS},
        "max_tokens",
    ),
    "their contexts": (
        {"num_prompt": (1 << 15) - 8, "n": 32, "max_tokens": 8, **BEAMS},
        {"num_prompt": (1 << 15) - 7, "n": 32, "max_tokens": 8, **BEAMS},
        "use_beam_search",
    ),
}


@pytest.mark.parametrize("case", AMOUNTS)
def test_what_all_sequences_ask_for_together_is_bounded(case: str) -> None:
    accepted, refused, param = AMOUNTS[case]
    amounts(**accepted)
    with pytest.raises(InvalidRequest, match=f"{param}: .* limit of") as caught:
        amounts(**refused)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "num_logprobs", "expected"),
    [
        ({}, None, None),
        ({}, 20, (1 << 19) // 21),
        ({"n": 128}, 0, 1 << 12),
        ({"n": 128, "return_token_ids": True}, None, 1 << 12),
        ({"n": 4, **BEAMS}, None, 1 << 14),
        ({"n": 4, "best_of": 32, **BEAMS}, 20, (1 << 19) // 32 // 21),
    ],
)
def test_an_answer_of_no_given_length_is_as_long_as_the_bounds_leave(
    fields: dict[str, Any], num_logprobs: int | None, expected: int | None
) -> None:
    """So no request is refused for a length that it did not ask for."""
    sampling = SamplingParams(num_logprobs=num_logprobs)
    most = most_tokens(body(**fields), sampling, 100)
    assert most == expected
    for left in (most or 50, 7):
        model = dataclasses.replace(MODEL, max_model_len=100 + left)
        fitted = fit_output(100, sampling, wanted(), model, most)
        assert fitted.max_tokens == left
        check_amounts([([1] * 100, fitted)], body(**fields))
