"""Steps with drafts give what steps of one token give: tokens, log-probabilities, settings."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

import pytest

from mooncake.base import SamplingParams, TokenLogprobs
from mooncake.engine.plan import StepPlan, StepResult
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.sampler import Sampler
from mooncake.model.running.runner import ModelRunner
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.tiny_models import (
    forward,
    kv_for,
    ours,
    random_tokens,
    slot,
    source_of,
    truth,
)

PAGES = {1: [0, 5, 2, 9, 11], 2: [3, 7, 8, 4, 12]}
NUM_TOKENS = 24
Token = tuple[int, TokenLogprobs | None]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "penalties": {
        "temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5,
        "frequency_penalty": 0.4, "num_logprobs": 2,
    },
    "masks": {
        "temperature": 0.7, "seed": 9, "min_tokens": 9,
        "stop_token_ids": frozenset(range(0, 211, 7)),
        "bad_words": [[3], [5, 9]], "logit_bias": {4: 3.0}, "num_logprobs": 1,
    },
}  # fmt: skip

Draft = Callable[[int, int], list[int]]
"""(sequence, output position) -> drafts of the tokens from that position on."""


@pytest.fixture(scope="module")
def model() -> KimiK2:
    return ours(source_of(truth("plain")))


def answers(model: KimiK2, sampling: dict[str, Any], draft: Draft) -> dict[int, list[Token]]:
    """Return the tokens of two sequences that run together."""
    runner = ModelRunner(model, kv_for(model.spec), Sampler(model.spec.vocab_size), num_threads=1)
    prompts = {key: random_tokens(20 + key, key) for key in PAGES}
    found: dict[int, list[Token]] = {key: [] for key in PAGES}
    starts = [
        sequence_of(key, SamplingParams(**sampling), prompts[key])
        for key in prompts
    ]  # fmt: skip
    slots = [slot(key, 0, prompts[key], PAGES[key]) for key in prompts]
    step = 0
    try:
        while slots:
            runner.submit(StepPlan(step_id=step, starts=starts, slots=slots, ended=[]))
            result = result_of(runner)
            for key, tokens in result.tokens.items():
                entries = result.logprobs.get(key) or [None] * len(tokens)
                found[key] += zip(tokens, entries, strict=True)
            starts, slots, step = [], [], step + 1
            for key, samples in found.items():
                if len(samples) < NUM_TOKENS:
                    start = len(prompts[key]) + len(samples) - 1
                    drafts = draft(key, len(samples))[: NUM_TOKENS - len(samples) - 1]
                    slots.append(slot(key, start, [samples[-1][0]], PAGES[key], drafts=drafts))
    finally:
        runner.close()
    return found


def result_of(runner: ModelRunner) -> StepResult:
    while True:
        assert select.select([runner.fileno()], [], [], 60)[0], "the runner is silent"
        for event in runner.poll():
            assert isinstance(event, StepResult)
            assert event.error is None, event.error
            return event


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_do_not_depend_on_drafts(model: KimiK2, name: str) -> None:
    alone = answers(model, SAMPLINGS[name], lambda key, at: [])
    right = {key: [token for token, _ in samples] for key, samples in alone.items()}
    drafts: dict[str, Draft] = {
        "right": lambda key, at: right[key][at : at + 6],
        "wrong": lambda key, at: [1 + token % 200 for token in right[key][at : at + 3]],
        "half": lambda key, at: [*right[key][at : at + 1 + at % 3], 17, 18],
        "of one": lambda key, at: right[key][at : at + 2] if key == 1 else [],
    }
    for kind, draft in drafts.items():
        found = answers(model, SAMPLINGS[name], draft)
        for key, samples in found.items():
            assert [token for token, _ in samples] == right[key], kind
            for (_, entry), (_, before) in zip(samples, alone[key], strict=True):
                assert (entry is None) == (before is None)
                if entry is not None and before is not None:
                    assert entry.rank == before.rank
                    assert entry.logprob == pytest.approx(before.logprob, abs=1e-4)


ALLOWED = [7, 20, 33, 150]
SETTLED = 21.1
"""What chi squared of three degrees of freedom exceeds once in 10,000 times."""


def chi_squared(counts: dict[int, int], shares: dict[int, float]) -> float:
    total = sum(counts.values())
    return sum((counts.get(t, 0) - total * p) ** 2 / (total * p) for t, p in shares.items())


def shares_after(model: KimiK2, tokens: list[int], temperature: float) -> dict[int, float]:
    """Return the chances of the allowed tokens behind `tokens`."""
    logits = forward(model, kv_for(model.spec), [slot(1, 0, tokens, range(4))])[1][-1]
    chances = (logits[ALLOWED] / temperature).softmax(-1).tolist()
    return dict(zip(ALLOWED, chances, strict=True))


def test_what_is_sampled_behind_a_draft_has_the_models_distribution(model: KimiK2) -> None:
    """Sequences alike but for their seeds, each with the same draft: the first tokens are sampled
    by their chances, and the second tokens by theirs where the draft was right.
    """
    prompt, temperature, num_each, num_steps = random_tokens(12, 4), 7.0, 60, 12
    first = shares_after(model, prompt, temperature)
    draft = max(ALLOWED, key=first.__getitem__)
    runner = ModelRunner(model, kv_for(model.spec), Sampler(model.spec.vocab_size), num_threads=1)
    counts: tuple[dict[int, int], dict[int, int]] = ({}, {})
    try:
        for step in range(num_steps):
            ids = range(step * num_each, (step + 1) * num_each)
            starts = [
                sequence_of(
                    key,
                    SamplingParams(temperature=temperature, seed=key, allowed_token_ids=ALLOWED),
                    prompt,
                )
                for key in ids
            ]
            slots = [slot(key, 0, prompt, [key % num_each], drafts=[draft]) for key in ids]
            ended = list(range((step - 1) * num_each, step * num_each)) if step else []
            runner.submit(StepPlan(step_id=step, starts=starts, slots=slots, ended=ended))
            for tokens in result_of(runner).tokens.values():
                assert (len(tokens) == 2) == (tokens[0] == draft)
                for place, token in enumerate(tokens):
                    counts[place][token] = counts[place].get(token, 0) + 1
    finally:
        runner.close()
    assert min(first.values()) > 0.02
    assert counts[1]
    second = shares_after(model, [*prompt, draft], temperature)
    assert chi_squared(counts[0], first) < SETTLED
    assert chi_squared(counts[1], second) < SETTLED
    assert chi_squared(counts[0], second) > SETTLED, "the two could not be told apart"
