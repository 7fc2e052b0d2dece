"""However a batch of sequences is cut into steps and pages, each ends with the same logits."""

from __future__ import annotations

import functools
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.model.kimi_k2 import KimiK2
from tests.support.examples import examples
from tests.support.model.tiny_models import (
    forward,
    kv_for,
    ours,
    random_tokens,
    slot,
    source_of,
    truth,
)

NUM_PAGES, BLOCK = 40, 4


@functools.cache
def model() -> KimiK2:
    return ours(source_of(truth("grouped routing")))


@functools.cache
def expected(sequence: int, length: int) -> torch.Tensor:
    kv = kv_for(model().spec, NUM_PAGES, BLOCK)
    prompt = random_tokens(length, seed=sequence)
    return forward(model(), kv, [slot(sequence, 0, prompt, range(NUM_PAGES))])[sequence]


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_any_schedule_gives_the_same_logits(lengths: list[int], seed: int) -> None:
    choose = random.Random(seed)
    pages = choose.sample(range(NUM_PAGES), NUM_PAGES)
    tables = [pages[n * 10 : n * 10 + 10] for n in range(len(lengths))]
    prompts = [random_tokens(length, seed=n) for n, length in enumerate(lengths)]
    kv = kv_for(model().spec, NUM_PAGES, BLOCK)
    kv.pages.fill_(float("nan"))
    done = [0] * len(prompts)
    last: dict[int, torch.Tensor] = {}
    while len(last) < len(prompts):
        slots = []
        for n, prompt in enumerate(prompts):
            left = len(prompt) - done[n]
            count = min(left, choose.choice([0, 1, 1, 5, left]))
            if count:
                part = prompt[done[n] : done[n] + count]
                slots.append(slot(n, done[n], part, tables[n], sample=count == left))
                done[n] += count
        if slots:
            most = choose.choice([1, 3, 40])
            last |= forward(model(), kv, slots, rule=lambda new, context, most=most: new <= most)
    for n, length in enumerate(lengths):
        torch.testing.assert_close(last[n], expected(n, length), atol=1e-4, rtol=0)
