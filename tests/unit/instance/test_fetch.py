"""A fetch ends once, with the blocks that truly arrived; the owner is always unpinned."""

from __future__ import annotations

from mooncake.base import BlockSource, PinBlocks, PinGranted, Unpin, WorkerRef
from mooncake.base.request import CacheHits
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.reuse import Fetches, PrefixReuse
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult
from tests.support.engine.engine_pair import LAYOUT, EnginePair

HERE = WorkerRef("prefill-0", "e1", "here")
STORE = WorkerRef("kvstore-0", "e2", "there")
OTHER = WorkerRef("kvstore-1", "e3", "there")
KEYS = [bytes([index]) * 16 for index in range(4)]


class Scene:
    def __init__(self, *, verify: bool = False) -> None:
        pair = self.engine_pair = EnginePair()
        self.reader = BlockReader(HERE, pair.channel, pair.mover, verify=verify)
        self.ended: list[int] = []
        """How many blocks each fetch has brought."""
        self.fetches = Fetches(self.reader, 5.0, lambda _, result: self._on_ended(result, 0.0))

    def _on_ended(self, result: ReadResult, _now: float) -> None:
        self.ended.append(result.num_blocks)

    def start(self, num_blocks: int) -> list[int]:
        pages = self.engine_pair.pool.allocate(num_blocks) or []
        deadline_s = self.engine_pair.heap.now() + 5.0
        self.reader.start(STORE, KEYS[:num_blocks], pages, deadline_s, self._on_ended)
        self.engine_pair.run()
        return pages

    def grant(self, blocks: list[int], ticket: int = 1) -> None:
        places = self.engine_pair.places(blocks)
        message = PinGranted(
            asker=HERE, ticket=ticket, store=STORE, num_blocks=len(blocks), places=places
        )
        self.reader.on_granted(message, self.engine_pair.heap.now())

    @property
    def unpinned(self) -> list[int]:
        return [m.ticket for m in self.engine_pair.there_inbox if isinstance(m, Unpin)]


def test_blocks_are_pinned_read_and_unpinned() -> None:
    scene = Scene()
    pages = scene.start(2)
    assert scene.engine_pair.there_inbox == [PinBlocks(reader=HERE, ticket=1, keys=KEYS[:2])]
    expected = [scene.engine_pair.fill_pool(5, 50), scene.engine_pair.fill_pool(2, 20)]
    scene.grant([5, 2])
    scene.engine_pair.run()
    assert scene.ended == [2]
    assert [scene.engine_pair.page_bytes(page) for page in pages] == expected
    assert scene.unpinned == [1]


def test_a_shorter_run_is_what_arrives() -> None:
    scene = Scene()
    scene.start(3)
    scene.grant([0])
    scene.engine_pair.run()
    assert scene.ended == [1]


def test_a_miss_ends_with_nothing() -> None:
    scene = Scene()
    scene.start(2)
    scene.grant([])
    assert scene.ended == [0]


def test_a_silent_owner_is_given_up_and_its_late_grant_unpinned() -> None:
    scene = Scene()
    scene.start(1)
    assert scene.reader.tick(1.0) == 5.0
    scene.reader.tick(5.0)
    assert scene.ended == [0]
    scene.grant([0])
    scene.engine_pair.run()
    assert scene.ended == [0]
    assert scene.unpinned == [1, 1]


def test_a_lost_owner_is_a_miss() -> None:
    scene = Scene()
    scene.start(1)
    scene.reader.on_peer_lost(STORE, 0.0)
    assert scene.ended == [0]


def test_an_owner_lost_in_mid_read_is_a_miss() -> None:
    scene = Scene()
    scene.start(1)
    scene.grant([0])
    scene.engine_pair.network.detach("there")
    scene.reader.on_peer_lost(STORE, scene.engine_pair.heap.now())
    assert scene.ended == [], "the read may still write to the pages"
    scene.engine_pair.run()
    assert scene.ended == [0]


def test_a_cancelled_read_ends_when_it_has_stopped() -> None:
    scene = Scene()
    scene.start(1)
    scene.grant([0])
    scene.reader.cancel(1, scene.engine_pair.heap.now())
    assert scene.ended == []
    scene.engine_pair.run()
    assert scene.ended == [0]
    assert scene.reader.num_open == 0


class Verifying(Scene):
    """A fetcher that looks at what arrives; pool blocks 0 to 2 hold their number."""

    def __init__(self) -> None:
        super().__init__(verify=True)
        self.blocks = [self.engine_pair.fill_pool(block, block + 1) for block in range(3)]

    def arrive(self, checksums: list[int]) -> None:
        self.start(3)
        message = PinGranted(
            asker=HERE, ticket=1, store=STORE, num_blocks=3,
            places=self.engine_pair.places([0, 1, 2]), checksums=checksums,
        )  # fmt: skip
        self.reader.on_granted(message, self.engine_pair.heap.now())
        self.engine_pair.run()

    @property
    def promises(self) -> list[int]:
        return [checksum_of(block, LAYOUT) for block in self.blocks]


