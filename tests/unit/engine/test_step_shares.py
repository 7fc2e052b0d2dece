"""Who gets how much of a step where flows meet: plans of a batcher alone, timed by a cost like that
of k2-demo on a CPU (2 cores of AMD EPYC Zen 4): 4 ms, 0.5 ms a row, 0.045 ms a token of a chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import CostSample
from mooncake.base.request import Flow, GenerateRequest, Priority
from mooncake.engine.batcher import Batch, Batcher
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.chunks import UNIT
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Sequence, SequenceState
from mooncake.engine.speculation import Speculation
from mooncake.engine.step_shares import (
    FACTOR,
    MOST_OWED,
    NUM_AFTER,
    Sharing,
    StepShare,
    StepTimes,
    Wants,
    shared_out,
)
from tests.support.engine.engines import ROOMY, Bench, request
from tests.support.examples import examples

LARGE = {
    "num_blocks": 8192, "max_num_seqs": 256, "max_batched_tokens": 2048,
    "max_chunk_tokens": 2048, "max_model_len": 8192, "max_waiting": 1024,
}  # fmt: skip
FIXED_S, ROW_S, TOKEN_S = 4e-3, 0.5e-3, 0.045e-3


def step_s(num_rows: int, num_tokens: int = 0) -> float:
    """Return the time of a step: `num_tokens` are of prompts."""
    return FIXED_S + ROW_S * num_rows + TOKEN_S * num_tokens


SAMPLES = [
    *(
        CostSample(rows, each * rows, rows, step_s(rows))
        for rows in (1, 8, 16)
        for each in (0, 999)
    ),
    *(CostSample(size, 0, 1, step_s(1, size)) for size in (128, 512, 2048)),
]


class Everything(Sharing):
    """What there was before flows shared steps: each gets all that it wants."""

    def of_step(self, *_: object, **__: object) -> StepShare | None:
        return None


class Clocked:
    """A batcher whose steps take the time above; sequences end at their `max_tokens`."""

    def __init__(
        self,
        sharing: type[Sharing] = Sharing,
        drafts: int = 0,
        token_s: float = TOKEN_S,
        context_s: float = 0.0,
        learns: bool = True,
        samples: Iterable[CostSample] = SAMPLES,
        **config: Any,
    ) -> None:
        self.token_s, self.context_s, self.learns = token_s, context_s, learns
        self.late_s = 0.0
        """What the next step takes longer."""
        self.config = replace(ROOMY, **LARGE | config)
        self.pool = BlockPool(self.config.num_blocks)
        speculation = Speculation(Repeat(), drafts) if drafts else None
        if speculation is not None:
            speculation.calibrate([CostSample(rows, 0, rows, step_s(rows, 0)) for rows in (1, 2)])
        cost = StepCostModel(SAMPLES, self.config.num_stages)
        self.batcher = Batcher(self.config, self.pool, speculation, cost)
        self.batcher.sharing = sharing(self.config)
        self.batcher.sharing.times.calibrate(samples)
        self.now = 0.0
        self.plans: list[dict[int, int]] = []
        self.flying: list[tuple[Batch, dict[int, int]]] = []
        self.last_id = 0
        self.ended: dict[int, float] = {}

    def add(self, num_prompt_tokens: int = 12, **fields: Any) -> Sequence:
        self.last_id += 1
        return self.enqueue(request([self.last_id % 90] * num_prompt_tokens, **fields))

    def enqueue(self, order: GenerateRequest) -> Sequence:
        sequence = Sequence(self.last_id, order)
        sequence.arrival = self.last_id
        sequence.extend_keys("fp", self.config.block_tokens)
        self.batcher.enqueue(sequence)
        return sequence

    def begin(self) -> Batch:
        """Plan a step and put it in flight."""
        batch = self.batcher.plan()
        shares = {one.sequence_id: count for one, count in batch.shares.values()}
        number = len(self.plans)
        for sequence, count in batch.shares.values():
            sequence.steps.append(number)
            sequence.num_in_flight += count
        if shares:
            self.batcher.sharing.commit(batch.share)
        self.plans.append(shares)
        self.flying.append((batch, shares))
        return batch

    def end(self) -> None:
        """End the oldest step."""
        batch, shares = self.flying.pop(0)
        rows = sum(count == 1 for count in shares.values())
        tokens = sum(count for count in shares.values() if count > 1)
        if shares:
            context = sum(one.num_computed for one, _ in batch.shares.values())
            drafts = sum(map(len, batch.drafts.values()))
            seconds = step_s(len(shares) + drafts) + self.token_s * tokens
            seconds += self.context_s * context + self.late_s
            streams = [one for one, count in batch.shares.values() if count == 1]
            read = sum(one.num_computed for one in streams)
            sizes = rows + drafts + tokens, context, len(shares)
            cost = CostSample(*sizes, seconds, len(streams), rows + drafts, read)
            if self.learns:
                self.batcher.sharing.observe(cost, batch.share, has_prompts=tokens > 0)
            elif batch.share is not None:
                self.batcher.sharing.count_late(cost.seconds, batch.share)
            self.now += seconds
        self.late_s = 0.0
        assert rows + tokens + batch.budget <= self.config.max_batched_tokens
        for sequence, count in batch.shares.values():
            sequence.steps.pop(0)
            sequence.num_in_flight -= count
            sequence.num_computed += count
            if sequence.num_computed == sequence.num_tokens:
                sequence.output_tokens.append(1)
                if len(sequence.output_tokens) == sequence.max_new_tokens:
                    self.batcher.remove(sequence)
                    self.pool.release(sequence.drop_kv())
                    self.ended[sequence.sequence_id] = self.now
        self.pool.check_integrity()

    def step(self) -> Batch:
        batch = self.begin()
        self.end()
        return batch

    def took_s(self, sequence: Sequence) -> float:
        """Run steps until a sequence ends; return how long that took."""
        begin = self.now
        while sequence.state is not SequenceState.ENDED:
            self.step()
        return self.now - begin


class Repeat:
    """Proposes the last token again."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return [1] * most


