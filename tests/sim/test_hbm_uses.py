"""A prefix that every request finds in HBM is in use in the pool too: it goes down to SSD, is not
evicted for what is used less, and is there when the worker that had it is not.
"""

from __future__ import annotations

import pytest

from mooncake.kvstore.node.node import KvNode
from mooncake.sim.simulation import Simulation
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine
from tests.support.sim.traces import simulation

HEAD = list(range(1, 11))
NUM_TURNS = 6


def line(number: int, ids: list[int]) -> TraceLine:
    return TraceLine(
        timestamp=1e3 * 10 * number, input_length=len(ids) * TRACE_BLOCK_TOKENS + 1,
        output_length=5, hash_ids=[*ids, 900_000 + number],
    )  # fmt: skip


def trace() -> list[TraceLine]:
    """One document is asked about again and again; between, others come once and fill the pool."""
    lines = []
    for turn in range(NUM_TURNS):
        lines.append(line(2 * turn, HEAD))
        lines.append(line(2 * turn + 1, list(range(1000 * (turn + 1), 1000 * (turn + 1) + 8))))
    return lines


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(1, 1), (0, 1)])
def test_a_prefix_always_hit_in_hbm_stays_in_the_pool(num_prefill: int, num_decode: int) -> None:
    played: Simulation = simulation(
        trace(), num_prefill, num_decode, pool_tokens=24 * TRACE_BLOCK_TOKENS,
        ssd_tokens=1_000_000, decode_pools=not num_prefill,
    )  # fmt: skip
    played.run()
    [store] = [machine for _, machine in played.world.machines() if isinstance(machine, KvNode)]
    store.check_integrity()
    assert store.counters["pins"] == 0, "all reuse was in HBM"
    assert played.measures.hit_tokens == (NUM_TURNS - 1) * len(HEAD) * TRACE_BLOCK_TOKENS
    assert store.counters["ssd_blocks_written"] == len(HEAD)
    last_other = 8 * NUM_TURNS
    assert store.counters["blocks_evicted"] >= last_other - 24
    state = store.state()
    assert state.num_ssd_stored == len(HEAD)
    assert state.load.num_cached_blocks + state.load.num_free_blocks == 24
