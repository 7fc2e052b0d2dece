"""Chains that lie on SSD only, longer than what may be on its way up, than free DRAM, than all of
it: readers get them whole, in pieces and in order from the head, or up to where others hold the
memory; the node's books are right at every step (`NodeWorld` checks them after each message).
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.base import PinBlocks, PinGranted, Unpin
from mooncake.base.messages import Prefetch
from mooncake.sim.world.disk import SimMedium
from tests.support.examples import examples
from tests.support.kvstore.node_world import BLOCK, NodeWorld, keys, worker

WRITER, HOLDER = worker("prefill-0"), worker("decode-0")


def node_with(num_blocks: int, chains: list[list[int]], queue: int, disks: int = 1) -> NodeWorld:
    """Return a node that has these chains on its disks and nothing in DRAM."""
    total = sum(map(len, chains))
    world = NodeWorld(
        num_blocks, media=[SimMedium() for _ in range(disks)], ssd_blocks=total + 4,
        ssd_write_at=0.0, ssd_min_uses=1, high_watermark=1.0, ssd_queue_bytes=queue * BLOCK,
    )  # fmt: skip
    world.tick(1.0)
    for chain in chains:
        for number in chain:
            world.put(WRITER, keys(number))
            world.tick(world.now + 0.1)
    world.boot()
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(*(number for chain in chains for number in chain)))
    return world


class Reader:
    """Takes a run as a worker does: asks, looks at the bytes, gives back, asks for the rest."""

    def __init__(self, world: NodeWorld, name: str, chain: list[int]) -> None:
        self.world = world
        self.ref = worker(name)
        self.left = keys(*chain)
        self.got: list[bytes] = []

    def steps(self) -> Iterator[None]:
        """Read, pausing wherever others may come in between."""
        more = bool(self.left)
        while more:
            ticket = self.world.ticket()
            self.world.handle(PinBlocks(reader=self.ref, ticket=ticket, keys=self.left))
            while (granted := self._answer(ticket)) is None:
                yield
            yield
            piece, self.left = self.left[: granted.num_blocks], self.left[granted.num_blocks :]
            for block, offset in zip(piece, granted.places.offsets, strict=True):
                assert self.world.holds(granted.places, offset, block), "wrong bytes"
            self.got += piece
            more = granted.more
            assert not more or piece, "asked to come again for nothing"
            self.world.handle(Unpin(reader=self.ref, ticket=ticket))

    def _answer(self, ticket: int) -> PinGranted | None:
        for _, message in reversed(self.world.channel.sent):
            if isinstance(message, PinGranted) and message.ticket == ticket:
                return message
        return None


def read_all(world: NodeWorld, readers: list[Reader]) -> None:
    """Let them read at once, each a step in turn; a disk works a little at every turn."""
    going = [reader.steps() for reader in readers]
    while going:
        going = [steps for steps in going if next(steps, going) is None]
        world.tick(world.now + 1e-4)


def in_use(world: NodeWorld) -> int:
    load = world.load()
    return load.num_total_blocks - load.num_free_blocks - load.num_cached_blocks


@settings(max_examples=examples(60), deadline=None)
@given(
    length=st.integers(1, 24),
    num_blocks=st.integers(1, 12),
    queue=st.integers(1, 6),
    disks=st.integers(1, 2),
)
def test_a_chain_is_read_whole_however_little_dram_there_is(
    length: int, num_blocks: int, queue: int, disks: int
) -> None:
    chain = list(range(1, length + 1))
    world = node_with(num_blocks, [chain], queue, disks)
    reader = Reader(world, "reader", chain)
    read_all(world, [reader])
    assert reader.got == keys(*chain)
    assert world.node.counters["blocks_missed"] == 0
    assert world.node.counters["ssd_blocks_read"] >= length
    assert in_use(world) == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    lengths=st.lists(st.integers(1, 10), min_size=2, max_size=4),
    num_blocks=st.integers(4, 12),
    queue=st.integers(1, 6),
    held=st.integers(0, 3),
    ahead=st.booleans(),
)
def test_readers_at_once_wait_for_their_turn_and_miss_nothing(
    lengths: list[int], num_blocks: int, queue: int, held: int, ahead: bool
) -> None:
    chains = [[100 * n + k for k in range(length)] for n, length in enumerate(lengths, 1)]
    world = node_with(num_blocks, chains, queue)
    others = keys(*range(1, held + 1))
    if others:
        world.put(WRITER, others)
        assert world.pin(HOLDER, others).num_blocks == held
    if ahead:
        world.handle(Prefetch(reader=HOLDER, ticket=1, keys=keys(*chains[-1])))
    readers = [Reader(world, f"reader-{n}", chain) for n, chain in enumerate(chains)]
    read_all(world, readers)
    for reader, chain in zip(readers, chains, strict=True):
        assert reader.got == keys(*chain)
    assert world.node.counters["blocks_missed"] == 0
    assert in_use(world) == 0
    assert world.load().num_running == bool(held)


def test_what_others_hold_ends_a_run_and_it_goes_on_when_they_let_go() -> None:
    world = node_with(4, [list(range(1, 9))], queue=8)
    world.put(WRITER, keys(51, 52))
    pinned = world.pin(HOLDER, keys(51, 52))
    first = world.pin_soon(HOLDER, keys(*range(1, 9)))
    assert (first.num_blocks, first.more) == (2, True), "as much as there is memory"
    late = world.pin_soon(HOLDER, keys(*range(3, 9)), seconds=2.0)
    assert (late.num_blocks, late.more) == (0, False), "nobody let go in time"
    world.unpin(HOLDER, pinned)
    second = world.pin_soon(HOLDER, keys(*range(3, 9)))
    assert (second.num_blocks, second.more) == (2, True)
    world.unpin(HOLDER, first)
    world.unpin(HOLDER, second)
    assert in_use(world) == 0


def test_the_next_piece_comes_up_while_the_first_is_read() -> None:
    world = node_with(8, [list(range(1, 9))], queue=4)
    first = world.pin_soon(HOLDER, keys(*range(1, 9)))
    assert (first.num_blocks, first.more) == (2, True)
    assert world.inventory >= set(keys(3, 4)), "nobody has asked for them yet"
    assert not world.inventory & set(keys(5, 6, 7, 8))


def test_a_reader_that_goes_lets_the_next_one_have_its_turn() -> None:
    world = node_with(8, [[1, 2], [11, 12], [21, 22]], queue=2)
    for ticket, chain in enumerate([[1, 2], [11, 12], [21, 22]], start=101):
        world.handle(PinBlocks(reader=HOLDER, ticket=ticket, keys=keys(*chain)))
    world.handle(Unpin(reader=HOLDER, ticket=102))
    world.tick(world.now + 1)
    answers = {m.ticket: m for _, m in world.channel.sent if isinstance(m, PinGranted)}
    assert {ticket: (m.num_blocks, m.more) for ticket, m in answers.items()} == {
        101: (1, True), 103: (1, True),
    }  # fmt: skip


def test_a_lost_block_ends_the_run_before_it() -> None:
    world = node_with(8, [list(range(1, 7))], queue=4)
    slot = next(s for s, kept in world.media[0].slots.items() if kept.key == keys(4)[0])
    world.media[0].damage(slot)
    reader = Reader(world, "reader", list(range(1, 7)))
    read_all(world, [reader])
    assert reader.got == keys(1, 2, 3)


def test_time_that_is_up_is_the_end_of_a_run() -> None:
    world = node_with(8, [list(range(1, 7))], queue=4)
    world.disks.kill()  # a disk that hangs
    granted = world.pin_soon(HOLDER, keys(*range(1, 7)), seconds=3.0)
    assert (granted.num_blocks, granted.more) == (0, False)