def flood(clocked: Clocked, num: int, steps: int = 0, **fields: Any) -> list[Sequence]:
    made = [clocked.add(**{"max_tokens": 400, "tenant": "foe", **fields}) for _ in range(num)]
    for _ in range(steps):
        clocked.step()
    return made


def alone_s(**fields: Any) -> float:
    clocked = Clocked()
    return clocked.took_s(clocked.add(max_tokens=16, **fields))


@pytest.mark.parametrize("kind", [Priority.PREMIUM, Priority.INTERACTIVE, Priority.BATCH])
@pytest.mark.parametrize("steps", [0, 1, 30])
def test_a_short_answer_beside_128_sequences_takes_three_times_as_long_at_most(
    kind: Priority, steps: int
) -> None:
    """Whenever it comes; without shares it takes ten times as long."""
    before = Clocked(Everything)
    flood(before, 128, 30, priority=kind)
    assert before.took_s(before.add(max_tokens=16)) > 8 * alone_s()
    clocked = Clocked()
    flood(clocked, 128, steps, priority=kind)
    begin = clocked.now
    clocked.begin()  # the step that it just misses
    mine = clocked.add(max_tokens=16)
    clocked.end()
    assert clocked.took_s(mine) < 3 * alone_s(), "from the step on that it could be in"
    assert clocked.now - begin < 3 * alone_s() + step_s(128, 12 * 128), "with the step under way"
    for _ in range(4):
        begin = clocked.now
        clocked.begin()
        mine = clocked.add(max_tokens=16)
        clocked.end()
        clocked.took_s(mine)
        assert clocked.now - begin < 3 * alone_s(), "who comes back waits for no long step"


def test_the_others_keep_more_than_half_of_their_rows() -> None:
    clocked = Clocked()
    foes = flood(clocked, 128, 30)
    clocked.add(max_tokens=2000)
    before, begin = sum(len(foe.output_tokens) for foe in foes), clocked.now
    for _ in range(200):
        clocked.step()
    rate = (sum(len(foe.output_tokens) for foe in foes) - before) / (clocked.now - begin)
    assert 0.5 * 128 / step_s(128) < rate < 0.7 * 128 / step_s(128)


