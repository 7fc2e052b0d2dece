"""Saves layer by layer, against copies of whole blocks after the step."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch

from mooncake.base import BlockKey
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.integrations.vllm.mover import Mover, Staging
from mooncake.integrations.vllm.pages import Pages
from mooncake.integrations.vllm.plan import Save
from mooncake.integrations.vllm.saves import StepSaves
from tests.support.integrations.pool_in_memory import Pool, chain
from tests.support.waiting import LONG_S

LAYERS = [f"layer {number}" for number in range(6)]
NUM_BLOCKS, WIDTH = 12, 5
RANK = RankKv(b"r" * 16, len(LAYERS) * WIDTH * 4)
PACKINGS = {
    "several blocks of vLLM in one of the pool": Packing(3 * RANK.block_bytes + 8, 3),
    "one in one": Packing(RANK.block_bytes, 1),
    "a part of one in each": Packing(WIDTH * 4, 1),
    "parts that cut layers": Packing(28, 1),
}


class Worker:
    """One rank of an engine that computes a step."""

    def __init__(self, packing: Packing) -> None:
        self.computed = torch.randn(len(LAYERS), NUM_BLOCKS, WIDTH)
        self.kv = {name: torch.zeros(NUM_BLOCKS, WIDTH) for name in LAYERS}
        self.kv["shares the first"] = self.kv[LAYERS[0]]
        self.pages = Pages(self.kv, NUM_BLOCKS)
        self.pool = Pool(packing.pool_block_bytes)
        staging = Staging(packing, RANK, 16 * packing.num_parts(RANK) * packing.pool_block_bytes)
        self.mover = Mover(self.pool, staging, "", 5.0)  # type: ignore[arg-type]
        self.staged = self.pages.staged(staging.memory, staging.slot_bytes, packing.blocks)
        count = 2 * packing.blocks
        self.saves = [
            Save(chain([1, 2]), list(range(count))),
            Save(chain([7]), [11, 9, 10][: packing.blocks]),
        ]
        self.step = StepSaves(self.mover, self.staged, self.saves)

    def compute(self, name: str) -> None:
        self.kv[name].copy_(self.computed[LAYERS.index(name)])

    def copy(self, name: str) -> None:
        number = self.pages.number(name)
        assert number is not None
        self.step.copy(number)

    def settle(self, num_blocks: int | None = None) -> None:
        """Wait until the pool has so many blocks; else until everything was moved."""
        deadline = time.monotonic() + LONG_S
        while not self.mover.is_idle if num_blocks is None else len(self.pool.blocks) < num_blocks:
            assert time.monotonic() < deadline, "something stays held"
            time.sleep(0.001)

    def close(self) -> None:
        self.mover.close()


def saved_after_the_step(packing: Packing, computed: torch.Tensor) -> dict[BlockKey, bytes]:
    """The reference: whole blocks are copied when all layers are there."""
    with closing(Worker(packing)) as worker:
        worker.computed = computed
        for name in LAYERS:
            worker.compute(name)
        worker.step.end()
        worker.settle()
        return worker.pool.blocks


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("copied", [LAYERS, LAYERS[::2], LAYERS[3:], []], ids=len)
def test_the_pool_gets_by_layers_what_it_gets_after_the_step(
    packing: Packing, copied: Sequence[str]
) -> None:
    """Also if a graph ran some layers, or all, without telling."""
    with closing(Worker(packing)) as worker:
        for name in LAYERS:
            worker.compute(name)
            if name in copied:
                worker.copy(name)
        worker.step.end()
        worker.settle()
        assert worker.pool.blocks == saved_after_the_step(packing, worker.computed)
        assert len(worker.pool.blocks) == 3 * packing.num_parts(RANK)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_sent_before_its_last_layer(packing: Packing, seed: int) -> None:
    """Each one is sent as soon as it is there: layers come in any order, with a wait for the pool
    after each.
    """
    layers = random.Random(seed).sample(LAYERS, len(LAYERS))
    with closing(Worker(packing)) as worker:
        whole = saved_after_the_step(packing, worker.computed)
        for at, name in enumerate(layers, 1):
            worker.compute(name)
            worker.copy(name)
            missing = [LAYERS.index(later) for later in layers[at:]]
            there = min(missing, default=len(LAYERS)) * WIDTH * 4
            parts = there // packing.pool_block_bytes if packing.blocks == 1 and missing else 0
            worker.settle(3 * parts if missing else len(whole))
            assert worker.pool.blocks.items() <= whole.items()
            assert not missing or len(worker.pool.blocks) == 3 * parts
        worker.step.end()
        worker.settle()
        assert worker.pool.blocks == whole


def test_a_layer_that_shares_anothers_kv_is_copied_once() -> None:
    with closing(Worker(PACKINGS["one in one"])) as worker:
        assert worker.pages.number("shares the first") == worker.pages.number(LAYERS[0])
        assert worker.pages.number("keeps none") is None
        for name in LAYERS:
            worker.compute(name)
        worker.step.copy(0)
        worker.kv[LAYERS[0]].zero_()  # nobody does this: the second copy would show it
        worker.copy("shares the first")
        worker.step.end()
        worker.settle()
        assert worker.pool.blocks == saved_after_the_step(PACKINGS["one in one"], worker.computed)
