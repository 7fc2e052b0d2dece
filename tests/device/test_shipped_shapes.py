"""Engines of the shapes that `configs/serve` has for 16 H800 and more, on emulated GPUs: Kimi-K2 of
four layers and small widths, with the tokens of one rank on the CPU.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import SamplingParams, Shape
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.device.processes import Processes
from tests.device.served import CONFIG, Joins, prompt, served
from tests.device.test_ranks import CAPTURED
from tests.device.test_shared_experts import engine_of_two, group_name
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import RANDOM

pytestmark = [pytest.mark.usefixtures("forked"), pytest.mark.slow]
NUM_PROMPTS, NUM_TOKENS = 32, 32
LARGE = dataclasses.replace(
    CONFIG,
    num_blocks=160,
    max_num_seqs=NUM_PROMPTS,
    max_batched_tokens=256,
    max_waiting=NUM_PROMPTS,
)
SMALL_K2 = {
    "num_hidden_layers": 4, "num_attention_heads": 8, "n_routed_experts": 16,
    "intermediate_size": 256, "moe_intermediate_size": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def small_k2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("k2") / "small"
    return init_checkpoint("k2-nano", 0, path, dtype="float32", overrides=SMALL_K2)


def joins(numbers: range) -> Joins:
    """Prompts of these numbers; every other answer is greedy."""
    return {
        0: [
            (
                prompt(3 + number % 13, number),
                SamplingParams(
                    temperature=0.7 * (number % 2), seed=number, max_tokens=NUM_TOKENS,
                    ignore_eos=True,
                ),
            )
            for number in numbers
        ]
    }  # fmt: skip


@pytest.fixture(scope="module")
def wanted(small_k2: Path) -> list[list[int]]:
    with served(small_k2, "cpu", config=LARGE) as engine:
        return list(engine.run(joins(range(NUM_PROMPTS))).values())


@pytest.mark.parametrize(
    "words",
    [
        "tp8-pp2",  # k2-h800-pp, and prefill of k2-h800-pd and k2-h800-16-nodes
        "tp8-pp2-dcp8",  # decode of both, and k2-h200-pp
    ],
)
def test_two_stages_of_eight_ranks(small_k2: Path, wanted: list[list[int]], words: str) -> None:
    shape = Shape.parse(words)
    machine: dict[str, Any] = {"num_devices": shape.num_ranks, "order": RANDOM, "seed": 11}
    with (
        emulated(**machine) as gpus,
        followers_emulated(as_references=True, **machine),
        reference_ops(),
    ):
        with served(small_k2, "cuda", CAPTURED, shape=shape, config=LARGE) as engine:
            assert list(engine.run(joins(range(NUM_PROMPTS))).values()) == wanted
            engine.runner.check_integrity()
        gpus.finish()


def test_two_engines_of_eight_ranks_share_experts(small_k2: Path, wanted: list[list[int]]) -> None:
    """The shape of k2-h800-ep."""
    words, name, half = "tp8-dcp8-dp2-ep16", group_name(), NUM_PROMPTS // 2
    machine = {"num_devices": 8, "order": RANDOM, "seed": 11}
    engines = Processes(
        engine_of_two,
        [
            (
                number, name, small_k2, words, CAPTURED, machine, {"config": LARGE},
                joins(range(number * half, (number + 1) * half)),
            )
            for number in range(2)
        ],
    )  # fmt: skip
    found = engines.found()
    assert not any(isinstance(each, str) for each in found), found
    assert [tokens for made, *_ in found for tokens in made.values()] == wanted
    engines.go_on()
    engines.join()
    assert [each.exitcode for each in engines.each] == [0, 0]