def test_rows_of_a_limited_flow_take_turns() -> None:
    clocked = Clocked()
    foes = flood(clocked, 64, 10)
    clocked.add(max_tokens=2000)
    clocked.step()
    first = len(clocked.plans)
    for _ in range(60):
        clocked.step()
    counts = Counter(one for plan in clocked.plans[first:] for one in plan)
    turns = [counts[foe.sequence_id] for foe in foes]
    assert min(turns) > 0
    assert max(turns) - min(turns) <= 1


def test_a_plan_looks_at_few_of_the_prompts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sequences one call has."""
    looked: list[Sequence] = []
    most, want = StepShare.most, Sharing._want

    def counted_most(self: StepShare, sequence: Sequence, limit: int) -> int:
        looked.append(sequence)
        return most(self, sequence, limit)

    def counted_want(self: Sharing, wants: Wants, sequence: Sequence) -> None:
        looked.append(sequence)
        want(self, wants, sequence)

    monkeypatch.setattr(StepShare, "most", counted_most)
    monkeypatch.setattr(Sharing, "_want", counted_want)

    def num_looks(num_waiting: int) -> int:
        clocked = Clocked(max_num_seqs=16)
        flood(clocked, num_waiting)
        clocked.add(max_tokens=400)
        for _ in range(4):
            clocked.step()
        looked.clear()
        clocked.step()
        return len(looked)

    assert num_looks(900) == num_looks(60) < 120


def test_flows_that_are_alike_do_not_limit_each_other() -> None:
    clocked = Clocked()
    for tenant in "abcdefgh":
        flood(clocked, 16, tenant=tenant)
    for _ in range(20):
        clocked.step()
    assert len(clocked.plans[-1]) == 128


def test_nobody_waits_for_batch() -> None:
    clocked = Clocked()
    flood(clocked, 128, 20, priority=Priority.PREMIUM)
    clocked.add(priority=Priority.BATCH, tenant="slow", max_tokens=50)
    clocked.step()
    assert len(clocked.step().shares) == 129


@pytest.mark.parametrize("tenant", ["foe", "other"])
def test_a_premium_prompt_does_not_wait_for_interactive_streams_of_its_tenant(tenant: str) -> None:
    """Another tenant's stream keeps the steps short, and the prompt takes longer."""
    clocked = Clocked()
    flood(clocked, 1, 10, tenant=tenant)
    prompt = clocked.add(2000, tenant="foe", priority=Priority.PREMIUM, max_tokens=1)
    whole_s = step_s(2, 2000)
    took_s = clocked.took_s(prompt)
    if tenant == "foe":
        assert took_s < 1.1 * whole_s
    else:
        assert took_s > 1.5 * whole_s


def test_interactive_streams_go_on_beside_premium_prompts_of_their_tenant() -> None:
    clocked = Clocked()
    (mine,) = flood(clocked, 1, 10)
    before = len(mine.output_tokens), len(clocked.plans)
    for _ in range(8):
        flood(clocked, 1, priority=Priority.PREMIUM, num_prompt_tokens=2000, max_tokens=1)
    while clocked.batcher.waiting or len(clocked.batcher.running) > 1:
        clocked.step()
    assert len(mine.output_tokens) - before[0] == len(clocked.plans) - before[1], "in each step"


def test_a_flow_is_alone_again_some_steps_after_the_other_left() -> None:
    clocked = Clocked()
    flood(clocked, 128, 20)
    clocked.took_s(clocked.add(max_tokens=4))
    sizes = [len(clocked.step().shares) for _ in range(NUM_AFTER + 1)]
    assert max(step_s(size) for size in sizes[:-1]) <= 8.5 * step_s(1)
    assert min(sizes) > 32
    assert sizes[-1] == 128


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    clocked = Clocked()
    clocked.add(8000, tenant="foe")
    clocked.step()
    mine = clocked.add(20, max_tokens=4)
    shares = clocked.step().shares
    assert shares[mine.sequence_id][1] == 20
    assert 64 <= shares[1][1] <= 192
    assert 64 <= clocked.step().shares[1][1] <= 192, "beside its stream, too"


