"""Each reason why a block is not reused, from what the Conductor knows; and they always add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict

from mooncake.base import BlockEvents, BlockKey, Role, Tier, WorkerRef
from mooncake.base.request import CacheHits, CacheMisses, CacheUse
from mooncake.scheduler.placement.admission import Placement, PrefixEnds
from mooncake.scheduler.placement.conductor import Conductor
from tests.support.scheduler.scheduling import conductor, hello, keys_of, request

P0, D0 = hello("p0", Role.PREFILL), hello("d0", Role.DECODE)
KV0 = hello("kv0", Role.KVSTORE, node_id="node-p0")
KV1 = hello("kv1", Role.KVSTORE, node_id="node-d0")
ASKED = request("r", 41)
KEYS = keys_of(ASKED)
"""Ten blocks of four tokens, and a token that is always computed."""


class Scene:
    def __init__(self, **config: Any) -> None:
        self.conductor: Conductor = conductor([P0, D0, KV0, KV1], **config)
        self._numbers: dict[str, int] = {}

    def report(
        self,
        worker: WorkerRef,
        stored: Sequence[BlockKey] = (),
        removed: Sequence[BlockKey] = (),
        tier: Tier = Tier.HBM,
    ) -> None:
        number = self._numbers[worker.worker_id] = self._numbers.get(worker.worker_id, 0) + 1
        events = BlockEvents(
            worker=worker, tier=tier, sequence_no=number, stored=list(stored), removed=list(removed)
        )
        self.conductor.on_blocks(events)

    def ends(self) -> PrefixEnds:
        placed = self.conductor.place(ASKED, KEYS, 0, 0.0)
        assert isinstance(placed, Placement)
        return placed.prefix_ends


def test_nothing_is_known_of_a_new_prompt() -> None:
    assert Scene().ends() == PrefixEnds(0, 0, 0, 0)


def test_own_pages_are_counted_on() -> None:
    scene = Scene()
    scene.report(P0.worker, KEYS)
    assert scene.ends() == PrefixEnds(10, 10, 10, 10)


def test_what_a_pool_has_and_is_not_fetched() -> None:
    scene = Scene(fetch_remote=False)
    scene.report(KV1.worker, KEYS[:6], tier=Tier.DRAM)
    assert scene.ends() == PrefixEnds(0, 6, 6, 6)


def test_what_only_other_engines_have() -> None:
    scene = Scene()
    scene.report(P0.worker, KEYS[:2])
    scene.report(D0.worker, KEYS[:7])
    assert scene.ends() == PrefixEnds(2, 2, 7, 7)


def test_what_was_removed_everywhere() -> None:
    scene = Scene()
    scene.report(KV0.worker, KEYS[:8], tier=Tier.DRAM)
    scene.report(KV0.worker, removed=KEYS[:8], tier=Tier.DRAM)
    assert scene.ends() == PrefixEnds(0, 0, 0, 8)


def test_what_one_worker_removed_and_another_has_is_not_evicted() -> None:
    scene = Scene()
    scene.report(D0.worker, KEYS[:8])
    scene.report(D0.worker, removed=KEYS[:8])
    scene.report(P0.worker, KEYS[:8])
    assert scene.ends() == PrefixEnds(8, 8, 8, 8)


def test_what_was_lost_with_its_worker_is_not_seen_any_more() -> None:
    scene = Scene()
    scene.report(KV0.worker, KEYS[:8], tier=Tier.DRAM)
    scene.conductor.on_lost("kv0")
    assert scene.ends() == PrefixEnds(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("cached", "reason", "number"),
    [(4, "fetch_failed", 4), (8, "recomputed", 4), (12, "out_of_reach", 8), (20, "evicted", 12)],
)
def test_reuse_that_goes_further_than_planned_leaves_fewer_misses(
    cached: int, reason: str, number: int
) -> None:
    use = PrefixEnds(2, 3, 5, 8).use(41, 4, cached, None)
    assert use.hits == CacheHits(hbm=cached)
    assert asdict(use.misses)[reason] == number
    assert use.misses.not_seen == 8


def test_tiers_are_those_of_the_blocks_that_came() -> None:
    use = PrefixEnds(9, 9, 9, 9).use(41, 4, 36, CacheHits(dram=2, ssd=1, peer=3))
    assert use == CacheUse(
        hits=CacheHits(hbm=12, dram=8, ssd=4, peer=12), misses=CacheMisses(not_seen=4)
    )


LENGTHS = st.integers(0, 30)


@given(
    num_tokens=st.integers(1, 100),
    cached=st.integers(0, 120),
    lengths=st.lists(LENGTHS, min_size=4, max_size=4),
    fetched=st.none() | st.builds(CacheHits, dram=LENGTHS, ssd=LENGTHS, peer=LENGTHS),
)
def test_hits_and_misses_are_all_reusable_blocks(
    num_tokens: int, cached: int, lengths: list[int], fetched: CacheHits | None
) -> None:
    ends = PrefixEnds(*(sum(lengths[:count]) for count in (1, 2, 3, 4)))
    use = ends.use(num_tokens, 4, cached, fetched)
    hits, misses = asdict(use.hits), asdict(use.misses)
    assert min(*hits.values(), *misses.values()) >= 0
    assert sum(hits.values()) + sum(misses.values()) == (num_tokens - 1) // 4 * 4
    assert sum(hits.values()) == min(cached // 4 * 4, (num_tokens - 1) // 4 * 4)
