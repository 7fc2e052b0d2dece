"""What the engine tells of itself: costs of steps, loads, counters."""

from __future__ import annotations

from mooncake.base.messages import CostSample
from mooncake.engine.plan import Counted
from tests.support.engine.engines import Bench

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def test_the_cost_of_a_step_is_measured() -> None:
    bench = Bench(max_chunk_tokens=8)
    assert bench.engine.cost_sample() is None
    bench.add(PROMPT)
    bench.step()
    assert bench.engine.cost_sample() == CostSample(8, 0, 1, 0.01 + 0.008)
    bench.add([1, 2])
    bench.step()
    assert bench.engine.cost_sample() == CostSample(3, 8, 2, 0.01 + 0.003, 1, 1, 8)


def test_figures_tell_what_waits_and_what_runs() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=1, max_chunk_tokens=4)
    bench.add(PROMPT, max_tokens=2)
    bench.add([1] * 6)
    assert bench.engine.num_queued_tokens == 15
    bench.step()
    load = bench.engine.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert (load.num_queued_tokens, load.num_context_tokens) == (11, 4)
    assert (load.num_total_blocks, load.num_free_blocks, load.num_cached_blocks) == (10, 7, 0)
    bench.step()
    bench.step()
    assert bench.engine.num_queued_tokens == 6  # a stream's next token is not in a queue
    bench.run()
    load = bench.engine.load()
    assert load.num_free_blocks == 10
    assert load.num_cached_blocks == 2 + 2
    assert load.counters["sequences_ended"] == 2
    assert load.counters["tokens_computed"] == 9 + 1 + 6 + 3
    assert load.counters["wait_s"] == 4.0


def test_what_the_runner_counted_is_in_the_load() -> None:
    bench = Bench()
    assert bench.engine.load().expert_rows == []
    bench.engine.on_counted(Counted(counters={"expert_rows": 7.0}, expert_rows=[4, 0, 3]))
    bench.engine.on_counted(Counted(counters={"expert_rows": 9.0}))
    load = bench.engine.load()
    assert (load.counters["expert_rows"], load.expert_rows) == (9.0, [4, 0, 3])