@pytest.mark.parametrize("pause_s", [0.001, 0.005, 0.020])
def test_requests_beside_a_long_prompt_take_three_times_as_long_at_most(pause_s: float) -> None:
    """They follow one another, and the prompt is alone in between. A chunk of it takes 3.5 ms more
    for every 1,000 tokens of its context.
    """
    context_s = 3.5e-6
    samples = [
        CostSample(size, at, 1, step_s(1, size) + context_s * at)
        for size, at in ((64, 0), (512, 0), (256, 1024), (64, 2048), (512, 2048), (2048, 0))
    ]
    clocked = Clocked(samples=[*SAMPLES[:6], *samples])

    def step() -> None:
        batch = clocked.begin()
        streams = clocked.plans[-1]
        for one, _ in batch.shares.values():
            clocked.late_s += context_s * one.num_computed if streams[one.sequence_id] > 1 else 0.0
        clocked.end()

    due = 0.0

    def next_s() -> float:
        nonlocal due
        while clocked.now < due and clocked.batcher.running:
            step()
        clocked.now = max(clocked.now, due)
        mine, begin = clocked.add(20, max_tokens=16), due
        while mine.state is not SequenceState.ENDED:
            step()
        due = clocked.now + pause_s
        return clocked.now - begin

    quiet_s = next_s()
    long = clocked.add(7900, tenant="foe", max_tokens=1)
    times = [next_s()]
    while long.state is not SequenceState.ENDED:
        times.append(next_s())
    assert len(times) > 5
    assert max(times) < 3 * quiet_s, "with the step under way when they come"


def test_a_chunk_behind_a_long_context_is_paid_with_steps_without_one() -> None:
    """Here the context takes 8 ms for every 1,000 tokens, however few attend to it."""
    clocked = Clocked(context_s=8e-6, learns=False)
    clocked.batcher.sharing.times.calibrate(
        [
            *SAMPLES,
            *(CostSample(64, at, 1, step_s(1, 64) + 8e-6 * at) for at in (1000, 4000, 8000)),
        ]
    )
    long = clocked.add(8000, tenant="foe")
    for _ in range(3):
        clocked.step()
    assert long.num_computed == 3 * 2048
    clocked.add(max_tokens=500)
    clocked.step()
    has_chunk = [long.sequence_id in clocked.step().shares for _ in range(40)]
    assert 2 <= sum(has_chunk) <= 8


def test_a_long_prompt_computes_as_long_as_it_reads_its_context() -> None:
    """A prompt of 30,000 tokens beside a stream of another tenant takes four times as long as alone
    at most. Each chunk takes 3.5 ms for every 1,000 tokens of its context: in chunks of `UNIT`
    tokens it would take twenty times as long.
    """
    context_s, size = 3.5e-6, 30_000
    reads = [
        CostSample(new, at, 1, step_s(1, new) + context_s * at)
        for new, at in ((64, 2048), (512, 2048), (64, 30_000), (512, 30_000))
    ]

    def engine() -> Clocked:
        samples = [*SAMPLES, *reads]
        return Clocked(context_s=context_s, learns=False, samples=samples, max_model_len=32_768)

    alone, clocked = engine(), engine()
    alone_s = alone.took_s(alone.add(size, max_tokens=1))
    clocked.add(max_tokens=4000)
    clocked.step()
    long, begin = clocked.add(size, tenant="foe", max_tokens=1), clocked.now
    steps: list[float] = []
    while long.sequence_id not in clocked.ended:
        before = clocked.now
        clocked.step()
        steps.append(clocked.now - before)
    took_s = clocked.now - begin
    assert took_s < 4 * alone_s
    own_s = step_s(1) + context_s * len(steps) / 2
    assert took_s / len(steps) < 1.1 * FACTOR * own_s, "the stream's mean step"
    assert max(steps) < 1.1 * (own_s + MOST_OWED * (FACTOR - 1) * own_s), "and its longest"


