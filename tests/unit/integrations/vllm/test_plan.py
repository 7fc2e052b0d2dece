"""What the scheduler's side decides: look-ups that never hold a request up, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from mooncake.base import BlockKey
from mooncake.integrations.vllm.chunks import Packing, TokenChain
from mooncake.integrations.vllm.plan import Load, Planner, Save, Scheduled, Use

BLOCK = 4
"""Tokens."""
TIMEOUT_S = 1.0
USE = Use(lookup_timeout_s=TIMEOUT_S, load_timeout_s=5.0)


@dataclass
class Request:
    request_id: str
    all_token_ids: list[int]
    num_preemptions: int = 0
    cache_salt: str | None = None
    kv_transfer_params: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@dataclass
class Answer:
    chain: Sequence[BlockKey]
    found: int | None = None
    promised: tuple[int, float] = (0, 0.0)

    def done(self) -> bool:
        return self.found is not None

    def result(self) -> int:
        assert self.found is not None
        return self.found


@dataclass
class Pool:
    """A port that answers when the test says so."""

    packing: Packing | None = Packing(100, 1)  # noqa: RUF009
    asked: list[Answer] = field(default_factory=list)
    found: int | None = None
    """What all look-ups find at once."""

    def ask(self, chain: Sequence[BlockKey], promised: int, within_s: float) -> Answer:
        self.asked.append(Answer(chain, self.found, (promised, within_s)))
        return self.asked[-1]


def make(pool: Pool, namespace: str = "", use: Use = USE) -> Planner:
    return Planner(pool, BLOCK, namespace, use)


def keys(tokens: list[int], count: int, blocks: int = 1) -> list[BlockKey]:
    return TokenChain("", "", BLOCK * blocks).upto(tokens, count)


@pytest.fixture
def pool() -> Pool:
    return Pool()


TOKENS = list(range(1, 19))
"""Four whole blocks and two tokens."""


def test_a_request_waits_for_its_look_up_and_then_loads(pool: Pool) -> None:
    planner, request = make(pool), Request("r", TOKENS)
    assert planner.num_new_matched(request, 0, 0.0) == (None, False)
    assert planner.num_new_matched(request, 0, 0.5) == (None, False)
    assert planner.is_asking
    [asked] = pool.asked
    assert asked.chain == keys(TOKENS, 4)
    asked.found = 3
    for _ in range(2):  # vLLM may ask again when it had no room
        assert planner.num_new_matched(request, 0, 0.6) == (12, True)
    planner.allocated("r", [7, 8, 9, 5, 6], 12)
    jobs = planner.step([])
    assert jobs.loads == [Load("r", keys(TOKENS, 3), [7, 8, 9], 0)]
    assert jobs.idle
    assert planner.step([]).loads == []


def test_what_the_engine_has_itself_is_not_loaded(pool: Pool) -> None:
    pool.found = 3
    planner, request = make(pool), Request("r", TOKENS)
    assert planner.num_new_matched(request, 8, 0.0) == (4, True)
    planner.allocated("r", [1, 2, 3, 4, 5], 4)
    assert planner.step([]).loads == [Load("r", keys(TOKENS, 3)[2:], [3], 0)]


def test_a_chunk_of_several_blocks_may_be_known_in_part() -> None:
    pool = Pool(Packing(100, 2), found=2)
    planner, request = make(pool), Request("r", TOKENS)
    assert planner.num_new_matched(request, 4, 0.0) == (12, True)
    planner.allocated("r", [1, 2, 3, 4, 5], 12)
    assert planner.step([]).loads == [Load("r", keys(TOKENS, 2, 2), [2, 3, 4], 1)]


def test_the_last_token_is_always_computed(pool: Pool) -> None:
    pool.found = 4
    planner = make(pool)
    assert planner.num_new_matched(Request("r", TOKENS[:16]), 0, 0.0) == (12, True)
    assert len(pool.asked[0].chain) == 3


@pytest.mark.parametrize("found", [0, 2])
def test_nothing_more_than_the_engine_has_is_a_miss(pool: Pool, found: int) -> None:
    pool.found = found
    assert make(pool).num_new_matched(Request("r", TOKENS), 8, 0.0) == (0, False)


def test_a_prompt_without_a_whole_block_is_not_looked_up(pool: Pool) -> None:
    assert make(pool).num_new_matched(Request("r", TOKENS[:4]), 0, 0.0) == (0, False)
    assert make(pool).num_new_matched(Request("r", TOKENS), 16, 0.0) == (0, False)
    assert pool.asked == []


def test_a_pool_that_says_nothing_is_a_miss_in_time(pool: Pool) -> None:
    planner, request = make(pool), Request("r", TOKENS)
    assert planner.num_new_matched(request, 0, 0.0) == (None, False)
    assert planner.num_new_matched(request, 0, TIMEOUT_S) == (0, False)
    assert planner.num_new_matched(request, 0, TIMEOUT_S + 1) == (0, False), (
        "and is not asked again"
    )
    assert len(pool.asked) == 1
    pool.asked[0].found = 4  # too late
    planner.allocated("r", [1, 2, 3, 4, 5], 0)
    assert planner.step([]).loads == []


def test_a_pool_that_was_not_reached_is_a_miss_at_once() -> None:
    planner = make(Pool(packing=None))
    assert planner.num_new_matched(Request("r", TOKENS), 0, 0.0) == (0, False)
    planner.allocated("r", [1, 2, 3, 4, 5], 0)
    assert planner.step([Scheduled("r", 0, 18, [1, 2, 3, 4, 5])]).saves == []


def test_a_request_is_looked_up_once_for_each_preemption(pool: Pool) -> None:
    """A load that failed must not be begun again and again."""
    pool.found = 2
    planner, request = make(pool), Request("r", TOKENS)
    assert planner.num_new_matched(request, 0, 0.0) == (8, True)
    planner.allocated("r", [1, 2, 3, 4, 5], 8)
    assert planner.num_new_matched(request, 0, 0.0) == (0, False)
    request.num_preemptions = 1
    assert planner.num_new_matched(request, 0, 0.0) == (8, True)
    planner.allocated("r", [6, 7, 8, 9, 1], 8)
    assert [load.block_ids for load in planner.step([]).loads] == [[1, 2], [6, 7]]


def test_chunks_are_saved_once_they_are_whole(pool: Pool) -> None:
    pool.found = 1
    planner, request, blocks = make(pool), Request("r", list(TOKENS)), [1, 2, 3, 4, 5]
    planner.num_new_matched(request, 0, 0.0)
    planner.allocated("r", blocks, 4)
    assert planner.step([Scheduled("r", 4, 6, blocks)]).saves == [Save(keys(TOKENS, 2)[1:], [2])]
    assert planner.step([Scheduled("r", 10, 8, blocks)]).saves == [
        Save(keys(TOKENS, 4)[2:], [3, 4])
    ]
    request.all_token_ids.append(77)
    assert planner.step([Scheduled("r", 18, 1, blocks)]).saves == []
    # The token of the step before is not told yet, so the block behind it has no key.
    assert planner.step([Scheduled("r", 19, 1, blocks)]).saves == []
    request.all_token_ids.append(78)
    [save] = planner.step([Scheduled("r", 19, 1, blocks)]).saves
    assert save == Save(keys(request.all_token_ids, 5)[4:], [5])


def test_what_the_pool_had_is_not_saved_again(pool: Pool) -> None:
    pool.found = 4
    planner = make(pool)
    planner.num_new_matched(Request("r", TOKENS), 0, 0.0)
    planner.allocated("r", [1, 2, 3, 4, 5], 16)
    assert planner.step([Scheduled("r", 16, 2, [1, 2, 3, 4, 5])]).saves == []


def test_requests_that_end_leave_nothing_but_the_load_that_frees_their_blocks(pool: Pool) -> None:
    pool.found = 2
    planner = make(pool)
    planner.num_new_matched(Request("r", TOKENS), 0, 0.0)
    planner.allocated("r", [1, 2, 3, 4, 5], 8)
    planner.finished("r")
    planner.finished("never seen")
    assert [load.request_id for load in planner.step([]).loads] == ["r"]
    assert planner.num_tracked == 0


def test_after_a_reset_nothing_of_before_is_named(pool: Pool) -> None:
    pool.found = 2
    planner, request = make(pool), Request("r", TOKENS)
    planner.num_new_matched(request, 0, 0.0)
    planner.allocated("r", [1, 2, 3, 4, 5], 0)
    planner.start_anew("other")
    assert planner.step([Scheduled("r", 0, 18, [1, 2, 3, 4, 5])]).saves == []
    planner.num_new_matched(request, 0, 0.0)
    assert not set(pool.asked[1].chain) & set(pool.asked[0].chain)


def test_salts_and_namespaces_are_part_of_the_keys(pool: Pool) -> None:
    planner = make(pool)
    planner.num_new_matched(Request("a", TOKENS), 0, 0.0)
    planner.num_new_matched(Request("b", TOKENS, cache_salt="s"), 0, 0.0)
    make(pool, "n").num_new_matched(Request("c", TOKENS), 0, 0.0)
    assert len({asked.chain[0] for asked in pool.asked}) == 3


def test_an_engine_that_only_gives_asks_for_nothing(pool: Pool) -> None:
    pool.found = 4
    use = Use(takes=False, lookup_timeout_s=TIMEOUT_S, load_timeout_s=5.0)
    planner = make(pool, use=use)
    assert planner.num_new_matched(Request("r", TOKENS), 0, 0.0) == (0, False)
    planner.allocated("r", [1, 2, 3, 4, 5], 0)
    jobs = planner.step([Scheduled("r", 0, 18, [1, 2, 3, 4, 5])])
    assert (pool.asked, jobs.loads) == ([], [])
    assert jobs.saves == [Save(keys(TOKENS, 4), [1, 2, 3, 4])]


def test_an_engine_that_only_takes_saves_nothing(pool: Pool) -> None:
    pool.found = 1
    use = Use(gives=False, lookup_timeout_s=TIMEOUT_S, load_timeout_s=5.0)
    planner = make(pool, use=use)
    request = Request("r", TOKENS, kv_transfer_params={"do_remote_decode": True})
    assert planner.num_new_matched(request, 0, 0.0) == (4, True)
    planner.allocated("r", [1, 2, 3, 4, 5], 4)
    assert planner.step([Scheduled("r", 4, 14, [1, 2, 3, 4, 5])]).saves == []
    assert planner.finished("r") is None, "and promises nothing"


def test_what_one_engine_promises_another_waits_for(pool: Pool) -> None:
    pool.found = 0
    first, second = make(pool), make(pool)
    request = Request("r", TOKENS, kv_transfer_params={"do_remote_decode": True})
    assert first.num_new_matched(request, 0, 0.0) == (0, False)
    first.allocated("r", [1, 2, 3, 4, 5], 0)
    first.step([Scheduled("r", 0, 13, [1, 2, 3, 4, 5])])
    promise = first.finished("r")
    assert promise == {"mooncake_tokens": 12}
    pool.found = None
    follower = Request("r2", TOKENS, kv_transfer_params=promise)
    assert second.num_new_matched(follower, 0, 0.0) == (None, False)
    assert pool.asked[-1].promised == (3, 5.0)
    assert second.num_new_matched(follower, 0, 5.5) == (None, False)
    assert second.num_new_matched(follower, 0, 5.0 + TIMEOUT_S) == (0, False), "kept from no step"


@pytest.mark.parametrize(
    "params",
    [
        None, {}, {"mooncake_tokens": "8"}, {"mooncake_tokens": -8}, {"mooncake_tokens": 3},
        "mooncake_tokens", 8, ["do_remote_decode"],
    ],
    ids=repr,
)  # fmt: skip
def test_whatever_is_no_promise_is_not_waited_for(pool: Pool, params: Any) -> None:
    planner = make(pool)
    planner.num_new_matched(Request("r", TOKENS, kv_transfer_params=params), 0, 0.0)
    assert pool.asked[0].promised == (0, 0.0)
    assert planner.finished("r") is None


def test_no_more_is_waited_for_than_the_prompt_has(pool: Pool) -> None:
    params = {"mooncake_tokens": 10**6}
    make(pool).num_new_matched(Request("r", TOKENS, kv_transfer_params=params), 0, 0.0)
    assert pool.asked[0].promised == (4, 5.0)


def test_what_the_engine_has_itself_is_not_waited_for(pool: Pool) -> None:
    params = {"mooncake_tokens": 8}
    make(pool).num_new_matched(Request("r", TOKENS, kv_transfer_params=params), 8, 0.0)
    make(pool).num_new_matched(Request("r", TOKENS, kv_transfer_params=params), 4, 0.0)
    assert [asked.promised for asked in pool.asked] == [(0, 0.0), (2, 5.0)]
