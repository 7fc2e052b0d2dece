"""A prefill worker is replaced a hundred times, or given up in the middle of a request: decode goes
on, and neither memory, descriptors, threads nor mappings grow. Workers are threads of this process,
each with a transfer engine, memory and sockets of its own; `mooncake conformance --processes`
replaces real processes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from mooncake.base import FinishReason
from mooncake.bench.conformance.processes import Use, use_of
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import LocalWorld, request

NUM_REPLACEMENTS = 100
NUM_WARM = 20
"""Replacements after which all that is made once has been made."""
NUM_PROMPTS = 10
"""They repeat from early on, so that each new worker reads ahead what is busy."""
NUM_PAGES = 1024
SPARE_BYTES = 96 * 2**20
"""The heap of a process with so many threads is not level; eighty memories of pages, which is what
would be left, are three times as much.
"""


def all_up(world: LocalWorld) -> bool:
    workers = world.gateway_process.status().workers
    return len(workers) == 3 and all(worker.state == "up" for worker in workers)


@pytest.mark.parametrize(
    ("protocol", "given_up"), [("shm", False), ("tcp", False), ("shm", True), ("tcp", True)]
)
def test_a_hundred_replacements_leave_nothing(
    protocol: str, given_up: bool, tmp_path: Path
) -> None:
    """`given_up`: it comes back by itself, once it hears that the cluster has given it up."""
    model = str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))
    found: list[tuple[Use, int]] = []

    async def use() -> tuple[Use, int]:
        gc.collect()
        return await asyncio.to_thread(use_of, os.getpid()), threading.active_count()

    async def play() -> None:
        world = LocalWorld(
            model, protocols=(protocol,), prefill=1, decode=1, kvstore=1,
            num_gpu_blocks_override=NUM_PAGES,
        )  # fmt: skip
        [prefill] = [each for each in world.workers if each.worker_id == "prefill-0"]
        async with world, asyncio.timeout(240):
            for number in range(NUM_REPLACEMENTS):
                asked = request(number, [number % NUM_PROMPTS, *range(120)], 4)
                answer = asyncio.create_task(world.generate(asked))
                if given_up:
                    await asyncio.sleep(0)  # it is asked first
                    world.gateway_process.worker_lost("prefill-0")
                tokens, final = await answer
                assert final.reason is FinishReason.LENGTH
                assert tokens == expected_output(world.layout, asked, max_model_len=512)
                if not given_up:
                    await asyncio.to_thread(world.cluster.kill, "prefill-0")
                    await asyncio.to_thread(world.cluster.start, [prefill])
                await world.until(lambda: all_up(world))
                if number in (NUM_WARM, NUM_REPLACEMENTS - 1):
                    await world.settle()
                    found.append(await use())
            num_lost = world.gateway_process.status().counters["workers_lost"]
            assert num_lost == NUM_REPLACEMENTS
            leak_would_be = NUM_PAGES * world.layout.block_bytes * (NUM_REPLACEMENTS - NUM_WARM)
            assert leak_would_be > 3 * SPARE_BYTES

    asyncio.run(play())
    (before, threads_before), (after, threads_after) = found
    assert threads_after <= threads_before + 4, "besides those of the event loop's own pool"
    assert after.num_descriptors <= before.num_descriptors + 4
    assert after.num_mappings <= before.num_mappings + 16
    assert after.memory_bytes <= before.memory_bytes + SPARE_BYTES
