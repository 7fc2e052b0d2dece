"""Bodies become sampling settings: defaults, precedence, ranges, lengths, seeds."""

from __future__ import annotations

import msgspec
import pytest
from pydantic import ValidationError

from mooncake.api.config import ApiConfig
from mooncake.api.generation.sampling import (
    Wanted,
    choice_seed,
    fit_output,
    fit_prompt,
    request_priority,
    sampling_params,
)
from mooncake.api.model import GenerationDefaults
from mooncake.api.schema.completion import CompletionRequest
from mooncake.base import ContextTooLong, InvalidRequest, Priority, SamplingParams
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
    assert made.stop_token_ids == list(MODEL.eos_token_ids)


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
    assert params(stop_token_ids=[7, *eos, 7]).stop_token_ids == [7, *eos]
    ignoring = params(stop_token_ids=[7], ignore_eos=True)
    assert (ignoring.stop_token_ids, ignoring.ignore_eos) == ([7], True)


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
