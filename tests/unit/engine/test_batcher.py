"""The rules of planning, one by one, on a batcher alone. Blocks have four tokens."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import CostSample
from mooncake.base.request import Flow, GenerateRequest, Priority, fair_shares
from mooncake.engine.batcher import Batch, Batcher
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.cost import StepCostModel
from mooncake.engine.prompt_time import Allowance, Stream, prompt_time
from mooncake.engine.sequence import Sequence, SequenceState, rank
from mooncake.engine.step_shares import NUM_AFTER
from tests.support.engine.engines import ROOMY, request

WAITING, RUNNING, ENDED = SequenceState.WAITING, SequenceState.RUNNING, SequenceState.ENDED


class Planner:
    """A batcher whose steps always succeed and sample token 1."""

    def __init__(self, cost: StepCostModel | None = None, **config: Any) -> None:
        self.config = replace(ROOMY, **config)
        caches = self.config.enable_prefix_caching
        self.pool = BlockPool(self.config.num_blocks, caches=caches)
        self.batcher = Batcher(self.config, self.pool, cost=cost)
        self.last_id = 0

    def add(self, num_prompt_tokens: int, *, num_received: int = 0, **settings: Any) -> Sequence:
        """Put a sequence in line; with `num_received` pages, in which its prompt's KV lies."""
        order = request([self.last_id + 1] * num_prompt_tokens, **settings)
        return self.add_request(order, num_received)

    def add_request(self, order: GenerateRequest, num_received: int = 0) -> Sequence:
        self.last_id += 1
        self.last_added = sequence = Sequence(self.last_id, order)
        sequence.arrival = self.last_id
        if num_received:
            sequence.output_tokens.append(1)
            sequence.pages = self.pool.allocate(num_received) or []
            assert sequence.pages
            sequence.num_computed = len(order.prompt_tokens)
        sequence.extend_keys("fp", self.config.block_tokens)
        self.batcher.enqueue(sequence)
        return sequence

    def plan(self) -> dict[int, int]:
        """Return sequence_id -> tokens of the next step, in order; the step is over then."""
        return self.commit(self.batcher.plan())

    def commit(self, batch: Batch) -> dict[int, int]:
        shares = {}
        for sequence, num_tokens in batch.shares.values():
            shares[sequence.sequence_id] = num_tokens
            sequence.num_computed += num_tokens
            if sequence.num_computed == sequence.num_tokens:
                sequence.output_tokens.append(1)
            assert len(sequence.pages) * self.config.block_tokens >= sequence.num_computed
        for sequence, _ in batch.failed:  # as the engine does at their end
            self.pool.release(sequence.drop_kv())
        self.pool.check_integrity()
        return shares

    def finish(self, sequence: Sequence) -> None:
        self.batcher.remove(sequence)
        self.pool.release(sequence.drop_kv())


# ------------------------------------------------------------ tokens and seats


def test_streams_get_their_token_before_prompts_get_the_rest() -> None:
    planner = Planner(max_batched_tokens=10, max_chunk_tokens=8, max_num_seqs=4)
    long, short = planner.add(30), planner.add(2)
    assert list(planner.plan().items()) == [(1, 8), (2, 2)]
    assert list(planner.plan().items()) == [(2, 1), (1, 8)]
    planner.add(5)
    assert list(planner.plan().items()) == [(2, 1), (1, 8), (3, 1)]
    assert long.num_computed == 24
    assert short.num_tokens == 5


def test_a_chunk_is_limited_by_the_step_too() -> None:
    planner = Planner(max_batched_tokens=8, max_chunk_tokens=100)
    planner.add(20)
    assert [planner.plan()[1] for _ in range(4)] == [8, 8, 4, 1]


def test_seats_are_limited_and_given_in_rank_order() -> None:
    planner = Planner(max_num_seqs=2)
    planner.add(3, priority=Priority.BATCH)
    planner.add(3)
    premium = planner.add(3, priority=Priority.PREMIUM)
    assert list(planner.plan()) == [3, 2]
    planner.finish(premium)
    assert list(planner.plan()) == [2, 1]


# ------------------------------------------------------------ gaps between tokens


LARGE = {
    "num_blocks": 2048, "max_batched_tokens": 1024, "max_chunk_tokens": 1024, "max_model_len": 2048
}  # fmt: skip


def steady_cost() -> StepCostModel:
    """Return the cost model of a machine on which a step takes 10 ms and 1 ms a token."""
    return StepCostModel(
        [
            CostSample(new, context, count, 0.010 + 0.001 * new)
            for count in (1, 4)
            for new in (count, 16 * count, 256 * count, 512 * count)
            for context in (0, 1000)
        ]
    )