def test_a_long_prompt_that_is_alone_again_has_no_longer_steps_for_its_context() -> None:
    """It pays for no step then, and who comes back would wait for one. Where reading the context
    takes longer than a step may, the chunk is the smallest one.
    """
    context_s, at = 3.5e-6, 8000
    reads = [
        CostSample(new, size, 1, step_s(1, new) + context_s * size)
        for new, size in ((64, 2048), (512, 2048), (64, at), (512, at))
    ]
    clocked = Clocked(
        context_s=context_s, learns=False, samples=[*SAMPLES, *reads], max_model_len=32_768
    )
    long = clocked.add(30_000, tenant="foe", max_tokens=1)
    while long.num_computed < at:
        clocked.step()
    clocked.took_s(clocked.add(max_tokens=4))
    for _ in range(NUM_AFTER - 1):
        before = clocked.now
        least_s = step_s(1, UNIT) + context_s * long.num_computed
        clocked.step()
        assert clocked.now - before <= max(8.5 * step_s(1), 1.01 * least_s)


def test_what_steps_take_longer_than_was_foreseen_is_paid_with_later_ones() -> None:
    """Here a token of a prompt takes four times what the engine believes, and it does not learn."""
    clocked = Clocked(token_s=4 * TOKEN_S, learns=False)
    mine = clocked.add(max_tokens=500)
    long = clocked.add(8000, tenant="foe")
    for _ in range(4):
        clocked.step()
    begin, first = clocked.now, long.num_computed
    for _ in range(100):
        clocked.step()
    assert len(mine.output_tokens) > 100
    assert (clocked.now - begin) / 100 < 1.1 * FACTOR * step_s(1)
    assert long.num_computed - first > 64 * 25


ROWS = round((FACTOR - 1) * step_s(1) / ROW_S)
"""How many a limited flow has in a step beside one row of another."""


def beside_one(**settings: Any) -> tuple[Clocked, Sequence]:
    """Return 64 streams of one flow that share steps with one of another."""
    clocked = Clocked(learns=False, **settings)
    flood(clocked, 64, 10, max_tokens=4000)
    mine = clocked.add(max_tokens=4000)
    for _ in range(20):
        clocked.step()
    return clocked, mine


def rows_of_others(clocked: Clocked, mine: Sequence, late_s: Iterable[float]) -> list[int]:
    """Return how many rows others have in steps that take so much longer than predicted."""
    sizes = []
    for each_s in late_s:
        clocked.late_s = each_s
        shares = clocked.step().shares
        assert mine.sequence_id in shares
        sizes.append(len(shares) - 1)
    return sizes


@pytest.mark.parametrize(
    "late_s", [[0.0, 2.0, *[0.0] * 40], [0.0, 0.01] * 60, [0.0, 0.0, 0.3] * 40]
)
def test_steps_that_are_held_up_one_at_a_time_cost_nothing(late_s: list[float]) -> None:
    clocked, mine = beside_one()
    assert rows_of_others(clocked, mine, late_s) == [ROWS] * len(late_s)


def test_two_late_steps_cost_two_shares_at_most() -> None:
    clocked, mine = beside_one()
    sizes = rows_of_others(clocked, mine, [0.0, 2.0, 2.0, *[0.0] * 40])
    assert 1 <= sum(ROWS - size for size in sizes[2:]) <= 2 * ROWS


def test_a_prompt_of_a_flow_with_streams_goes_on_beside_many_flows() -> None:
    clocked = Clocked(learns=False)
    tenants = [f"t{number}" for number in range(12)]
    for tenant in tenants:
        flood(clocked, 4, tenant=tenant, max_tokens=4000)
    clocked.add(max_tokens=4000)
    for _ in range(40):
        clocked.step()
    prompts = [clocked.add(500, tenant=tenant, max_tokens=1) for tenant in tenants]
    for _ in range(100):
        clocked.step()
    assert all(one.sequence_id in clocked.ended for one in prompts)


