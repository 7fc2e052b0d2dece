"""A trace over simulated engines: what they cache and tell, and what placement makes of it."""

from __future__ import annotations

import random
import statistics

from benchmarks.engine_routing_simulated import (
    BLOCK_TOKENS,
    CONSTANT_S,
    SCALE,
    SimulatedEngine,
    play,
    words_of,
)
from mooncake.base.block_events.engine_events import EngineEvent, RemovedBlocks, StoredBlocks
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine


def test_an_engine_computes_what_it_has_not_kept_and_tells_of_it() -> None:
    told: list[EngineEvent] = []
    engine = SimulatedEngine(told.append, num_blocks=3, token_s=0.001)
    first = list(range(2 * BLOCK_TOKENS + 1))
    assert engine.compute(first, 0.0) == (CONSTANT_S + 0.001 * len(first), 0)
    assert [type(each) for each in told] == [StoredBlocks] * 2
    first_s, cached = engine.compute(first, 10.0)
    assert (round(first_s, 6), cached) == (10.021, 2 * BLOCK_TOKENS)
    assert len(told) == 2
    engine.compute(list(range(1000, 1000 + 2 * BLOCK_TOKENS)), 20.0)
    assert isinstance(told[-1], RemovedBlocks), "of four blocks it keeps three"
    assert engine.compute(first, 30.0)[1] == 0, "the first one is gone"


def line(at_s: float, ids: list[int]) -> TraceLine:
    length = len(ids) * TRACE_BLOCK_TOKENS
    return TraceLine(timestamp=1e3 * at_s, input_length=length, output_length=10, hash_ids=ids)


def test_equal_blocks_of_a_trace_have_equal_tokens() -> None:
    assert len(words_of(line(0, [1, 2, 3]))) == 3 * BLOCK_TOKENS
    assert words_of(line(0, [1, 2, 3]))[:BLOCK_TOKENS] == words_of(line(9, [1, 5]))[:BLOCK_TOKENS]
    cut = TraceLine(timestamp=0, input_length=700, output_length=1, hash_ids=[1, 2])
    assert len(words_of(cut)) == 700 // SCALE


def test_conversations_are_found_more_often_than_by_round_robin() -> None:
    draw, fresh = random.Random(3), iter(range(10**6))
    lines, heads = [], [[0] for _ in range(12)]
    for number in range(150):
        ids = draw.choice(heads)
        ids += [next(fresh) + 1 for _ in range(draw.randint(1, 6))]
        lines.append(line(float(number), list(ids)))
    found = {
        way: play(lines, way, 3, 400 * TRACE_BLOCK_TOKENS, 20_000.0)
        for way in ("block events", "what was sent", "round robin")
    }
    blind = found.pop("round robin")
    for share, ttft_s in found.values():
        assert share > blind[0] + 0.05
        assert statistics.mean(ttft_s) < statistics.mean(blind[1])