def test_what_arrives_as_promised_counts() -> None:
    scene = Verifying()
    scene.arrive(scene.promises)
    assert scene.ended == [], "not looked at yet"
    assert scene.unpinned == []
    while not scene.ended:
        assert scene.reader.tick(1.0) in (1.0, None)
    assert scene.ended == [3]
    scene.engine_pair.run()
    assert scene.unpinned == [1]


def test_what_arrives_damaged_is_a_miss_from_there_on_and_the_owner_is_told() -> None:
    scene = Verifying()
    first, second, third = scene.promises
    scene.arrive([first, second ^ 1, third])
    scene.reader.tick(1.0)
    assert scene.ended == [1]
    assert scene.reader.num_corrupt == 1
    scene.engine_pair.run()
    assert [m.corrupt for m in scene.engine_pair.there_inbox if isinstance(m, Unpin)] == [[KEYS[1]]]


def test_blocks_without_a_promise_are_taken_as_they_come() -> None:
    scene = Verifying()
    scene.arrive([scene.promises[0], 0, 0])
    scene.reader.tick(1.0)
    scene.reader.tick(1.0)
    assert scene.ended == [3]


def test_a_fetch_cancelled_while_it_is_looked_at_ends_once() -> None:
    scene = Verifying()
    scene.arrive(scene.promises)
    scene.reader.cancel(1, 1.0)
    assert scene.ended == [0]
    assert scene.reader.tick(1.0) is None
    assert scene.reader.num_open == 0


class Reuse:
    def __init__(self, scene: Scene, sources: list[BlockSource]) -> None:
        self.gathered: list[list[int]] = []
        self.reuse = PrefixReuse(
            scene.engine_pair.pool,
            scene.fetches,
            KEYS,
            sources,
            lambda pages, at: self.gathered.append(pages),
        )
        self.reuse.start(scene.engine_pair.heap.now())


def test_blocks_fetched_without_prefix_caching_serve_their_request_only() -> None:
    scene = Scene()
    pool = scene.engine_pair.pool = BlockPool(4, caches=False)
    reuse = Reuse(scene, [BlockSource(store=STORE, first=0, stop=2)])
    scene.engine_pair.run()
    expected = [scene.engine_pair.fill_pool(5, 50), scene.engine_pair.fill_pool(2, 20)]
    scene.grant([5, 2])
    scene.engine_pair.run()
    [pages] = reuse.gathered
    assert [scene.engine_pair.page_bytes(page) for page in pages] == expected
    assert pool.match(KEYS) == pool.inventory() == pool.drain_events()[0] == []
    pool.release(pages)
    assert pool.num_free == 4, "nothing is kept"


def test_reuse_without_sources_leaves_matching_to_the_engine() -> None:
    scene = Scene()
    held = scene.engine_pair.pool.allocate(1) or []
    scene.engine_pair.pool.publish(KEYS[0], held[0])
    reuse = Reuse(scene, [])
    assert reuse.gathered == [[]]
    assert reuse.reuse.fetched(STORE) is None
    assert scene.engine_pair.pool.num_held == 1


def test_reuse_extends_the_own_prefix_by_fetched_blocks() -> None:
    scene = Scene()
    held = scene.engine_pair.pool.allocate(1) or []
    scene.engine_pair.pool.publish(KEYS[0], held[0])
    reuse = Reuse(scene, [BlockSource(store=STORE, first=1, stop=3)])
    assert reuse.gathered == []
    scene.grant([0, 1])
    scene.engine_pair.run()
    (pages,) = reuse.gathered
    assert pages[0] == held[0]
    assert scene.engine_pair.pool.match(KEYS) == pages
    assert len(pages) == 3
    scene.engine_pair.pool.release(pages)
    scene.engine_pair.pool.release(held)
    assert scene.engine_pair.pool.num_held == 0


def test_reuse_keeps_what_came_of_a_partial_fetch() -> None:
    scene = Scene()
    reuse = Reuse(scene, [BlockSource(store=STORE, first=0, stop=4)])
    scene.grant([3])
    scene.engine_pair.run()
    (pages,) = reuse.gathered
    assert len(pages) == 1
    assert scene.engine_pair.pool.num_held == 1


def test_reuse_without_room_recomputes() -> None:
    scene = Scene()
    scene.engine_pair.pool.allocate(7)
    assert Reuse(scene, [BlockSource(store=STORE, first=0, stop=4)]).gathered == [[]]


