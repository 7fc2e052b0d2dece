"""What routers outside are told of blocks: with their tokens, once, and when they are gone."""

from __future__ import annotations

from collections import defaultdict

import pytest

from mooncake.base import BlockEvents, Tier, WorkerRef, pack_tokens, unpack_tokens
from mooncake.base.block_events.kv_events import BlockRemoved, BlockStored, KvEvent
from mooncake.kvstore.index.prefix_index import Replica
from mooncake.scheduler.placement import block_feed
from mooncake.scheduler.placement.block_feed import BlockFeed

KEYS = [bytes([n]) * 16 for n in range(1, 9)]
TOKENS = list(range(100, 132))
NUMBERS = [int.from_bytes(key[:8], "big") for key in KEYS]


class World:
    """A feed with the workers that it looks at."""

    def __init__(self, max_blocks: int = 100) -> None:
        self.held: dict[bytes, set[tuple[str, Tier]]] = defaultdict(set)
        self.batches: list[list[KvEvent]] = []
        self.feed = BlockFeed(
            lambda key: [Replica(ref(name), tier) for name, tier in self.held[key]],
            lambda events: self.batches.append(list(events)),
            max_blocks,
        )

    def report(
        self,
        worker: str = "p0",
        tier: Tier = Tier.HBM,
        *,
        stored: tuple[int, ...] = (),
        removed: tuple[int, ...] = (),
        snapshot: bool = False,
    ) -> None:
        """Let a worker report blocks, by their index in `KEYS`."""
        if snapshot:
            for holders in self.held.values():
                holders.discard((worker, tier))
        for index in removed:
            self.held[KEYS[index]].discard((worker, tier))
        for index in stored:
            self.held[KEYS[index]].add((worker, tier))
        self.feed.on_blocks(
            BlockEvents(
                worker=ref(worker), tier=tier, sequence_no=0, snapshot=snapshot,
                stored=[KEYS[index] for index in stored], removed=[KEYS[n] for n in removed],
            )
        )  # fmt: skip

    def learn(self, keys: list[bytes], tokens: list[int]) -> None:
        self.feed.learn(keys, lambda: unpack_tokens(pack_tokens(tokens)), 4)

    def said(self) -> list[KvEvent]:
        """Return what has been published since the last call, once nothing is in doubt."""
        while self.feed.tick(0.0) is not None:
            pass
        batches, self.batches = self.batches, []
        return [event for batch in batches for event in batch]


def ref(name: str) -> WorkerRef:
    return WorkerRef(name, "e", "address")


def stored(first: int, stop: int, medium: str = "GPU") -> BlockStored:
    return BlockStored(
        block_hashes=NUMBERS[first:stop],
        parent_block_hash=NUMBERS[first - 1] if first else None,
        token_ids=TOKENS[4 * first : 4 * stop],
        block_size=4,
        medium=medium,
    )


@pytest.fixture
def world() -> World:
    return World()


def test_a_prompt_s_blocks_are_one_chain_with_its_tokens(world: World) -> None:
    world.learn(KEYS[:3], TOKENS[:12])
    assert world.said() == []
    world.report(stored=(0, 1, 2))
    assert world.said() == [stored(0, 3)]


def test_blocks_of_an_answer_wait_for_its_tokens(world: World) -> None:
    world.learn(KEYS[:1], TOKENS[:4])
    world.report(stored=(0, 1, 2))
    assert world.said() == [stored(0, 1)]
    world.learn(KEYS[:3], TOKENS[:12])
    assert world.said() == [stored(1, 3)]


def test_a_second_worker_is_no_news_and_the_last_one_s_loss_is(world: World) -> None:
    world.learn(KEYS[:2], TOKENS[:8])
    world.report("p0", stored=(0, 1))
    world.report("d0", stored=(0, 1))
    world.report("p0", removed=(1,))
    assert world.said() == [stored(0, 2)]
    world.report("d0", removed=(1,))
    assert world.said() == [BlockRemoved(block_hashes=NUMBERS[1:2], medium="GPU")]
    world.report("d0", stored=(1,))
    assert world.said() == [stored(1, 2)]


def test_each_kind_of_memory_is_told_apart(world: World) -> None:
    world.learn(KEYS[:2], TOKENS[:8])
    world.report("k0", Tier.DRAM, stored=(0, 1))
    world.report("k0", Tier.SSD, stored=(0,))
    world.report("k0", Tier.OBJECT, stored=(0,))
    world.report("k0", Tier.DRAM, removed=(0,))
    assert world.said() == [
        stored(0, 2, "CPU"),
        stored(0, 1, "STORAGE"),
        stored(0, 1, "OBJECT"),
        BlockRemoved(block_hashes=NUMBERS[:1], medium="CPU"),
    ]


def test_a_snapshot_replaces_what_its_worker_held(world: World) -> None:
    world.learn(KEYS[:3], TOKENS[:12])
    world.report(stored=(0, 1))
    world.said()
    world.report(stored=(0, 2), snapshot=True)
    assert world.said() == [
        stored(2, 3),
        BlockRemoved(block_hashes=NUMBERS[1:2], medium="GPU"),
    ]


def test_a_lost_worker_s_blocks_are_gone(world: World) -> None:
    world.learn(KEYS[:2], TOKENS[:8])
    world.report(stored=(0, 1))
    world.said()
    world.held.clear()
    world.feed.doubt_all()
    assert world.said() == [BlockRemoved(block_hashes=NUMBERS[:2], medium="GPU")]


def test_of_too_many_blocks_the_ones_unused_for_longest_are_reported_as_gone() -> None:
    world = World(max_blocks=2)
    world.learn(KEYS[:2], TOKENS[:8])
    world.report(stored=(0, 1))
    world.learn(KEYS[:1], TOKENS[:4])  # used again
    world.said()
    world.report(stored=(2,))
    world.learn(KEYS[2:3], TOKENS[8:12])
    removed, come = world.said()
    assert removed == BlockRemoved(block_hashes=NUMBERS[1:2], medium="GPU")
    assert isinstance(come, BlockStored)
    assert come.block_hashes == NUMBERS[2:3]


def test_many_blocks_in_doubt_are_looked_at_some_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_feed, "DOUBTS_A_TICK", 2)
    world.learn(KEYS[:3], TOKENS[:12])
    world.report(stored=(0, 1, 2))
    world.said()
    world.held.clear()
    world.feed.doubt_all()
    assert world.feed.tick(5.0) == 5.0
    assert world.batches == [[BlockRemoved(block_hashes=NUMBERS[:2], medium="GPU")]]
    assert world.feed.tick(5.0) is None
    assert world.batches[1:] == [[BlockRemoved(block_hashes=NUMBERS[2:3], medium="GPU")]]


def test_tokens_are_asked_for_only_where_a_block_is_new(world: World) -> None:
    world.learn(KEYS[:3], TOKENS[:12])

    def refuse() -> memoryview[int]:
        raise AssertionError("nothing is new")

    world.feed.learn(KEYS[:3], refuse, 4)
