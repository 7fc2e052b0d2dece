"""Served steps on the GPU at hand: the code that a GPU's worker runs, with the CPU's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.base import SamplingParams
from tests.device.served import Joins, prompt, served
from tests.support.cuda.install import Emulated, one_gpu
from tests.support.cuda.streams import ORDERS

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
