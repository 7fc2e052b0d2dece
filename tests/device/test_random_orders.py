"""Served steps in random orders of what is queued, those that CUDA allows: no order may change a
token, or have two tasks race, on any rank. `make soak-device` runs many orders of each shape.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from mooncake.base import SamplingParams, Shape
from mooncake.engine.config import EAGLE3, MTP, SpeculativeConfig
from mooncake.engine.expert_placement import EplbConfig
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.device.processes import Processes
from tests.device.served import CONFIG, Joins, prompt, served
from tests.device.test_drafts import MLA, every_other_step, methods_of
from tests.device.test_ranks import CAPTURED, EAGER
from tests.device.test_shared_experts import engine_of_some, group_name
from tests.support.cuda import processes
from tests.support.cuda.install import emulated
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.processes import followers_emulated
from tests.support.cuda.streams import RANDOM

pytestmark = pytest.mark.usefixtures("forked")
ORDERS = int(os.environ.get("MOONCAKE_TEST_ORDERS", "2"))
FIRST = int(os.environ.get("MOONCAKE_TEST_FIRST", "0"))
"""The seed of the first engine. One engine is opened for `SERVINGS` orders."""
SERVINGS = 10
SMALL = dataclasses.replace(CONFIG, max_num_seqs=2, max_batched_tokens=40, num_blocks=12)
JOINS: Joins = {
    0: [(prompt(5, 0), SamplingParams(temperature=0, max_tokens=4))],
    1: [(prompt(37, 1), SamplingParams(temperature=0.8, seed=3, max_tokens=3))],
}
"""A prompt in two chunks, and a sequence that decodes beside them."""
SHAPES = [
    ("tp1", EAGER, None), ("tp2", CAPTURED, MTP), ("tp1", CAPTURED, None),
    ("tp1", CAPTURED, MTP), ("tp1", CAPTURED, EAGLE3), ("tp2", EAGER, None),
    ("tp2", CAPTURED, None), ("tp2", CAPTURED, MLA), ("tp2-dcp2", CAPTURED, None),
    ("tp2-ep2", CAPTURED, None), ("tp1-pp2", EAGER, None), ("tp1-pp2", CAPTURED, None),
    ("tp1-pp2", CAPTURED, MTP), ("tp1-pp2", CAPTURED, EAGLE3),
]  # fmt: skip
"""Of one engine. The first two are enough where other tests run the others in one order each."""
SHARED = [
    ("tp1-dp2-ep2", EAGER, None), ("tp1-dp2-ep2", CAPTURED, None), ("tp1-dp2-ep2", CAPTURED, MTP),
    ("tp1-dp2-ep2", CAPTURED, EAGLE3), ("tp2-dp2-ep4", CAPTURED, None),
    ("tp1-dp2-experts1", EAGER, None),
]  # fmt: skip
"""Of engines that share experts."""
Methods = dict[str, SpeculativeConfig]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense layer, one with experts, and an MTP layer."""
    path = tmp_path_factory.mktemp("small") / "mtp"
    layers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    return init_checkpoint("k2-nano", 0, path, dtype="float32", overrides=layers)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path) -> list[list[int]]:
    """The tokens of one rank on the CPU."""
    with served(checkpoint, "cpu") as engine:
        return list(engine.run(JOINS).values())


@pytest.fixture(scope="module")
def methods(checkpoint: Path, wanted: list[list[int]]) -> Methods:
    return methods_of(checkpoint, JOINS, dict(enumerate(wanted)))


def engines() -> Iterator[tuple[int, int]]:
    """Yield the seed of each engine, and how many times it serves."""
    for number in range(0, ORDERS, SERVINGS):
        yield FIRST + number // SERVINGS, min(SERVINGS, ORDERS - number)


@pytest.mark.timeout(36000)
@pytest.mark.parametrize(
    ("words", "backend", "method"), SHAPES if ORDERS > SERVINGS else SHAPES[:2]
)
def test_no_random_order_has_other_tokens_or_a_race(
    checkpoint: Path,
    wanted: list[list[int]],
    methods: Methods,
    words: str,
    backend: str,
    method: str | None,
) -> None:
    shape = Shape.parse(words)
    options = {"shape": shape, "drafts": methods.get(method or ""), "config": SMALL}
    for seed, num_servings in engines():
        machine = {"num_devices": shape.num_ranks, "order": RANDOM, "seed": seed}
        with (
            every_other_step(),
            emulated(**machine) as gpus,
            followers_emulated(as_references=True, **machine),
            reference_ops(),
        ):
            with served(checkpoint, "cuda", backend, **options) as engine:
                for serving in range(num_servings):
                    found = engine.run(JOINS, first=2 * serving)
                    assert list(found.values()) == wanted, f"seed {seed}, serving {serving}"
            gpus.finish()


@pytest.mark.timeout(36000)
@pytest.mark.parametrize(("words", "backend", "method"), SHARED if ORDERS > SERVINGS else [])
def test_no_random_order_of_engines_that_share_experts_has_other_tokens_or_a_race(
    checkpoint: Path,
    wanted: list[list[int]],
    methods: Methods,
    words: str,
    backend: str,
    method: str | None,
) -> None:
    """Experts move meanwhile, unless they are apart. Each engine serves one of the sequences."""
    shape = Shape.parse(words)
    eplb = None if shape.experts else EplbConfig(window_size=2, step_interval=4)
    options = {"drafts": methods.get(method or ""), "config": SMALL, "eplb": eplb}
    parts: list[Joins] = [{0: part} for part in JOINS.values()]
    parts += [{}] * (shape.num_sharers - len(parts))
    for seed, num_servings in engines():
        name = group_name()
        arguments = [
            (
                number, name, checkpoint, words, backend,
                {"num_devices": shape.tp, "order": RANDOM, "seed": seed * len(parts) + number},
                dict(options), *[part] * num_servings,
            )
            for number, part in enumerate(parts)
        ]  # fmt: skip
        sharers = Processes(engine_of_some, arguments)
        for serving in range(num_servings):
            if serving:
                sharers.go_on()
            made = sharers.found()
            assert not any(isinstance(each, str) for each in made), (seed, serving, made)
            found = [tokens for answers, *_ in made for tokens in answers.values()]
            assert found == wanted, f"seed {seed}, serving {serving}"
        sharers.end()


def racing(settings: str) -> Iterator[str]:
    """As a follower, write from two streams of which neither waits for the other."""
    os.environ[processes.SETTINGS] = settings
    processes.begin()
    written = torch.zeros(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        written.add_(1)
    torch.cuda.synchronize()
    yield "raced"


def test_what_races_on_a_follower_is_told() -> None:
    with ExitStack() as stack:
        stack.enter_context(followers_emulated())
        follower = Processes(racing, [(os.environ[processes.SETTINGS],)])
        assert follower.found() == ["raced"]
        follower.go_on()
        follower.join()
        with pytest.raises(AssertionError, match="a follower: add_ on stream"):
            stack.close()
