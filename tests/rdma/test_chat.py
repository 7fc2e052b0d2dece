"""A conversation answered by prefill and decode engines whose KV moves by RDMA and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

from mooncake.base import FinishReason
from tests.rdma.test_nics import num_packets
from tests.support.engine.fake_runner import expected_output
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import LocalWorld, request
from tests.support.transfer.driving import NEEDS_RDMA

pytestmark = NEEDS_RDMA


def moved() -> int:
    return num_packets("rxe0") + num_packets("rxe1")


def test_two_turns_over_rdma(tmp_path: Path) -> None:
    """A token of this model is a hash of every KV byte before it: none may be lost or misplaced.

    The model needs no torch, whose import takes an emulated machine a minute.
    """
    model = str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))

    async def talk() -> None:
        async with LocalWorld(model, protocols=["rdma"]) as world:
            said = [number * 7 % 90 for number in range(200)]
            for turn in range(2):
                before, asked = moved(), request(turn, said)
                tokens, final = await world.generate(asked)
                assert final.reason is FinishReason.LENGTH
                assert tokens == expected_output(world.layout, asked)
                assert moved() > before
                said += [*tokens, 5, 6]
            await world.settle()

    asyncio.run(talk())