def test_the_smallest_flow_keeps_its_rows_where_prompts_lack_tokens_of_the_step() -> None:
    clocked = Clocked(max_batched_tokens=256, max_chunk_tokens=256)
    flood(clocked, 90, tenant="mine", max_tokens=2000)
    flood(clocked, 110, tenant="foe", max_tokens=2000)
    for _ in range(40):
        clocked.step()
    for tenant in ("mine", "foe"):
        clocked.add(1500, tenant=tenant, max_tokens=1)
    for _ in range(6):
        shares = clocked.step().shares.values()
        assert sum(one.flow[1] == "mine" and count == 1 for one, count in shares) == 90


def test_plans_that_are_not_submitted_change_nothing() -> None:
    clocked, mine = beside_one()
    clocked.late_s = 2.0
    clocked.step()
    sizes = [len(clocked.batcher.plan().shares) for _ in range(50)]
    assert sizes == [sizes[0]] * 50, "none pays for the step"
    clocked.batcher.remove(mine)
    clocked.pool.release(mine.drop_kv())
    for _ in range(NUM_AFTER + 1):
        clocked.batcher.plan()
    assert clocked.batcher.sharing.recent, "nor counts as one since flows met"


def test_errors_of_predictions_that_average_out_cost_nothing() -> None:
    """What was saved while steps were short pays for those that are long."""
    clocked, mine = beside_one()
    late_s = [*[-1e-3] * 4, *[1e-3] * 4] * 25
    assert rows_of_others(clocked, mine, late_s) == [ROWS] * 200


def test_steps_in_lockstep_with_other_engines_are_not_paid_for_when_they_take_longer() -> None:
    for in_lockstep in (False, True):
        clocked = Clocked(in_lockstep=in_lockstep)
        flood(clocked, 64, 10)
        clocked.add(max_tokens=4000)
        clocked.step()
        for _ in range(2):
            clocked.late_s = 1.0
            clocked.step()
        num_sitting_out = sum(len(clocked.step().shares) == 1 for _ in range(5))
        assert bool(num_sitting_out) != in_lockstep


def test_rows_of_drafts_are_foreseen() -> None:
    clocked = Clocked(drafts=2, learns=False)
    flood(clocked, 64, 10)
    clocked.add(max_tokens=500)
    for _ in range(4):
        clocked.step()
    batch = clocked.step()
    assert batch.share is not None
    num_rows = len(batch.shares) + sum(map(len, batch.drafts.values()))
    assert num_rows > len(batch.shares)
    (late_s,) = batch.share.late_s(step_s(num_rows)).values()
    assert late_s == pytest.approx(0.0, abs=ROW_S / 4)


def test_steps_that_all_take_as_long_starve_nobody() -> None:
    """Nothing is known of what a row or a token takes."""
    flat = [CostSample(size, 0, rows, 0.01) for rows in (1, 8) for size in (rows, 64 * rows)]
    clocked = Clocked(learns=False, samples=flat)
    clocked.add(max_tokens=500, tenant="third")
    foes = [clocked.add(8000, tenant="foe", max_tokens=2) for _ in range(3)]
    mine = [clocked.add(8000, max_tokens=2) for _ in range(3)]
    for _ in range(40):
        clocked.step()
    assert set(clocked.ended) == {one.sequence_id for one in (*foes, *mine)}


@pytest.mark.parametrize("limit_s", [None, 0.007, 0.001])
def test_a_short_prompt_waits_for_no_long_one_where_gaps_have_a_limit(
    limit_s: float | None,
) -> None:
    clocked = Clocked(max_gap_s=limit_s)
    clocked.add(max_tokens=500, tenant="third")
    clocked.step()
    clocked.add(8000, tenant="foe")
    for _ in range(3):
        clocked.step()
    mine = clocked.add(20)
    for _ in range(2):
        clocked.step()
    assert mine.output_tokens


