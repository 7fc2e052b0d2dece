"""Who uses a chain uses all of it, wherever each block lay: the pool is told of a head that was in
HBM too, once for each request, and of one chain the tail goes before the head.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import PinBlocks, PinGranted, PutGranted, PutStart
from mooncake.base.messages import ChainHead
from mooncake.kvstore.eviction import POLICIES
from mooncake.sim.world.disk import SimMedium
from tests.support.examples import examples
from tests.support.kvstore.node_world import NodeWorld, keys, worker

WORKER, OTHER = worker("prefill-0"), worker("prefill-1")
SHARED, LENGTH = 2, 6


def chain_of(number: int, length: int) -> list[bytes]:
    """Return a conversation: all begin with the same blocks, then each goes its own way."""
    return keys(*range(1, SHARED + 1), *range(100 * number, 100 * number + LENGTH))[:length]


class Engine:
    """Does what a worker does with a prompt: some blocks in HBM, some from the pool, the rest
    computed and put.
    """

    def __init__(self, world: NodeWorld, ref=WORKER) -> None:
        self.world = world
        self.ref = ref

    def run(self, chain: list[bytes], num_in_hbm: int, num_wanted: int) -> None:
        """Fetch up to `num_wanted` blocks if the pool has them, put what was computed."""
        have, told = num_in_hbm, 0
        if have < num_wanted:
            ask = PinBlocks(
                reader=self.ref, ticket=self.world.ticket(), keys=chain[have:num_wanted],
                head=ChainHead(chain[:have]),
            )  # fmt: skip
            granted = self.world.answer(ask, PinGranted)
            self.world.unpin(self.ref, granted)
            have += granted.num_blocks
            told = have if granted.num_blocks else 0
        start = PutStart(
            writer=self.ref, ticket=self.world.ticket(), keys=chain[have:],
            head=ChainHead(chain[:have], told),
        )  # fmt: skip
        self.world.end(self.ref, self.world.answer(start, PutGranted))


a_request = st.tuples(
    st.integers(1, 3), st.integers(1, LENGTH), st.integers(0, LENGTH), st.integers(0, LENGTH)
)


@settings(max_examples=examples(150), deadline=None)
@given(requests=st.lists(a_request, min_size=1, max_size=25), num_blocks=st.integers(1, 14))
def test_of_what_one_engine_uses_the_pool_holds_heads_before_tails(
    requests: list[tuple[int, int, int, int]], num_blocks: int
) -> None:
    world = NodeWorld(num_blocks, high_watermark=1.0)
    engine = Engine(world)
    ever: set[bytes] = set()
    for number, length, hbm, wanted in requests:
        chain = chain_of(number, length)
        num_in_hbm = 0  # as far as the pool has it still: HBM is not the only place of a head
        while num_in_hbm < min(hbm, length) and chain[num_in_hbm] in world.inventory:
            num_in_hbm += 1
        engine.run(chain, num_in_hbm, min(wanted, length))
        ever.update(chain)
        for other in range(1, 4):
            here = [key in world.inventory for key in chain_of(other, LENGTH)]
            assert here == sorted(here, reverse=True), "a tail outlived its head"
    assert world.inventory <= ever


@settings(max_examples=examples(100), deadline=None)
@given(
    policy=st.sampled_from(sorted(POLICIES)),
    requests=st.lists(a_request, min_size=1, max_size=12),
)
def test_each_request_is_one_use_of_each_block_of_its_chain(
    policy: str, requests: list[tuple[int, int, int, int]]
) -> None:
    """Nothing is evicted: what has been asked for so often goes to disk, and nothing else."""
    least = 3
    world = NodeWorld(
        32, media=[SimMedium()], ssd_blocks=64, eviction=policy, ssd_eviction=policy,
        ssd_write_at=0.0, ssd_min_uses=least,
    )  # fmt: skip
    world.tick(1.0)
    engine = Engine(world)
    uses: Counter[bytes] = Counter()
    for number, length, hbm, wanted in requests:
        chain = chain_of(number, length)
        engine.run(
            chain, min(hbm, sum(key in world.inventory for key in chain)), min(wanted, length)
        )
        uses.update(chain)
        world.tick(world.now + 1)
        due = {key for key, count in uses.items() if count >= least}
        assert world.on_ssd == due & world.inventory
    world.node.check_integrity()


def test_a_head_that_is_always_hit_in_hbm_goes_to_disk_and_outlives_what_is_used_less() -> None:
    world = NodeWorld(4, media=[SimMedium()], ssd_blocks=8, high_watermark=1.0, ssd_write_at=0.0)
    world.tick(1.0)
    engine = Engine(world)
    hot = keys(1, 2)
    engine.run(hot, 0, 0)
    engine.run(hot, 2, 2)
    world.tick(world.now + 1)
    assert world.on_ssd == set(hot)
    engine.run(keys(11, 12), 0, 0)
    engine.run(hot, 2, 2)
    engine.run(keys(21, 22), 0, 0)
    assert world.inventory == set(keys(1, 2, 21, 22))


def test_a_head_is_not_evicted_for_its_own_tail() -> None:
    world = NodeWorld(4, high_watermark=1.0)
    engine = Engine(world)
    engine.run(keys(1, 2), 0, 0)
    engine.run(keys(11, 12), 0, 0)
    engine.run(keys(1, 2, 3, 4), 2, 2)
    assert world.inventory == set(keys(1, 2, 3, 4))
    engine.run(keys(1, 2, 3, 4, 5), 4, 4)
    assert world.inventory == set(keys(1, 2, 3, 4)), "no room for more of it"


def test_a_chain_read_from_elsewhere_keeps_its_head_where_its_tail_is_read() -> None:
    """The engine of another node has the head in HBM and reads only the tail here."""
    world = NodeWorld(4, high_watermark=1.0)
    Engine(world).run(keys(1, 2), 0, 0)
    Engine(world).run(keys(11), 0, 0)
    ask = PinBlocks(reader=OTHER, ticket=world.ticket(), keys=keys(2), head=ChainHead(keys(1)))
    world.unpin(OTHER, world.answer(ask, PinGranted))
    Engine(world).run(keys(21, 22), 0, 0)
    assert world.inventory == set(keys(1, 2, 21, 22))


def test_a_miss_counts_for_nothing() -> None:
    world = NodeWorld(8, media=[SimMedium()], ssd_blocks=8, ssd_write_at=0.0)
    world.tick(1.0)
    Engine(world).run(keys(1), 0, 0)
    ask = PinBlocks(reader=OTHER, ticket=world.ticket(), keys=keys(2), head=ChainHead(keys(1)))
    assert world.answer(ask, PinGranted).num_blocks == 0
    world.tick(world.now + 1)
    assert world.on_ssd == set()
