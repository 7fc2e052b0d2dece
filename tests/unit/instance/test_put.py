"""Write-through: each ticket ends with one PutEnd, said only when nothing writes to the pool any
more.
"""

from __future__ import annotations

from mooncake.base import PutEnd, PutGranted, PutStart, WorkerRef
from mooncake.instance.push import Push
from mooncake.kvstore.client.block_writer import BlockWriter
from tests.support.engine.engine_pair import LAYOUT, EnginePair

HERE = WorkerRef("prefill-0", "e1", "here")
STORE = WorkerRef("kvstore-0", "e2", "there")
KEYS = [bytes([index]) * 16 for index in range(3)]


class Scene:
    def __init__(self, num_blocks: int) -> None:
        self.engine_pair = EnginePair()
        self.writer = BlockWriter(HERE, self.engine_pair.channel)
        self.push = Push(self.engine_pair.mover, self.engine_pair.pool, timeout_s=5.0)
        self.pages = self.engine_pair.pool.allocate(num_blocks) or []
        for index, page in enumerate(self.pages):
            self.engine_pair.fill_page(page)
            self.push.add_block(index, page)
        self.settled: list[float] = []
        blocks = {KEYS[index]: index for index in range(num_blocks)}
        self.push.put(self.writer, STORE, blocks, "tenant", self.settled.append)
        self.engine_pair.run()

    def grant(self, indexes: list[int], blocks: list[int], ticket: int = 1) -> None:
        keys = [KEYS[index] for index in indexes]
        message = PutGranted(
            asker=HERE, ticket=ticket, store=STORE, keys=keys,
            places=self.engine_pair.places(blocks),
        )  # fmt: skip
        self.writer.on_granted(message, self.engine_pair.heap.now())

    def finish(self) -> None:
        self.push.advance(range(len(self.pages)), LAYOUT.num_layers, self.engine_pair.heap.now())
        self.engine_pair.run()

    @property
    def ends(self) -> list[PutEnd]:
        return [m for m in self.engine_pair.there_inbox if isinstance(m, PutEnd)]


def test_a_put_asks_fills_and_ends() -> None:
    scene = Scene(2)
    start = scene.engine_pair.there_inbox[0]
    assert start == PutStart(writer=HERE, ticket=1, keys=KEYS[:2], tenant="tenant")
    scene.grant([0, 1], [3, 0])
    scene.finish()
    assert scene.ends == [PutEnd(writer=HERE, ticket=1, written=KEYS[:2])]
    assert scene.engine_pair.pool_bytes(3) == scene.engine_pair.page_bytes(scene.pages[0])
    assert scene.engine_pair.pool_bytes(0) == scene.engine_pair.page_bytes(scene.pages[1])
    assert len(scene.settled) == 1
    assert scene.writer.num_open == 0
    assert scene.writer.num_blocks_put == 2


def test_only_granted_blocks_are_written() -> None:
    scene = Scene(3)
    scene.grant([1], [2])
    scene.finish()
    assert scene.ends == [PutEnd(writer=HERE, ticket=1, written=[KEYS[1]])]


def test_nothing_granted_ends_the_put() -> None:
    scene = Scene(1)
    scene.grant([], [])
    assert len(scene.settled) == 1
    assert scene.writer.num_open == 0


def test_a_grant_without_a_waiting_put_is_given_back() -> None:
    scene = Scene(1)
    scene.grant([0], [0], ticket=77)
    scene.engine_pair.run()
    assert scene.ends == [PutEnd(writer=HERE, ticket=77, dropped=[KEYS[0]])]


def test_an_abandoned_put_drops_what_is_not_whole() -> None:
    scene = Scene(2)
    scene.grant([0, 1], [0, 1])
    scene.push.advance([0], LAYOUT.num_layers, scene.engine_pair.heap.now())
    scene.engine_pair.run()
    scene.push.close(scene.engine_pair.heap.now())
    scene.engine_pair.run()
    assert scene.ends == [PutEnd(writer=HERE, ticket=1, written=[KEYS[0]], dropped=[KEYS[1]])]
    assert (scene.writer.num_blocks_put, scene.writer.num_puts_failed) == (1, 1)
    assert len(scene.settled) == 1
    assert not scene.push.puts


def test_the_loss_of_the_pool_ends_its_puts() -> None:
    scene = Scene(1)
    scene.writer.on_peer_lost(WorkerRef("kvstore-0", "another epoch", "there"), 0.0)
    assert scene.writer.num_open == 1
    scene.writer.on_peer_lost(STORE, 0.0)
    assert scene.writer.num_open == 0
    assert len(scene.settled) == 1


def test_a_grant_that_never_comes_is_given_up() -> None:
    scene = Scene(1)
    assert scene.writer.tick(0.0) == 1.0
    assert scene.writer.tick(5.0) is None
    assert len(scene.settled) == 1


def test_a_grant_for_a_push_being_closed_is_given_back() -> None:
    scene = Scene(1)
    scene.push.add_destination([scene.engine_pair.part([4], [0])], lambda *_: None, 0.0)
    scene.push.advance([0], LAYOUT.num_layers, scene.engine_pair.heap.now())
    scene.push.close(scene.engine_pair.heap.now())
    scene.grant([0], [2])
    scene.engine_pair.run()
    assert scene.ends == [PutEnd(writer=HERE, ticket=1, dropped=[KEYS[0]])]
    assert len(scene.settled) == 1


def test_a_question_that_gets_no_answer_is_asked_again() -> None:
    scene = Scene(1)
    start = scene.engine_pair.there_inbox[0]
    due_s = scene.writer.tick(0.0)
    assert due_s == 1.0
    assert scene.writer.tick(0.5) == 1.0
    assert scene.writer.tick(1.0) == 2.0
    scene.engine_pair.run()
    assert scene.engine_pair.there_inbox == [start, start], "the same ticket: granted once"
    scene.grant([0], [3])
    scene.grant([0], [3])
    assert scene.writer.tick(9.0) is None
    scene.finish()
    assert scene.ends == [PutEnd(writer=HERE, ticket=1, written=KEYS[:1])]
