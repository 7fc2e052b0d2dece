"""The warm-up counts what it builds, ends in time, and asks nobody else."""

from __future__ import annotations

import math

import pytest
import torch
from mooncake_kernels.onednn import linear as onednn

from mooncake.model.layers.linear import Linear, SummedProduct
from mooncake.model.parallel.group import Solo
from mooncake.model.warm_up import Limits, warm_up
from tests.support.model.specs import small_spec
from tests.support.model.tiny_models import ours, random_source

LIMITS = Limits(most_rows=128, most_samples=8, most_context=200)


def test_every_size_is_counted_and_none_begun_after_the_time_is_over() -> None:
    model = ours(random_source(small_spec()), torch.bfloat16)
    told: list[tuple[int, int]] = []
    built, known = warm_up(model, LIMITS, lambda *counts: told.append(counts), math.inf)
    assert built == known == 2 * len(onednn.rungs(128)) + len(onednn.rungs(8)) + 4
    assert told == [(done, known) for done in range(1, known + 1)]
    assert warm_up(model, LIMITS, lambda *_: None, -1.0) == (0, known)


def test_what_onednn_does_not_multiply_needs_none() -> None:
    model = ours(random_source(small_spec()), torch.float32)
    assert warm_up(model, LIMITS, lambda *_: None) == (0, 0)


class Alone(Solo):
    """One of several ranks, of whom no other would answer."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("other ranks are asked")


@pytest.mark.parametrize("adding", [False, True])
def test_a_rank_prepares_its_part_without_the_others(adding: bool) -> None:
    part = Linear(torch.zeros(16, 8, dtype=torch.bfloat16))
    SummedProduct(part, Alone()).prepare(4, adding=adding)
