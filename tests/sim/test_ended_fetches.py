"""A fetch counts among those that later ones wait for until it has ended, not until its prompt is
computed: while prompts queue at a worker, prefixes on SSD are still fetched.
"""

from __future__ import annotations

from itertools import islice

import pytest

from mooncake.scheduler.placement.booking_table import BookingTable
from mooncake.sim.simulation import Simulation
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine
from tests.support.sim.traces import simulation

NUM_DOCUMENTS = 8
DOCUMENT_BLOCKS = 30
SSD_BYTES_PER_S = 6e9
"""A document comes in half the time in which it is computed."""


def _documents(first: int) -> list[list[int]]:
    """Return documents that share no block."""
    ids = iter(range(first, first + NUM_DOCUMENTS * DOCUMENT_BLOCKS))
    return [list(islice(ids, DOCUMENT_BLOCKS)) for _ in range(NUM_DOCUMENTS)]


def trace() -> list[TraceLine]:
    """Documents are read, and fall out of HBM and DRAM; behind a queue they are asked about one by
    one.
    """

    def ask(at_s: float, ids: list[int]) -> TraceLine:
        length = len(ids) * TRACE_BLOCK_TOKENS
        return TraceLine(timestamp=1e3 * at_s, input_length=length, output_length=5, hash_ids=ids)

    documents, others = _documents(0), [*_documents(500), *_documents(1000)]
    lines = [ask(5.0 * at, document) for at, document in enumerate([*documents, *others])]
    busy_s = 5.0 * len(lines)
    queue = _documents(2000)
    lines += [ask(busy_s + 0.01 * at, document) for at, document in enumerate(queue)]
    return lines + [
        ask(busy_s + 2.0 * at + 1.0, [*document, 7000 + at])
        for at, document in enumerate(documents)
    ]


def play() -> Simulation:
    played = simulation(
        trace(), 1, 1, hbm_tokens=14 * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS,
        pool_tokens=3 * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS, ssd_tokens=1_000_000,
        ssd_min_uses=1, ssd_bytes_per_s=SSD_BYTES_PER_S,
    )  # fmt: skip
    played.run()
    for _, machine in played.world.machines():
        machine.check_integrity()
    assert [one.num_finals for one in played.measures.requests] == [1] * len(trace())
    return played


def test_fetches_that_have_ended_hold_up_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = play()
    monkeypatch.setattr(BookingTable, "on_fetched", lambda *_: None)
    until_first_tokens = play()
    documents = NUM_DOCUMENTS * DOCUMENT_BLOCKS * TRACE_BLOCK_TOKENS
    assert 0.8 * documents < now.measures.hit_tokens <= documents
    assert until_first_tokens.measures.hit_tokens < 0.5 * documents