def test_the_engine_counts_what_its_steps_take_longer() -> None:
    """Two steps take 10 times what was learned: after them the flow of most sits out."""
    sizes = []
    for slow in (1, 10):
        bench = Bench(num_blocks=2048, max_num_seqs=64, max_waiting=64)
        steps = [CostSample(rows, 0, rows, 0.01 + 0.001 * rows) for rows in (1, 8, 64)]
        bench.engine.calibrate(steps)
        foes = [bench.add([1, 2], max_tokens=60, tenant="foe") for _ in range(40)]
        bench.step()
        mine = bench.add([3, 4], max_tokens=60)
        while mine.num_missing > 1:
            bench.step()
        for _ in range(2):
            bench.tick()
            (result,) = (one for one in bench.runner.poll() if isinstance(one, StepResult))
            late = msgspec.structs.replace(result, seconds=slow * result.seconds)
            bench.engine.on_step(late, 1.0)
        bench.tick()
        sizes.append(sum(bool(one.steps) for one in [*foes, mine]))
        assert mine.steps
    assert sizes[0] > 5
    assert sizes[1] == 1


def test_prompts_that_want_more_than_a_step_share_its_tokens_by_weight() -> None:
    clocked = Clocked()
    for number, kind in enumerate((Priority.PREMIUM, Priority.INTERACTIVE)):
        clocked.add(8000, priority=kind, tenant=str(number))
    shares = [count for _, count in clocked.step().shares.values()]
    assert 3.5 < shares[0] / shares[1] < 4.5
    assert sum(shares) > 0.9 * 2048


def test_what_yields_leaves_its_room_to_others_of_its_flow() -> None:
    clocked = Clocked()
    flood(clocked, 64, 10)
    clocked.add(max_tokens=500)
    clocked.step()
    batch = clocked.batcher.plan()
    in_it = [one for one, _ in batch.shares.values() if one.flow[1] == "foe"]
    others = [one for one in clocked.batcher.running if one.sequence_id not in batch.shares]
    assert not any(batch.most(one, 1) for one in others)
    batch.take_back(in_it[0])
    assert batch.most(others[0], 1) == 1


def test_a_limited_flow_goes_on_with_its_prompts_beside_its_streams() -> None:
    clocked = Clocked()
    flood(clocked, 100, 20)
    clocked.add(max_tokens=2000)
    clocked.step()
    late = clocked.add(500, tenant="foe")
    for _ in range(12):
        clocked.step()
    assert late.output_tokens


def test_limited_flows_get_no_drafts_and_the_others_do() -> None:
    clocked = Clocked(drafts=2)
    flood(clocked, 64, 10)
    mine = clocked.add(max_tokens=500)
    clocked.step()
    drafts = [clocked.step().drafts for _ in range(8)]
    assert {one for each in drafts for one in each} == {mine.sequence_id}


def test_steps_between_those_of_a_small_flow_are_short_in_a_pipeline_too() -> None:
    clocked = Clocked(num_stages=2, max_steps_in_flight=2)
    flood(clocked, 128)
    mine = clocked.add(max_tokens=1000)
    clocked.begin()
    for _ in range(100):
        clocked.begin()
        clocked.end()
    assert len(mine.output_tokens) > 40, "in every second step"
    assert max(step_s(len(plan)) for plan in clocked.plans[-20:]) < 2.5 * step_s(2)


flows = st.tuples(st.sampled_from(Priority), st.sampled_from("abcde"))