def test_chunks_beside_streams_are_cut_so_that_gaps_keep_their_limit() -> None:
    planner = Planner(max_gap_s=0.160, cost=steady_cost(), **LARGE)
    planner.add(900)
    assert planner.plan() == {1: 900}  # nobody waits for a token
    planner.add(900)
    planner.add(30)
    planner.add(900)
    assert planner.plan() == {1: 1, 2: 128}
    assert planner.plan() == {1: 1, 2: 128}


def test_what_a_short_prompt_leaves_of_the_time_is_for_the_next() -> None:
    planner = Planner(max_gap_s=0.160, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(30)
    planner.add(900)
    planner.add(900)
    first = planner.plan()
    assert list(first) == [1, 2, 3]
    assert first[2] == 30
    assert 64 <= first[3] <= 128
    assert planner.plan() == {1: 1, 2: 1, 3: 128}


def test_streams_slow_a_prompt_down_and_never_stop_it() -> None:
    planner = Planner(max_gap_s=0.001, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(100)
    planner.add(100)
    assert planner.plan() == {1: 1, 2: 64}
    assert planner.plan() == {1: 1, 2: 36}
    assert planner.plan() == {1: 1, 2: 1, 3: 64}


def test_a_prompt_waits_for_streams_until_its_first_token_would_be_late() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=2.0, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    first, second = planner.add(100), planner.add(700)
    assert planner.commit(planner.batcher.plan(now=0.0)) == {1: 1}
    assert not first.pages, "a prompt that waits takes no pages"
    assert planner.commit(planner.batcher.plan(now=0.9)) == {1: 1}
    # 0.1 s and 0.7 s of computing are left, so at 1.3 s the second one is late: both are whole.
    assert planner.commit(planner.batcher.plan(now=1.3)) == {1: 1, 2: 100, 3: 700}
    planner.finish(first)
    planner.finish(second)
    planner.add(64)
    assert planner.commit(planner.batcher.plan(now=0.0)) == {1: 1}


def test_a_late_prompt_whose_chunks_fit_keeps_the_limit_of_the_streams() -> None:
    planner = Planner(max_gap_s=0.160, first_token_s=1.0, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(900)
    shares = planner.commit(planner.batcher.plan(now=100.0))
    assert shares == {1: 1, 2: 128}


def test_a_prompt_of_a_limited_flow_lets_no_first_prompt_of_others_wait() -> None:
    config = replace(ROOMY, max_gap_s=0.160, first_token_s=100.0)
    time = prompt_time(config, steady_cost(), [Stream(4, 1, Allowance())], 900, [], now=0.0)
    time.may_wait = True
    assert time.take(900, 0, is_limited=True) == 128
    assert not time.is_used_up(is_limited=False)
    assert not time.is_too_short(64, 0, is_limited=False)
    assert time.is_too_short(64, 0, is_limited=True)
    assert time.take(64, 0, is_limited=False) == 64
    assert time.is_too_short(64, 0, is_limited=False)


def test_a_late_batch_prompt_keeps_the_limit_of_the_streams() -> None:
    """It is late, too, after ten times as long: no prompt waits for ever."""
    planner = Planner(max_gap_s=0.001, first_token_s=2.0, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(900, priority=Priority.BATCH)
    assert planner.commit(planner.batcher.plan(now=18.0)) == {1: 1}
    assert list(planner.commit(planner.batcher.plan(now=19.5))) == [1, 2]


def test_a_preempted_sequence_waits_anew_for_the_streams() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=2.0, cost=steady_cost(), **LARGE)
    first, second = planner.add(4), planner.add(400)
    planner.plan()
    planner.batcher.plan(now=90.0)
    planner.batcher._preempt(second, Batch(budget=0))
    assert planner.commit(planner.batcher.plan(now=91.0)) == {first.sequence_id: 1}
    assert list(planner.commit(planner.batcher.plan(now=91.7))) == [1, 2]


def test_beside_streams_of_batch_alone_chunks_are_whole() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=2.0, cost=steady_cost(), **LARGE)
    planner.add(4, priority=Priority.BATCH)
    planner.plan()
    planner.add(900, priority=Priority.BATCH)
    assert planner.plan() == {1: 1, 2: 900}


def test_a_stream_with_many_tokens_affords_a_long_gap_now_and_then() -> None:
    planner = Planner(max_gap_s=0.100, cost=steady_cost(), **LARGE)
    stream = planner.add(4)
    planner.plan()
    stream.output_tokens += [1] * 99
    stream.num_computed += 99
    planner.plan()
    planner.add(500)
    assert planner.plan() == {1: 1, 2: 500}  # 0.5 s; nine more gaps of its slowest tenth are short
    stream.allowance.long_s = [0.52]
    planner.add(900)
    shares = planner.plan()
    assert 64 <= shares[3] <= 320


def test_a_target_makes_no_chunk_so_small_that_its_tokens_take_much_longer() -> None:
    """Ten milliseconds of a step's own are a tenth of what 100 tokens take."""
    limits = {"max_gap_s": 0.060, "first_token_s": 100.0}
    planner = Planner(max_gap_is_target=True, cost=steady_cost(), **LARGE, **limits)
    planner.add(4)
    planner.plan()
    planner.add(900)
    planner.add(30)
    assert planner.plan() == {1: 1, 3: 30}
    wider = Planner(
        max_gap_s=0.200, first_token_s=100.0, max_gap_is_target=True, cost=steady_cost(), **LARGE
    )
    wider.add(4)
    wider.plan()
    wider.add(900)
    assert 128 <= wider.plan()[2] < 200


def test_a_late_prompt_lifts_a_target_even_where_its_chunks_fit() -> None:
    limits = {"max_gap_s": 0.200, "first_token_s": 2.0}
    planner = Planner(max_gap_is_target=True, cost=steady_cost(), **LARGE, **limits)
    planner.add(4)
    planner.plan()
    planner.add(900)
    assert planner.commit(planner.batcher.plan(now=0.5))[2] < 200
    assert planner.commit(planner.batcher.plan(now=1.5))[2] > 700


def test_a_target_lets_no_prompt_wait_for_streams_of_others() -> None:
    limits = {"max_gap_s": 0.001, "first_token_s": 100.0}
    planner = Planner(max_gap_is_target=True, cost=steady_cost(), **LARGE, **limits)
    planner.add(4, tenant="a")
    planner.plan()
    planner.add(64, tenant="b")
    assert 2 in planner.plan()


# ------------------------------------------------------------ first tokens in time


def test_a_prompt_that_is_too_late_lets_those_go_first_that_are_not() -> None:
    planner = Planner(first_token_s=0.5, cost=steady_cost(), **LARGE)
    long, short = planner.add(900), planner.add(300)
    assert planner.commit(planner.batcher.plan(now=0.0)) == {2: 300}
    planner.finish(short)
    assert planner.commit(planner.batcher.plan(now=0.4)) == {1: 128}, "another may come"
    planner.add(200)
    planner.last_added.waits_since_s = 0.5
    assert planner.commit(planner.batcher.plan(now=0.5)) == {3: 200}
    assert long.num_computed == 128
    planner.finish(planner.last_added)
    planner.add(200)
    planner.last_added.waits_since_s = 6.0
    assert planner.commit(planner.batcher.plan(now=6.0)) == {1: 772}, "it waited enough"


def test_where_flows_meet_prompts_go_in_their_turn() -> None:
    planner = Planner(first_token_s=0.5, cost=steady_cost(), **LARGE)
    planner.add(900, tenant="a")
    planner.add(100, tenant="b")
    assert 1 in planner.plan()


def test_too_late_prompts_do_not_harm_streams_unless_there_are_many() -> None:
    limits = {"max_gap_s": 0.001, "first_token_s": 0.5}
    planner = Planner(cost=steady_cost(), **LARGE, **limits)
    planner.add(4)
    planner.plan()
    for number in range(2, 5):
        planner.add(900)
        assert planner.commit(planner.batcher.plan(now=0.1)) == {1: 1}, number
    planner.add(900)
    assert planner.commit(planner.batcher.plan(now=0.1)) == {1: 1, 2: 900, 3: 123}


def test_a_postponed_prompt_with_all_pages_lets_nobody_wait_for_them() -> None:
    small = {"num_blocks": 250, "max_batched_tokens": 128, "max_chunk_tokens": 128}
    planner = Planner(first_token_s=0.5, cost=steady_cost(), **{**LARGE, **small})
    long = planner.add(900)
    assert planner.plan() == {1: 128}
    assert len(long.pages) == 225
    planner.add(120)
    assert planner.commit(planner.batcher.plan(now=0.0)) == {1: 128}


def test_a_prompt_is_not_postponed_for_one_that_has_no_seat() -> None:
    limits = {"first_token_s": 2.0, "max_num_seqs": 2}
    planner = Planner(cost=steady_cost(), **{**LARGE, **limits})
    planner.add(4)
    planner.plan()
    planner.add(1900)
    assert planner.plan() == {1: 1, 2: 1023}
    planner.add(300)
    assert planner.commit(planner.batcher.plan(now=1.4)) == {1: 1, 2: 877}


def test_what_is_cached_of_a_prompt_makes_it_no_later() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=0.8, cost=steady_cost(), **LARGE)
    tokens = list(range(900))
    earlier = planner.add_request(request(tokens))
    planner.plan()
    for key, page in zip(earlier.keys, earlier.pages, strict=False):
        planner.pool.publish(key, page)
    again = planner.add_request(request([*tokens[:-1], 1000]))
    assert planner.commit(planner.batcher.plan(now=0.0)) == {1: 1}
    assert again.sequence_id in planner.commit(planner.batcher.plan(now=0.8))


def test_prompts_that_are_in_time_by_what_is_cached_are_no_crowd() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=0.8, cost=steady_cost(), **LARGE)
    tokens = list(range(900))
    earlier = planner.add_request(request(tokens))
    planner.plan()
    for key, page in zip(earlier.keys, earlier.pages, strict=False):
        planner.pool.publish(key, page)
    for last in range(1000, 1004):
        planner.add_request(request([*tokens[:-1], last]))
    assert planner.commit(planner.batcher.plan(now=0.0)) == {1: 1}