def test_a_cancelled_reuse_ends_holding_nothing_new() -> None:
    scene = Scene()
    reuse = Reuse(scene, [BlockSource(store=STORE, first=0, stop=2)])
    reuse.reuse.cancel(scene.engine_pair.heap.now())
    assert reuse.gathered == [[]]
    assert scene.engine_pair.pool.num_held == 0


class TestAnotherReplica:
    """What one pool does not give is asked of the next that holds it, even in mid-read."""

    def reuse(self, scene: Scene, *others: WorkerRef) -> Reuse:
        source = BlockSource(store=STORE, first=0, stop=3, others=list(others))
        return Reuse(scene, [source])

    def grant(
        self,
        scene: Scene,
        store: WorkerRef,
        ticket: int,
        blocks: list[int],
        num_from_ssd: int = 0,
        num_from_object: int = 0,
    ) -> None:
        message = PinGranted(
            asker=HERE, ticket=ticket, store=store, num_blocks=len(blocks),
            places=scene.engine_pair.places(blocks), num_from_ssd=num_from_ssd,
            num_from_object=num_from_object,
        )  # fmt: skip
        scene.reader.on_granted(message, scene.engine_pair.heap.now())

    def asked(self, scene: Scene) -> list[tuple[int, list[bytes]]]:
        scene.engine_pair.run()
        inbox = scene.engine_pair.there_inbox
        return [(m.ticket, m.keys) for m in inbox if isinstance(m, PinBlocks)]

    def test_it_is_asked_for_the_rest(self) -> None:
        scene = Scene()
        reuse = self.reuse(scene, OTHER)
        expected = [scene.engine_pair.fill_pool(n, 10 + n) for n in range(3)]
        self.grant(scene, STORE, 1, [0])
        assert self.asked(scene) == [(1, KEYS[:3]), (2, KEYS[1:3])]
        self.grant(scene, OTHER, 2, [1, 2], num_from_ssd=1, num_from_object=1)
        scene.engine_pair.run()
        (pages,) = reuse.gathered
        assert [scene.engine_pair.page_bytes(page) for page in pages] == expected
        assert scene.engine_pair.pool.match(KEYS) == pages
        assert reuse.reuse.fetched(STORE) == CacheHits(dram=1, peer=2)
        assert reuse.reuse.fetched(OTHER) == CacheHits(ssd=1, object=1, peer=1)
        assert reuse.reuse.fetched(None) == CacheHits(peer=3)

    def test_a_pool_lost_in_mid_read(self) -> None:
        scene = Scene()
        reuse = self.reuse(scene, OTHER)
        self.grant(scene, STORE, 1, [0, 1, 2])
        scene.engine_pair.network.detach("there")
        scene.reader.on_peer_lost(STORE, scene.engine_pair.heap.now())
        assert scene.reader.num_open == 1, "the read may still write to the pages"
        while not scene.ended:
            assert scene.engine_pair.heap.step()
        assert reuse.gathered == []
        assert scene.reader.num_open == 1, "of another pool now"
        scene.reader.on_peer_lost(OTHER, scene.engine_pair.heap.now())
        assert reuse.gathered == [[]]
        assert scene.engine_pair.pool.num_held == 0

    def test_a_damaged_block_is_taken_from_another(self) -> None:
        scene = Verifying()
        reuse = self.reuse(scene, OTHER)
        right = scene.engine_pair.fill_pool(0, 7)
        places = scene.engine_pair.places([0, 0, 0])
        promises = [checksum_of(right, LAYOUT)] * 3
        for store, ticket, given in ((STORE, 1, [promises[0], 1, 1]), (OTHER, 2, promises[:2])):
            message = PinGranted(
                asker=HERE, ticket=ticket, store=store, num_blocks=len(given), places=places,
                checksums=given,
            )  # fmt: skip
            scene.reader.on_granted(message, scene.engine_pair.heap.now())
            scene.engine_pair.run()
            scene.reader.tick(1.0)
            scene.reader.tick(1.0)
        (pages,) = reuse.gathered
        assert [scene.engine_pair.page_bytes(page) for page in pages] == [right] * 3
        assert scene.reader.num_corrupt == 1

    def test_each_is_asked_once(self) -> None:
        scene = Scene()
        reuse = self.reuse(scene, OTHER, STORE)
        for store, ticket in ((STORE, 1), (OTHER, 2), (STORE, 3)):
            assert reuse.gathered == []
            self.grant(scene, store, ticket, [])
        assert reuse.gathered == [[]]
        assert len(self.asked(scene)) == 3

    def test_a_cancelled_reuse_asks_no_other_node(self) -> None:
        scene = Scene()
        reuse = self.reuse(scene, OTHER)
        reuse.reuse.cancel(scene.engine_pair.heap.now())
        assert reuse.gathered == [[]]
        assert len(self.asked(scene)) == 1