@settings(max_examples=examples(30), deadline=None)
@given(
    floods=st.dictionaries(flows, st.integers(1, 40), min_size=1, max_size=5),
    mine=st.integers(1, 4),
    seats=st.sampled_from([256, 16]),
    pages=st.sampled_from([8192, 300]),
)
def test_whatever_floods_there_are_nothing_starves_and_steps_are_short_enough(
    floods: dict[Flow, int], mine: int, seats: int, pages: int
) -> None:
    clocked = Clocked(max_num_seqs=seats, num_blocks=pages)
    everyone: list[Sequence] = []
    for (kind, tenant), num in floods.items():
        everyone += flood(clocked, num, priority=kind, tenant=tenant, max_tokens=8)
    everyone += [clocked.add(max_tokens=8) for _ in range(mine)]
    waits: Counter[int] = Counter()
    sat_out: Counter[Flow] = Counter()
    while len(clocked.ended) < len(everyone):
        batch = clocked.begin()
        running = [one for one in clocked.batcher.running if one.sequence_id not in clocked.ended]
        kinds = {one.flow for one in running}
        for flow in kinds if pages == LARGE["num_blocks"] else ():
            has_some = any(one.flow == flow for one, _ in batch.shares.values())
            sat_out[flow] = 0 if has_some else sat_out[flow] + 1
            assert sat_out[flow] <= 2, "each flow has its part of each step, or nearly"
        for one in running:
            waits[one.sequence_id] = 0 if one.steps else waits[one.sequence_id] + 1
            assert waits[one.sequence_id] <= len(everyone)
        streams = Counter(one.flow for one in running if one.num_missing == 1)
        guarded = [num for (kind, _), num in streams.items() if kind is not Priority.BATCH]
        only_streams = all(one.num_missing == 1 for one in running) and not clocked.batcher.waiting
        if only_streams and guarded and len(streams) > 1:
            predicted = clocked.batcher.sharing.times
            context = max(one.num_computed for one in running)
            alike_s = predicted_s(predicted, len(streams) * min(guarded), context)
            most_s = max(FACTOR * predicted_s(predicted, min(guarded), context), alike_s)
            assert predicted_s(predicted, len(batch.shares), 0) <= most_s
        clocked.end()
        assert len(clocked.plans) < 5000


def predicted_s(times: StepTimes, num_rows: int, context: int) -> float:
    """Return the predicted time of a step of rows that have so much context each."""
    return times.fixed_s + times.rows_s(num_rows, context * num_rows)


orders = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=30
)


@settings(max_examples=examples(30), deadline=None)
@given(
    orders=orders,
    stages=st.integers(1, 3),
    budget=st.sampled_from([2048, 64]),
    pages=st.sampled_from([8192, 120]),
)
def test_plans_of_one_flow_are_those_without_shares_some_steps_after_it_met_others(
    orders: list[tuple[int, int, int]], stages: int, budget: int, pages: int
) -> None:
    plans = []
    for sharing in (Sharing, Everything):
        clocked = Clocked(
            sharing, num_stages=stages, max_batched_tokens=budget, max_num_seqs=32,
            num_blocks=pages, max_steps_in_flight=stages,
        )  # fmt: skip
        flood(clocked, 8, max_tokens=4)
        meets = clocked.add(max_tokens=NUM_AFTER + 20)
        clocked.took_s(meets)
        assert not clocked.batcher.running
        first, num_ended = len(clocked.plans), len(clocked.ended)
        todo = sorted(orders, key=lambda order: order[2])
        for number in range(3000):
            while todo and todo[0][2] <= number:
                clocked.add(todo[0][0], max_tokens=todo.pop(0)[1])
            if len(clocked.flying) == stages or not clocked.begin().shares:
                clocked.end()
            if len(clocked.ended) == num_ended + len(orders):
                break
        assert len(clocked.ended) == num_ended + len(orders)
        plans.append(clocked.plans[first:])
    assert plans[0] == plans[1]


def test_what_is_shared_out_is_what_there_is() -> None:
    a, b, c = ((Priority.PREMIUM, "a"), (Priority.INTERACTIVE, "b"), (Priority.BATCH, "c"))
    assert shared_out({a: 1.0, b: 2.0}, 5.0) == {a: 1.0, b: 2.0}
    assert shared_out({a: 100.0, b: 100.0, c: 100.0}, 42.0) == {a: 32.0, b: 8.0, c: 2.0}
    assert shared_out({a: 2.0, b: 100.0, c: 100.0}, 12.0) == {a: 2.0, b: 8.0, c: 2.0}
    given = shared_out({a: 100.0, b: 3.0}, 10.0, 3.0)
    assert given == {a: 7.0, b: 3.0}, "the smallest has all it wants"