def test_a_prompt_that_waits_is_computed_when_the_streams_have_ended() -> None:
    planner = Planner(max_gap_s=0.001, first_token_s=100.0, cost=steady_cost(), **LARGE)
    stream = planner.add(4)
    planner.plan()
    planner.add(900)
    assert planner.plan() == {1: 1}
    planner.finish(stream)
    assert planner.plan() == {2: 900}


def test_a_short_prompt_that_fits_the_limit_goes_before_a_long_one_that_waits() -> None:
    planner = Planner(max_gap_s=0.060, first_token_s=100.0, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(900)
    planner.add(10)
    assert planner.plan() == {1: 1, 3: 10}


@pytest.mark.parametrize(("max_gap_s", "num_looked_up"), [(10.0, 1), (0.001, 4)])
def test_prompts_are_looked_up_in_the_cache_for_waits_only_where_one_may_wait(
    max_gap_s: float, num_looked_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = Planner(
        max_gap_s=max_gap_s, first_token_s=100.0, cost=steady_cost(), **{**LARGE, "max_num_seqs": 2}
    )
    planner.add(4)
    planner.plan()
    for _ in range(4):
        planner.add(70)
    looked_up, match = [], planner.pool.match
    monkeypatch.setattr(planner.pool, "match", lambda keys: looked_up.append(1) or match(keys))
    planner.plan()
    assert len(looked_up) == num_looked_up


def test_a_prompt_does_not_wait_for_a_stream_that_cannot_run() -> None:
    small = {"num_blocks": 64, "max_chunk_tokens": 8, "max_model_len": 64}
    limits = {"max_gap_s": 0.001, "first_token_s": 100.0}
    planner = Planner(num_stages=2, cost=steady_cost(), **small, **limits)
    planner.add(40)
    planner.plan()
    planner.add(4)
    assert planner.plan() == {1: 8, 2: 4}
    assert planner.pool.allocate(planner.pool.num_available), "the stream's next page is taken"
    assert planner.plan() == {1: 8}


def test_a_prompt_whose_prefix_is_cached_waits_only_if_the_rest_is_too_long() -> None:
    planner = Planner(max_gap_s=0.060, first_token_s=100.0, cost=steady_cost(), **LARGE)
    tokens = list(range(130))
    earlier = planner.add_request(request(tokens))
    planner.plan()
    block = planner.config.block_tokens
    planner.pool.publish(earlier.keys[0], earlier.pages[0])
    planner.pool.publish(earlier.keys[1], earlier.pages[1])
    again = planner.add_request(request([*tokens[: 2 * block], 1, 2]))
    planner.add_request(request(list(range(1000, 1130))))
    assert planner.plan() == {1: 1, again.sequence_id: 2}


def test_in_a_pipeline_steps_between_those_of_a_stream_keep_its_limit_too() -> None:
    planner = Planner(max_gap_s=0.320, num_stages=2, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(900)
    first = planner.batcher.plan()
    for sequence, num_tokens in first.shares.values():
        sequence.num_in_flight += num_tokens
    behind = planner.batcher.plan()
    sizes = [{key: tokens for key, (_, tokens) in one.shares.items()} for one in (first, behind)]
    assert sizes == [{1: 1, 2: 128}, {2: 128}]


def test_a_stream_whose_kv_came_from_elsewhere_joins_a_step_without_time_for_prompts() -> None:
    planner = Planner(max_gap_s=0.001, cost=steady_cost(), **LARGE)
    planner.add(4)
    planner.plan()
    planner.add(100)
    planner.add(100)
    joins = planner.add(4, num_received=2)
    assert planner.plan() == {1: 1, 2: 64, joins.sequence_id: 1}


# ------------------------------------------------------------ pages and the cache


def test_admission_takes_pages_for_all_known_tokens() -> None:
    planner = Planner(max_chunk_tokens=4)
    sequence = planner.add(17)
    planner.plan()
    assert len(sequence.pages) == 5


def test_admission_leaves_a_page_for_each_sequence_that_will_grow() -> None:
    planner = Planner(num_blocks=4)
    grows = planner.add(4, max_tokens=10)
    waits = planner.add(12)
    assert planner.plan() == {1: 4}  # 3 of 4 pages are left, one of them is spoken for
    assert waits.state is WAITING
    planner.finish(grows)
    assert planner.plan() == {2: 12}


def test_no_page_is_left_for_a_sequence_that_has_all_it_wants() -> None:
    planner = Planner(num_blocks=4)
    planner.add(4, max_tokens=1)
    planner.add(12)
    assert planner.plan() == {1: 4, 2: 12}


def publish(planner: Planner, sequence: Sequence) -> None:
    for key, page in zip(sequence.keys, sequence.pages, strict=False):
        planner.pool.publish(key, page)


def test_cached_blocks_are_shared_but_the_last_token_is_computed() -> None:
    planner = Planner()
    first = planner.add(8)
    planner.plan()
    publish(planner, first)
    second = planner.add_request(first.request)
    assert planner.plan()[2] == 4  # 8 tokens are cached, the last block is computed again
    assert second.pages[0] == first.pages[0]
    assert second.pages[1] != first.pages[1]
    assert (second.num_cached_tokens, second.num_published) == (4, 1)


@pytest.mark.parametrize("num_blocks", [6, 7])
def test_a_flow_that_cannot_be_admitted_shortens_no_steps(num_blocks: int) -> None:
    """There is a page for its prompt, which running sequences will need."""
    planner = Planner(num_blocks=num_blocks)
    for tenant in "abcde":
        planner.add(2, tenant=tenant, max_tokens=4 if tenant == "a" else 2)
    planner.plan()
    waiting = planner.add(2, tenant="mine")
    has_pages = num_blocks == 7
    assert list(planner.batcher.admissible()) == [waiting] * has_pages
    planner.plan()
    assert (waiting.state is RUNNING) == has_pages


@pytest.mark.parametrize("limits", [{"num_blocks": 5}, {"max_num_seqs": 5}])
def test_a_flow_for_which_others_yield_is_admissible(limits: dict[str, int]) -> None:
    planner = Planner(**limits)
    for _ in range(5):
        planner.add(2, tenant="foe", max_tokens=2)
    planner.plan()
    waiting = [planner.add(2, tenant=tenant) for tenant in ("foe", "mine", "mine")]
    assert list(planner.batcher.admissible()) == [waiting[1]]
    share = planner.batcher.plan().share
    assert share is not None
    assert share.num_after == NUM_AFTER, "flows meet in this step"
    assert waiting[1].state is RUNNING


def test_pages_of_a_cached_prefix_that_others_hold_need_not_be_free() -> None:
    planner = Planner(num_blocks=4)
    first = planner.add_request(request([1] * 9, tenant="mine", max_tokens=1))
    planner.plan()
    publish(planner, first)
    again = request([1] * 9, tenant="mine", priority=Priority.PREMIUM)
    waiting = planner.add_request(again)
    assert planner.pool.num_available == 1
    assert list(planner.batcher.admissible()) == [waiting]
    other = planner.add_request(request([2] * 9, tenant="other"))
    assert other not in list(planner.batcher.admissible())
    planner.batcher.plan()
    assert (waiting.state, other.state) == (RUNNING, WAITING)


def test_a_flow_without_a_seat_that_others_would_leave_is_not_admissible() -> None:
    planner = Planner(max_num_seqs=1)
    planner.add(3)
    planner.plan()
    planner.add(3, tenant="mine")
    assert list(planner.batcher.admissible()) == []


def test_nothing_is_matched_without_prefix_caching_or_for_prompt_logprobs() -> None:
    for config, settings in (
        ({"enable_prefix_caching": False}, {}),
        ({}, {"num_prompt_logprobs": 0}),
    ):
        planner = Planner(**config)
        first = planner.add(9, **settings)
        planner.plan()
        publish(planner, first)
        second = Sequence(99, first.request)
        second.arrival = 99
        second.extend_keys("fp", 4)
        planner.batcher.enqueue(second)
        assert planner.plan()[99] == 9


def test_a_failed_admission_holds_nothing() -> None:
    planner = Planner(num_blocks=4)
    first = planner.add(8, max_tokens=1)
    planner.plan()
    publish(planner, first)
    twin = planner.add_request(request([*first.prompt_tokens, *[5] * 9]))
    assert 2 not in planner.plan()  # 5 blocks, 2 of them cached; 2 are left
    assert [planner.pool.ref_count(page) for page in first.pages] == [1, 1, 1]
    assert twin.pages == []


# ------------------------------------------------------------ preemption


def test_growth_takes_pages_from_the_last_in_order() -> None:
    planner = Planner(num_blocks=3)
    planner.add(4, max_tokens=9)
    last = planner.add(4, num_received=2, max_tokens=9)
    assert planner.plan() == {1: 4, 2: 1}
    batch = planner.batcher.plan()
    assert batch.preempted == [last]
    assert (last.state, last.pages, last.num_computed) == (WAITING, [], 0)
    assert last.output_tokens == [1, 1]
    assert planner.commit(batch) == {1: 1}


def test_growth_takes_pages_even_from_those_that_wait_with_some() -> None:
    planner = Planner(num_blocks=2, max_num_seqs=1)
    planner.add(4, max_tokens=9)
    waits = planner.add(4, num_received=1)
    planner.plan()
    assert planner.plan() == {1: 1}
    assert (waits.state, waits.pages) == (WAITING, [])


def test_the_last_in_order_keeps_its_pages_and_sits_out() -> None:
    planner = Planner(num_blocks=3)
    first, last = planner.add(4, max_tokens=9), planner.add(4, max_tokens=9)
    assert planner.plan() == {1: 4, 2: 4}
    assert planner.plan() == {1: 1}
    assert (last.state, len(last.pages), last.num_preemptions) == (RUNNING, 1, 0)
    planner.finish(first)
    assert planner.plan() == {2: 1}


def test_a_preempted_sequence_comes_back_first_and_finds_its_blocks() -> None:
    planner = Planner(num_blocks=5)
    first = planner.add(8, max_tokens=9)
    last = planner.add(8, max_tokens=9)
    planner.plan()
    publish(planner, last)
    held = planner.pool.allocate(1) or []
    assert planner.batcher.plan().preempted == [last]
    planner.add(1)
    planner.pool.release(held)
    planner.finish(first)
    # Nine tokens: two cached blocks less the one that the first sequence's growth reused.
    assert list(planner.plan().items()) == [(2, 5), (3, 1)]
    assert last.num_cached_tokens == 0


def test_a_newcomer_takes_pages_that_another_flow_has_above_its_share() -> None:
    planner = Planner(num_blocks=5, max_batched_tokens=20)
    planner.add(2, max_tokens=2)
    usual = planner.add(10, max_tokens=9)
    planner.plan()
    planner.add(7)
    assert planner.plan() == {1: 1, 2: 1}
    assert planner.batcher.plan().preempted == [], "its own flow gives nothing"
    planner.add(7, priority=Priority.PREMIUM)
    batch = planner.batcher.plan()
    assert batch.preempted == [usual]
    assert batch.budget == 20 - 7 - 1  # the share of the displaced one was given back
    assert planner.commit(batch) == {1: 1, 4: 7}


def test_the_first_sequence_of_a_flow_comes_to_its_end() -> None:
    """However large it is: others would take it back and forth for ever."""
    planner = Planner(num_blocks=4)
    large = planner.add(14, max_tokens=2, tenant="large")
    planner.plan()
    planner.add(7, priority=Priority.PREMIUM)
    assert planner.plan() == {1: 1}
    assert large.num_preemptions == 0


def test_no_page_is_left_for_sequences_that_would_yield_anyway() -> None:
    planner = Planner(num_blocks=5)
    planner.add(2, max_tokens=2, priority=Priority.BATCH)
    low = planner.add(3, max_tokens=9, priority=Priority.BATCH)
    planner.plan()
    planner.add(12, priority=Priority.PREMIUM)
    assert planner.plan() == {1: 1, 2: 1, 3: 12}
    assert low.num_preemptions == 0


def test_no_sequence_is_displaced_in_vain() -> None:
    planner = Planner(num_blocks=4)
    low = planner.add(4, priority=Priority.BATCH)
    planner.plan()
    planner.pool.allocate(2)
    planner.add(16, priority=Priority.PREMIUM)
    assert planner.plan() == {1: 1}
    assert low.num_preemptions == 0


def test_pages_shared_with_others_do_not_count_as_room() -> None:
    planner = Planner(num_blocks=5)
    planner.add(2, max_tokens=2, priority=Priority.BATCH)
    low = planner.add(12, priority=Priority.BATCH)
    planner.plan()
    planner.pool.hold(low.pages)  # a role still moves them
    planner.add(9, priority=Priority.PREMIUM)
    assert 3 not in planner.plan()
    assert low.num_preemptions == 0


def test_a_newcomer_takes_a_seat_and_its_owner_keeps_its_pages() -> None:
    planner = Planner(max_num_seqs=4)
    flood = [planner.add(3, max_tokens=90, tenant="flood") for _ in range(8)]
    planner.plan()
    mine = planner.add(3, max_tokens=90, tenant="other")
    batch = planner.batcher.plan()
    assert batch.preempted == [flood[3]], "the last in order"
    assert len(flood[3].pages) == 1
    assert list(planner.commit(batch)) == [1, 2, 3, 9]
    more = planner.add(3, max_tokens=90, tenant="other")
    assert list(planner.plan()) == [1, 2, 9, 10]
    planner.add(3, tenant="other")
    assert list(planner.plan()) == [1, 2, 9, 10], "no more than its share"
    planner.finish(mine)
    planner.finish(more)
    assert list(planner.plan()) == [1, 2, 3, 11], "one seat for each"
    assert flood[2].num_computed == 5, "nothing is computed again"


def test_seats_are_shared_by_the_weights_of_classes() -> None:
    planner = Planner(max_num_seqs=20)
    for priority in Priority:
        for _ in range(40):
            planner.add(1, max_tokens=90, priority=priority)
    for _ in range(3):
        planner.plan()
    seats = Counter(sequence.flow[0] for sequence in planner.batcher.running)
    assert seats == {Priority.PREMIUM: 16, Priority.INTERACTIVE: 3, Priority.BATCH: 1}


def test_a_flow_below_its_share_keeps_its_pages_when_others_grow() -> None:
    planner = Planner(num_blocks=8)
    flood = [planner.add(4, max_tokens=20, tenant="flood") for _ in range(4)]
    mine = planner.add(4, max_tokens=12, tenant="mine")
    for step in range(40):
        planner.plan()
        assert mine.num_computed > 0 or step < 2, "it waits until the flood has grown at most"
        for sequence in list(planner.batcher.running):
            if len(sequence.output_tokens) == sequence.max_new_tokens:
                planner.finish(sequence)
        if mine.state is ENDED:
            break
    assert mine.num_preemptions == 0
    assert mine.state is ENDED, "it never waited for the flood"
    assert any(sequence.num_preemptions for sequence in flood)


def test_sequences_in_flight_are_neither_planned_nor_displaced() -> None:
    planner = Planner(num_blocks=3)
    planner.add(4, max_tokens=9)
    last = planner.add(4, num_received=2, max_tokens=9)
    planner.plan()
    last.steps, last.num_in_flight = [7], 1
    assert planner.plan() == {}
    assert len(last.pages) == 2
    last.steps, last.num_in_flight = [], 0
    assert planner.plan() == {1: 1}


# ------------------------------------------------------------ something always moves


def test_a_blocked_front_does_not_hold_up_those_that_have_pages() -> None:
    planner = Planner(num_blocks=4)
    grows = planner.add(4, max_tokens=20)
    planner.plan()
    front = planner.add(12)
    ready = planner.add(3, num_received=1)
    behind = planner.add(1)
    assert planner.plan() == {1: 1, 3: 1}
    assert [front.state, ready.state, behind.state] == [WAITING, RUNNING, WAITING]
    assert grows.num_preemptions == 0


def test_with_nothing_to_run_the_front_takes_pages_from_all_behind_it() -> None:
    planner = Planner(num_blocks=4)
    front = planner.add(12)
    others = [planner.add(4, num_received=1) for _ in range(4)]  # each lacks a page to go on
    assert planner.plan() == {1: 12}
    assert front.state is RUNNING
    assert [len(other.pages) for other in others] == [1, 0, 0, 0]


def test_with_nothing_to_run_the_front_takes_the_seat_of_one_behind_it() -> None:
    planner = Planner(num_blocks=3, max_num_seqs=1)
    front = planner.add(4, num_received=1)
    runs = planner.add(3, num_received=1)
    planner.pool.allocate(1)
    assert planner.plan() == {2: 1}  # the front lacks a page, the other does not yet
    # Now both lack one: who runs can take none from the front, so the front takes its place.
    assert planner.plan() == {1: 1}
    assert (front.state, runs.state, runs.pages) == (RUNNING, WAITING, [])


def test_the_front_leaves_those_before_it_alone() -> None:
    planner = Planner(num_blocks=2, max_num_seqs=1)
    first = planner.add(4, max_tokens=9)
    planner.plan()
    planner.pool.allocate(1)
    planner.add(1)
    assert planner.plan() == {}
    assert (first.state, len(first.pages)) == (RUNNING, 1)


# ------------------------------------------------------------ what can never run


def test_a_sequence_that_never_fits_the_pages_fails_and_others_go_on() -> None:
    planner = Planner(num_blocks=2)
    never = planner.add(9)
    planner.add(3)
    batch = planner.batcher.plan()
    assert [sequence for sequence, _ in batch.failed] == [never]
    failure = batch.failed[0][1]
    assert failure.status == 400
    assert "9 tokens need 3 blocks of 4, this worker's KV memory has 2" in failure.message
    assert never.state is ENDED
    assert planner.commit(batch) == {2: 3}


def test_a_sequence_that_outgrows_the_pages_fails_with_its_pages_still_held() -> None:
    planner = Planner(num_blocks=2)
    sequence = planner.add(8, max_tokens=3)
    planner.plan()
    batch = planner.batcher.plan()
    assert [failed for failed, _ in batch.failed] == [sequence]
    assert len(sequence.pages) == 2
    assert planner.pool.num_held == 2


def test_a_prompt_that_fills_the_model_fails() -> None:
    planner = Planner(max_model_len=10)
    planner.add(10)
    fits = planner.add(9)
    batch = planner.batcher.plan()
    assert "with max_model_len 10 no further one" in batch.failed[0][1].message
    assert planner.commit(batch) == {fits.sequence_id: 9}


# ------------------------------------------------------------ pages of a flow below its share


@given(
    floods=st.lists(
        st.tuples(
            st.tuples(st.sampled_from(Priority), st.sampled_from("abc")),
            st.integers(1, 12),
            st.integers(1, 30),
            st.integers(0, 20),
        ),
        max_size=5,
    ),
    num_pages=st.integers(4, 60),
    num_seats=st.integers(1, 16),
    num_steps=st.integers(1, 12),
    newcomer=st.sampled_from(Priority),
)
def test_a_newcomer_gets_pages_up_to_its_share_after_any_floods(
    floods: list[tuple[tuple[Priority, str], int, int, int]], num_pages: int, num_seats: int,
    num_steps: int, newcomer: Priority,
) -> None:  # fmt: skip
    """At once, however many sequences the floods run: all that is not theirs by share. Of each,
    what it holds outside of the engine and its first sequence stay.
    """
    planner = Planner(num_blocks=num_pages, max_num_seqs=num_seats)
    outside: Counter[Flow] = Counter()
    for (priority, tenant), number, num_tokens, num_outside in floods:
        for _ in range(number):
            if planner.config.num_pages(num_tokens) <= num_pages:
                planner.add(num_tokens, priority=priority, tenant=tenant)
        held = planner.pool.allocate(min(num_outside, planner.pool.num_available // 2)) or []
        outside[priority, tenant] += len(held)
    for _ in range(num_steps):
        planner.plan()
    batcher, mine = planner.batcher, (newcomer, "mine")
    lines = (*batcher.running, *batcher.waiting)
    flows = {one.flow for one in lines} | {flow for flow, number in outside.items() if number}
    shares = fair_shares([*flows, mine])
    left = num_pages
    for flow in flows:
        own = [one for one in lines if one.flow == flow and one.pages]
        first = min(own, key=rank, default=None)
        kept = outside[flow] + (len(first.pages) if first is not None else 0)
        left -= max(math.floor(shares[flow] * num_pages), kept)
    due = min(left, math.floor(shares[mine] * num_pages))
    if due > 0:
        assert batcher.reclaim(mine, due, +outside) is not None
        assert planner.pool.allocate(due) is not None
    planner.pool.check_integrity()


def test_what_a_flow_holds_outside_counts_against_its_share() -> None:
    planner = Planner(num_blocks=8, max_num_seqs=8)
    a, b = (Priority.INTERACTIVE, "a"), (Priority.INTERACTIVE, "b")
    for _ in range(4):
        planner.add(7, tenant="a")
    planner.plan()
    assert planner.pool.num_available == 2
    assert planner.batcher.reclaim(b, 5, {}) is None, "its share is half"
    assert planner.batcher.reclaim(b, 1, {b: 4}) is None, "it has its share outside"
    assert planner.batcher.reclaim(b, 3, {a: 2, b: 1}) is not None
    assert planner.pool.num_available >= 3


def test_pages_are_claimed_before_those_that_wait_longer() -> None:
    """Prefill gives what others hand over to who is due it, not to the front of the queue."""
    planner = Planner(num_blocks=4, max_num_seqs=4)
    a = (Priority.INTERACTIVE, "a")
    held = planner.pool.allocate(4) or []
    front = planner.add(4, tenant="a")
    mine = planner.add(6, tenant="b")
    assert planner.plan() == {}
    standing = planner.batcher.standing(outside={a: 4})
    assert planner.batcher.due(standing) == [(mine, 2)]
    assert planner.batcher.due(planner.batcher.standing(outside={a: 1})) == [], "none has more"
    assert not planner.batcher.claim(mine)
    planner.pool.release(held[:2])
    assert planner.batcher.claim(mine)
    assert planner.plan() == {mine.sequence_id: 6}
    assert front.state is WAITING
