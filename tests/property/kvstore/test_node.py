"""The kvstore node under any interleaving of writers, readers, losses, repeats and time.

Bytes are real: writers write into the arena at the places they were granted, and every pinned block
is compared with what its writer wrote, after every step. A lost writer goes on scribbling over its
grants until the quarantine ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from mooncake.base import (
    AnyMessage,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Unpin,
    Welcome,
    WorkerRef,
)
from mooncake.base.pool_messages import BlocksRemoved, LastingPin, PinsSet, RemoveBlocks, SetPins
from mooncake.kvstore.eviction import POLICIES
from mooncake.transfer.grants import FIRST_LOOK_S, Fence
from tests.support.examples import examples
from tests.support.kvstore.node_world import GATEWAY, STORE, NodeWorld, key, worker

QUARANTINE_S = 10.0
NAMES = ["prefill-0", "prefill-1", "decode-0"]
QUOTAS = {"small": 3 * 64}

a_name = st.sampled_from(NAMES)
# Chains with shared heads, and the odd run from the middle.
a_run = st.builds(
    lambda base, split, first, stop: [
        key(n if n < split else 100 * base + n) for n in range(first, stop)
    ],
    st.integers(1, 2),
    st.integers(0, 5),
    st.sampled_from([0, 0, 0, 2]),
    st.integers(3, 8),
)


class Grant:
    """A put as its writer sees it."""

    def __init__(self, writer: WorkerRef, granted: PutGranted) -> None:
        self.writer = writer
        self.granted = granted
        self.places = dict(zip(granted.keys, granted.places.offsets, strict=True))
        self.open = set(granted.keys)


class NodeAgainstModel(RuleBasedStateMachine):
    """What a pool promises: whole blocks only, pins hold, memory adds up, the gateway is told."""

    messages: Bundle[AnyMessage] = Bundle("messages")

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        num_blocks=st.integers(1, 10),
        fence=st.sampled_from([Fence.CLOSED, Fence.UNKNOWN]),
    )
    def begin(self, policy: str, num_blocks: int, fence: Fence) -> None:
        self.num_blocks = num_blocks
        self.world = NodeWorld(
            num_blocks, eviction=policy, quarantine_s=QUARANTINE_S, high_watermark=0.9,
            tenant_quota_bytes=QUOTAS, max_tickets_per_worker=6, put_timeout_s=4.0,
        )  # fmt: skip
        self.world.transfer.usual_fence = fence
        self.rest_s = QUARANTINE_S if fence is Fence.UNKNOWN else FIRST_LOOK_S
        self.fenced: list[Grant] = []
        """Of lost writers that were fenced: what they write late is refused."""
        self.epochs = dict.fromkeys(NAMES, 1)
        self.grants: dict[tuple[WorkerRef, int], Grant] = {}
        self.pins: dict[tuple[WorkerRef, int], tuple[list[bytes], PinGranted]] = {}
        self.zombies: list[tuple[float, Grant]] = []
        self.stored: set[bytes] = set()
        self.condemned: set[bytes] = set()
        """Removed, and still read."""
        self.hard: set[bytes] = set()
        self.last_ticket = 0

    # ------------------------------------------------------------------ helpers

    def ref(self, name: str) -> WorkerRef:
        return worker(name, f"e{self.epochs[name]}")

    def pinned_keys(self) -> set[bytes]:
        return {block for run, _ in self.pins.values() for block in run}

    def forget_condemned(self) -> None:
        """Readers have ended."""
        self.condemned &= self.pinned_keys()

    def bring(self, message: AnyMessage) -> list[AnyMessage]:
        """Hand a message over, follow evictions, and return the answers to peers."""
        before = set(self.world.inventory)
        sent = self.world.handle(message)
        self.evictions(before - self.world.inventory)
        fresh = self.world.inventory - before
        assert fresh <= set(message.written if isinstance(message, PutEnd) else []), "not put"
        self.stored |= self.world.inventory
        return [answer for address, answer in sent if address != GATEWAY.address]

    def evictions(self, gone: set[bytes]) -> None:
        assert not gone & (self.pinned_keys() | self.hard), "evicted what was pinned"
        self.stored -= gone

    def open_places(self) -> Iterator[int]:
        for grant in self.grants.values():
            yield from (grant.places[block] for block in sorted(grant.open))

    # ------------------------------------------------------------------ writers

    @rule(target=messages, name=a_name, run=a_run, tenant=st.sampled_from(["", "small"]))
    def put_start(self, name: str, run: list[bytes], tenant: str) -> AnyMessage:
        if tenant:
            run = [block[:-1] + b"T" for block in run]
        self.last_ticket += 1
        message = PutStart(writer=self.ref(name), ticket=self.last_ticket, keys=run, tenant=tenant)
        writing = {block for grant in self.grants.values() for block in grant.open}
        [granted] = self.bring(message)
        assert isinstance(granted, PutGranted)
        assert (granted.ticket, granted.store) == (self.last_ticket, STORE)
        assert set(granted.keys) <= set(run) - self.stored - writing - self.condemned
        assert granted.keys == [block for block in run if block in granted.keys], "out of order"
        open_tickets = sum(at[0] == message.writer for at in [*self.grants, *self.pins])
        room = self.num_blocks - sum(1 for _ in self.open_places())
        room -= len(self.pinned_keys() | self.hard | self.condemned)
        room -= sum(len(zombie.open) for _, zombie in self.zombies)
        room -= len(self.stored & set(run) - self.pinned_keys() - self.hard)
        wanted = set(run) - self.stored - writing - self.condemned
        if open_tickets < 6 and not tenant:
            assert len(granted.keys) >= min(len(wanted), room), "room was there"
        if granted.keys:
            taken = set(self.open_places())
            assert taken.isdisjoint(granted.places.offsets)
            resting = {zombie.places[block] for _, zombie in self.zombies for block in zombie.open}
            assert resting.isdisjoint(granted.places.offsets), "may still be written to"
            self.grants[message.writer, message.ticket] = Grant(message.writer, granted)
        return message

    @precondition(lambda self: self.grants)
    @rule(
        target=messages, data=st.data(), some=st.booleans(),
        fate=st.sampled_from(["written", "written", "dropped", "mixed"]),
    )  # fmt: skip
    def put_end(self, data: st.DataObject, some: bool, fate: str) -> AnyMessage:
        """End a put, in one message or in several, with every block written or dropped."""
        at = data.draw(st.sampled_from(sorted(self.grants, key=lambda at: at[1])))
        grant = self.grants[at]
        ending = sorted(grant.open)
        if some:
            ending = data.draw(st.lists(st.sampled_from(ending), unique=True))
        written = {"written": ending, "dropped": []}.get(fate)
        if written is None:
            written = [block for block in ending if data.draw(st.booleans())]
        for block in written:
            self.world.write(grant.granted.places, grant.places[block], block)
        message = PutEnd(
            writer=grant.writer,
            ticket=at[1],
            written=written,
            dropped=[block for block in ending if block not in written],
        )
        grant.open -= set(ending)
        if not grant.open:
            del self.grants[at]
        assert self.bring(message) == []
        assert self.stored >= set(written), "written blocks are readable"
        return message

    @rule()
    def scribble(self) -> None:
        """Writers in mid-put, and lost ones that are not dead yet, write anything at any time."""
        granted = [grant for _, grant in self.zombies] + list(self.grants.values())
        for grant in granted:
            for block in sorted(grant.open):
                self.world.write(grant.granted.places, grant.places[block], b"garbage".ljust(16))
        for grant in self.fenced:
            permit = self.world.transfer.grants.permit(grant.granted.places.grant)
            assert permit.withdrawn is not None

    # ------------------------------------------------------------------ readers

    @rule(target=messages, name=a_name, run=a_run)
    def pin(self, name: str, run: list[bytes]) -> AnyMessage:
        self.last_ticket += 1
        message = PinBlocks(reader=self.ref(name), ticket=self.last_ticket, keys=run)
        open_tickets = sum(at[0] == message.reader for at in [*self.grants, *self.pins])
        [granted] = self.bring(message)
        assert isinstance(granted, PinGranted)
        assert len(granted.places.offsets) == granted.num_blocks
        leading = next((n for n, block in enumerate(run) if block not in self.stored), len(run))
        assert granted.num_blocks == (leading if open_tickets < 6 else 0)
        if granted.num_blocks:
            self.pins[message.reader, message.ticket] = (run[: granted.num_blocks], granted)
        return message

    @precondition(lambda self: self.pins)
    @rule(target=messages, data=st.data())
    def unpin(self, data: st.DataObject) -> AnyMessage:
        at = data.draw(st.sampled_from(sorted(self.pins, key=lambda at: at[1])))
        del self.pins[at]
        message = Unpin(reader=at[0], ticket=at[1])
        assert self.bring(message) == []
        self.forget_condemned()
        return message

    @precondition(lambda self: self.stored)
    @rule(
        data=st.data(), name=a_name, also=a_run, mine=st.sampled_from([True, True, False]),
        pin=st.sampled_from([LastingPin.HARD, LastingPin.HARD, LastingPin.SOFT, LastingPin.NONE]),
    )  # fmt: skip
    def set_pins(
        self, data: st.DataObject, name: str, also: list[bytes], mine: bool, pin: LastingPin
    ) -> None:
        """Hard pins hold as long as the node lives, whoever set them; there are half as many as
        blocks at most.
        """
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.stored)), min_size=1, unique=True))
        run = list(dict.fromkeys([*chosen, also[0]]))
        asker, epoch = self.ref(name), self.world.store.epoch if mine else "another"
        [answer] = self.bring(SetPins(asker=asker, ticket=1, keys=run, pin=pin, epoch=epoch))
        assert isinstance(answer, PinsSet)
        for block, done in zip(run, answer.done, strict=True):
            assert done <= (mine and block in self.stored)
            if pin is not LastingPin.HARD:
                assert done == (mine and block in self.stored)
            if done:
                self.hard.discard(block)
                if pin is LastingPin.HARD:
                    self.hard.add(block)
        assert len(self.hard) <= self.num_blocks // 2

    @rule(target=messages, name=a_name, run=a_run)
    def remove(self, name: str, run: list[bytes]) -> AnyMessage:
        """What is removed is found no more, and readers keep it until they end."""
        self.last_ticket += 1
        asked = RemoveBlocks(asker=self.ref(name), ticket=self.last_ticket, keys=run)
        going = (set(run) & self.stored) - self.hard
        self.stored -= going
        self.condemned |= going & self.pinned_keys()
        sent = self.world.handle(asked)
        [answer] = [message for _, message in sent if isinstance(message, BlocksRemoved)]
        assert answer.removed == [block in going for block in run]
        assert answer.left == [block in self.hard for block in run]
        assert self.world.inventory == self.stored
        return Unpin(reader=asked.asker, ticket=asked.ticket)

    # ------------------------------------------------------------------ trouble

    @rule(message=messages)
    def repeat(self, message: AnyMessage) -> None:
        """Any message may come again, however late; nothing opens twice and nothing breaks."""
        if isinstance(message, PutEnd) and (message.writer, message.ticket) in self.grants:
            ended = set(message.written) | set(message.dropped)
            assert not ended & self.grants[message.writer, message.ticket].open
        if isinstance(message, Unpin):
            assert (message.reader, message.ticket) not in self.pins
        for answer in self.bring(message):
            if isinstance(answer, PutGranted):
                grant = self.grants.get((message.writer, message.ticket))
                assert set(answer.keys) == (grant.open if grant else set())
            if isinstance(answer, PinGranted):
                run, first = self.pins.get((message.reader, message.ticket), ([], answer))
                assert answer.num_blocks == len(run)
                assert answer.places == first.places

    @rule(name=a_name)
    def lose(self, name: str) -> None:
        """A worker is lost; its writes may go on until the quarantine ends, or are refused."""
        lost = self.ref(name)
        self.epochs[name] += 1
        for at in [at for at in self.grants if at[0] == lost]:
            grant = self.grants.pop(at)
            self.zombies.append((self.world.now + self.rest_s, grant))
            self.fenced.append(grant)
        for at in [at for at in self.pins if at[0] == lost]:
            del self.pins[at]
        self.forget_condemned()
        assert self.bring(PeerLost(worker=lost)) == []

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0, QUARANTINE_S]))
    def wait(self, seconds: float) -> None:
        before = set(self.world.inventory)
        self.world.tick(self.world.now + seconds)
        self.zombies = [zombie for zombie in self.zombies if zombie[0] > self.world.now]
        self.evictions(before - self.world.inventory)

    @rule()
    def welcome_again(self) -> None:
        """A gateway that lost its memory is told everything."""
        before = set(self.world.inventory)
        self.world.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
        assert self.world.inventory == before

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def pinned_blocks_are_whole(self) -> None:
        if not hasattr(self, "world"):
            return
        assert self.world.inventory == self.stored
        for run, granted in self.pins.values():
            for block, offset in zip(run, granted.places.offsets, strict=True):
                assert self.world.holds(granted.places, offset, block)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for name in NAMES:
            self.world.handle(PeerLost(worker=self.ref(name)))
        self.world.tick(self.world.now + QUARANTINE_S)
        load = self.world.load()
        assert load.num_running == load.num_waiting == 0
        assert load.num_free_blocks + load.num_cached_blocks == self.num_blocks
        assert load.num_cached_blocks == len(self.world.inventory)


NodeAgainstModel.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None
)
TestNodeAgainstModel = NodeAgainstModel.TestCase
