"""Served steps on the GPU at hand: the code that a GPU's worker runs, with the CPU's tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake.base import SamplingParams
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.device.served import Joins, prompt, served
from tests.support.cuda.install import Emulated, emulated, one_gpu
from tests.support.cuda.streams import ORDERS, RANDOM

SEEDS = range(int(os.environ.get("MOONCAKE_TEST_SEEDS", "2")))
SHORT: Joins = {
    0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=3))],
    1: [(prompt(37, 1), SamplingParams(temperature=0.8, seed=3, max_tokens=2))],
}
"""A prompt in two chunks, and a sequence that decodes beside them."""

JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=6, num_logprobs=1)),
        (prompt(37, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=7)),
    ],
    2: [(prompt(14, 2), SamplingParams(top_k=5, seed=4, frequency_penalty=0.4, max_tokens=6))],
}


@pytest.fixture(scope="module")
def wanted(nano: Path) -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    """The CPU's tokens and log-probabilities."""
    with served(nano, "cpu") as engine:
        return engine.run(JOINS), engine.logprobs


@pytest.mark.any_gpu
@pytest.mark.parametrize("order", ORDERS)
def test_tokens_and_logprobs_have_the_bits_of_the_cpu(
    nano: Path, wanted: tuple[dict[int, list[int]], dict[int, list[float]]], order: str
) -> None:
    with one_gpu(order=order, seed=1) as gpu:
        with served(nano, "cuda") as engine:
            assert engine.pages.kv.pages.is_cuda
            assert engine.run(JOINS) == wanted[0]
            within = 0.0 if isinstance(gpu, Emulated) else 1e-4
            near = {row: pytest.approx(each, abs=within, rel=0) for row, each in wanted[1].items()}
            assert engine.logprobs == near
        gpu.finish()
    if isinstance(gpu, Emulated):
        assert "copy in" in gpu.machine.launched


@pytest.mark.timeout(36000)
def test_no_random_order_has_other_tokens_or_a_race(tmp_path: Path) -> None:
    """One process for all seeds, and two layers: a dense one, and one with experts."""
    path = init_checkpoint(
        "k2-nano", 0, tmp_path / "nano", dtype="float32", overrides={"num_hidden_layers": 2}
    )
    with served(path, "cpu") as engine:
        wanted = engine.run(SHORT)
    for seed in SEEDS:
        with emulated(order=RANDOM, seed=seed) as gpus:
            with served(path, "cuda") as engine:
                assert engine.run(SHORT) == wanted, f"seed {seed}"
            gpus.finish()
