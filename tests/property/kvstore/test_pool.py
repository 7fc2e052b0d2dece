"""Three pool nodes with disks that copy from each other, drain, die and come back, while their
messages overtake each other, come twice or never: whole blocks only, nothing held for ever, and in
the end a gateway knows what lies where.

Bytes are real: while a copy is under way its memory holds junk, and what every node stores is
compared with what was put after every step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake.base import (
    AnyMessage,
    BlockEvents,
    Drain,
    LoadReport,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Role,
    SegmentRef,
    Tier,
    Unpin,
    Welcome,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.messages import ChainHead, DoubtPeers, Prefetch, Replicate
from mooncake.base.pool_messages import (
    FindHomes,
    Home,
    HomesFound,
    LastingPin,
    RemoveBlocks,
    SetPins,
)
from mooncake.base.rights import CredentialRole, Sender
from mooncake.kvstore.config import KvStoreConfig, SsdConfig
from mooncake.kvstore.index.prefix_index import PrefixIndex
from mooncake.kvstore.node.node import KvNode
from mooncake.rpc.codec import decode, encode
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimDiskConfig, SimDisks, SimMedium
from mooncake.sim.world.network import SimRegion
from mooncake.transfer.engine import (
    Asked,
    AskEnded,
    Pieces,
    Region,
    TransferBatch,
    TransferDone,
)
from mooncake.transfer.grants import Fence, Grants
from tests.support.examples import examples
from tests.support.kvstore.node_world import BLOCK, GATEWAY, LAYOUT, key, worker
from tests.support.kvstore.pool_world import bytes_of

NAMES = ["a", "b", "c"]
CLIENT = worker("client")
SSD_BLOCKS = 6
JUNK = b"\xee" * BLOCK
KEEP_S = 3.0
WORKERS = Sender(name="w", roles=frozenset((CredentialRole.WORKER,)), tenant=None, channel_key="")

a_name = st.sampled_from(NAMES)
a_run = st.builds(
    lambda first, count: [key(n) for n in range(first, first + count)],
    st.integers(1, 6),
    st.integers(1, 4),
)


@dataclass
class Node:
    """One boot of one node, its channel and its transfers."""

    pool: Pool
    ref: WorkerRef
    region: SimRegion | None = None
    running: dict[int, TransferBatch] = field(default_factory=dict)
    last_batch: int = 0
    grants: Grants = field(default_factory=lambda: Grants(defaultdict(int)))
    machine: KvNode = field(init=False)
    disks: SimDisks = field(init=False)

    @property
    def address(self) -> str:
        return self.ref.address

    @property
    def segment(self) -> SegmentRef:
        return SegmentRef(f"{self.ref.worker_id}-{self.ref.epoch}", {}, "here")

    def send(self, address: str, message: AnyMessage) -> None:
        self.pool.wire.append((address, message))

    def figures(self) -> dict[str, float]:
        return {}

    def allocate(self, num_bytes: int, label: str) -> Region:
        self.region = SimRegion(1, num_bytes, memoryview(bytearray(num_bytes)))
        return self.region

    def register(self, buffer: memoryview, label: str) -> Region:
        raise NotImplementedError

    def unregister(self, region: Region) -> None:
        raise NotImplementedError

    def guard(self, region: Region) -> None:
        assert region is self.region

    def grant(self) -> int:
        return self.grants.issue()

    def revoke(self, grant: int) -> None:
        self.grants.revoke(grant)

    def fence(self, grant: int) -> Fence:
        assert self.grants.permit(grant).withdrawn is not None
        return Fence.UNKNOWN

    def takes_questions(self, peer: SegmentRef) -> bool:
        return False

    def hear_questions(self) -> None:
        """The client asks."""

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        granted = decode(answer)
        assert region is self.region
        assert isinstance(granted, PinGranted)
        assert granted.places.offsets == pieces.offsets
        assert granted.num_blocks == len(pieces.offsets)
        asked = self.pool.asked[number]
        asked.run, asked.offsets = asked.run[: granted.num_blocks], list(pieces.offsets)

    def refuse(self, number: int, reason: str) -> None:
        raise AssertionError(f"the client is allowed all that it asks: {reason}")

    def submit(self, batch: TransferBatch) -> int:
        self.last_batch += 1
        self.running[self.last_batch] = batch
        for op in batch.ops:
            self.memory[op.local_offset : op.local_offset + op.num_bytes] = JUNK[: op.num_bytes]
        return self.last_batch

    def cancel(self, batch_id: int) -> None:
        """Leave it running: it may be faster than the call to stop it, or end with an error."""

    def counters(self) -> Mapping[str, float]:
        return {}

    @property
    def memory(self) -> memoryview:
        assert self.region is not None
        return self.region.buffer

    def holds(self, block: bytes) -> bool:
        [offset] = self.machine.blocks.dram.offsets([block])
        return self.memory[offset : offset + BLOCK] == bytes_of(block)


@dataclass
class Asking:
    """A question that is not over: the bytes may be read until then."""

    node: Node
    run: list[bytes]
    offsets: list[int] = field(default_factory=list)


class Pool(RuleBasedStateMachine):
    """The nodes, the wire between them, one client and one gateway."""

    @initialize(num_blocks=st.integers(3, 8), uses=st.integers(1, 2), hashed=st.booleans())
    def begin(self, num_blocks: int, uses: int, hashed: bool) -> None:
        ssd = [SsdConfig(directory="/0", num_bytes=SSD_BLOCKS * BLOCK)]
        self.config = KvStoreConfig(
            dram_bytes=num_blocks * BLOCK, ssd=ssd, ssd_min_uses=uses, ssd_write_at=0.3,
            checksums=hashed, quarantine_s=1.0, replica_idle_s=3.0, replicate_timeout_s=2.0,
            drain_s=8.0, ssd_retry_s=0.5, doubt_interval_s=2.0, kept_share=0.5,
            tenant_kept_share=0.5,
        )  # fmt: skip
        self.heap = EventHeap()
        self.wire: list[tuple[str, AnyMessage]] = []
        self.index = PrefixIndex()
        self.media = {name: SimMedium() for name in NAMES}
        self.nodes: dict[str, Node] = {}
        self.grants: dict[tuple[WorkerRef, int], PutGranted] = {}
        self.pins: dict[tuple[WorkerRef, int], list[bytes]] = {}
        self.asked: dict[int, Asking] = {}
        self.num_boots = self.last_ticket = 0
        for name in NAMES:
            self.boot(name)

    # ------------------------------------------------------------------ the world

    def boot(self, name: str) -> None:
        """Start a node; one that ran before is dead from then on."""
        old = self.nodes.pop(name, None)
        if old is not None:
            old.disks.kill()
            self.wire += [(to, PeerLost(worker=old.ref)) for to in [*self.nodes, GATEWAY.address]]
            for number in [n for n, asking in self.asked.items() if asking.node is old]:
                del self.asked[number]
            for table in (self.grants, self.pins):
                for at in [at for at in table if at[0] == old.ref]:
                    del table[at]
        self.num_boots += 1
        node = Node(self, WorkerRef(name, f"e{self.num_boots}", name))
        node.disks = SimDisks(
            self.heap, SimDiskConfig(), [self.media[name]], [SSD_BLOCKS], LAYOUT,
            partial(self.bring, node),
        )  # fmt: skip
        hello = WorkerHello(
            worker=node.ref, role=Role.KVSTORE, node_id=name, host=name, pid=1,
            layout_fingerprint=LAYOUT.fingerprint, block_tokens=4, num_blocks=0,
        )  # fmt: skip
        node.machine = KvNode(self.config, hello, LAYOUT, node, node, GATEWAY.address, node.disks)
        self.nodes[name] = node
        self.wire.append((name, Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True)))
        self.index.add_worker(node.ref, Tier.DRAM)

    def bring(self, node: Node, event: msgspec.Struct) -> None:
        """Hand an event to a boot, if it lives, as a driver does."""
        if self.nodes.get(node.ref.worker_id) is node:
            node.machine.handle(event, self.heap.now())
            node.machine.tick(self.heap.now())
            node.machine.check_integrity()

    def deliver(self, address: str, message: AnyMessage) -> None:
        if address == GATEWAY.address:
            self.at_gateway(message)
        elif address == CLIENT.address:
            self.at_client(message)
        elif address in self.nodes:
            self.bring(self.nodes[address], message)

    def at_gateway(self, message: AnyMessage) -> None:
        live = {node.ref for node in self.nodes.values()}
        if isinstance(message, BlockEvents):
            self.index.apply(message)
        elif isinstance(message, WorkerHello):
            if message.worker in live:
                welcome = Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True)
                self.wire.append((message.worker.address, welcome))
        elif isinstance(message, LoadReport):
            self.index.expect(message.worker, message.block_nos)
            if message.worker in live and self.index.needs_snapshot(message.worker.worker_id):
                welcome = Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True)
                self.wire.append((message.worker.address, welcome))
        elif isinstance(message, DoubtPeers):
            for peer in message.peers:
                if peer not in live and peer != CLIENT:
                    self.wire.append((message.worker.address, PeerLost(worker=peer)))
        elif isinstance(message, FindHomes):
            others = [node for node in self.nodes.values() if node.ref != message.asker]
            stay = [node for node in others if not node.machine.state().draining]
            known = [{r.worker for r in self.index.replicas(key)} for key in message.keys]
            answer = HomesFound(
                asker=message.asker, ticket=message.ticket,
                homes=[Home(node.ref, 4) for node in stay],
                elsewhere=[any(node.ref in holders for node in stay) for holders in known],
            )  # fmt: skip
            self.wire.append((message.asker.address, answer))

    def at_client(self, message: AnyMessage) -> None:
        """What it has ended, or never had, it ends again."""
        if isinstance(message, PutGranted) and (message.store, message.ticket) not in self.grants:
            end = PutEnd(writer=CLIENT, ticket=message.ticket, dropped=message.keys)
            self.wire.append((message.store.address, end))
        if isinstance(message, PinGranted):
            run = self.pins.get((message.store, message.ticket))
            if run is None:
                unpin = Unpin(reader=CLIENT, ticket=message.ticket)
                self.wire.append((message.store.address, unpin))
            else:
                del run[message.num_blocks :]
                node = self.nodes.get(message.store.worker_id)
                assert node is None or node.ref != message.store or all(map(node.holds, run))

    def ticket(self) -> int:
        self.last_ticket += 1
        return self.last_ticket

    # ------------------------------------------------------------------ the client

    @rule(name=a_name, run=a_run, num_kept=st.sampled_from([0, 0, 1, 4]))
    def put(self, name: str, run: list[bytes], num_kept: int = 0) -> None:
        node, ticket = self.nodes[name], self.ticket()
        first = len(self.wire)
        head = ChainHead([], 0, num_kept, KEEP_S)
        self.bring(node, PutStart(writer=CLIENT, ticket=ticket, keys=run, head=head))
        for _, message in self.wire[first:]:
            if isinstance(message, PutGranted) and message.ticket == ticket and message.keys:
                self.grants[node.ref, ticket] = message
        self.wire = [
            (to, message) for to, message in self.wire
            if not (isinstance(message, PutGranted) and message.ticket == ticket)
        ]  # fmt: skip

    @rule(name=a_name, run=a_run)
    def put_whole(self, name: str, run: list[bytes]) -> None:
        """A put that nothing comes between."""
        before = set(self.grants)
        self.put(name, run)
        for at in self.grants.keys() - before:
            self.write(at, well=True)
            self.hurry(PutEnd)

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def end_put(self, data: st.DataObject, well: bool) -> None:
        at = data.draw(st.sampled_from(sorted(self.grants, key=lambda at: at[1])))
        self.write(at, well=well)

    def write(self, at: tuple[WorkerRef, int], *, well: bool) -> None:
        granted, node = self.grants.pop(at), self.nodes[at[0].worker_id]
        for block, offset in zip(granted.keys, granted.places.offsets, strict=True):
            node.memory[offset : offset + BLOCK] = bytes_of(block) if well else JUNK
        ended = {"written" if well else "dropped": granted.keys}
        self.wire.append((node.address, PutEnd(writer=CLIENT, ticket=at[1], **ended)))

    @rule(name=a_name, run=a_run, num_kept=st.sampled_from([0, 0, 4]))
    def pin(self, name: str, run: list[bytes], num_kept: int) -> None:
        node, ticket = self.nodes[name], self.ticket()
        self.pins[node.ref, ticket] = list(run)
        head = ChainHead([], 0, num_kept, KEEP_S)
        self.wire.append((name, PinBlocks(reader=CLIENT, ticket=ticket, keys=run, head=head)))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.pins, key=lambda at: at[1])))
        del self.pins[at]
        self.wire.append((at[0].address, Unpin(reader=CLIENT, ticket=at[1])))

    @rule(name=a_name, run=a_run)
    def ask(self, name: str, run: list[bytes]) -> None:
        """Over the data connection, which other messages do not keep in order with."""
        ticket = self.ticket()
        self.asked[ticket] = Asking(self.nodes[name], list(run))
        question = encode(PinBlocks(reader=CLIENT, ticket=ticket, keys=run))
        event = Asked(
            number=ticket, question=question, piece_bytes=BLOCK, sender=WORKERS, whence=""
        )
        self.bring(self.nodes[name], event)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), unpins=st.sampled_from([False, False, True]))
    def end_question(self, data: st.DataObject, unpins: bool) -> None:
        """The bytes are out, or the connection broke. The client may also unpin, and need not."""
        number = data.draw(st.sampled_from(sorted(self.asked)))
        node = self.asked.pop(number).node
        if unpins:
            self.wire.append((node.address, Unpin(reader=CLIENT, ticket=number)))
        self.bring(node, AskEnded(number=number))

    @rule(name=a_name, run=a_run, pin=st.sampled_from(LastingPin))
    def set_pins(self, name: str, run: list[bytes], pin: LastingPin) -> None:
        asked = SetPins(asker=CLIENT, ticket=self.ticket(), keys=run, pin=pin)
        self.wire.append((name, asked))

    @rule(name=a_name, run=a_run)
    def remove(self, name: str, run: list[bytes]) -> None:
        self.wire.append((name, RemoveBlocks(asker=CLIENT, ticket=self.ticket(), keys=run)))

    @rule(name=a_name, run=a_run)
    def prefetch(self, name: str, run: list[bytes]) -> None:
        self.wire.append((name, Prefetch(reader=CLIENT, ticket=self.ticket(), keys=run)))

    # ------------------------------------------------------------------ nodes

    @rule(data=st.data(), pair=st.permutations(NAMES), soon=st.booleans())
    def replicate(self, data: st.DataObject, pair: list[str], soon: bool) -> None:
        source = self.nodes[pair[0]]
        stored = source.machine.blocks.dram.stored_keys()
        if stored:
            run = data.draw(st.lists(st.sampled_from(stored), min_size=1, unique=True))
            self.wire.append((pair[1], Replicate(source=source.ref, keys=run)))
            for kind in (Replicate, PinBlocks, PinGranted) if soon else ():
                self.hurry(kind)

    def hurry(self, kind: type[AnyMessage]) -> None:
        """The newest message of a kind overtakes all others."""
        for at in reversed(range(len(self.wire))):
            if isinstance(self.wire[at][1], kind):
                return self.deliver(*self.wire.pop(at))
        return None

    @rule(name=a_name, chance=st.integers(0, 5))
    def drain(self, name: str, chance: int) -> None:
        if not chance:
            self.wire.append((name, Drain()))

    @rule(name=a_name, chance=st.integers(0, 3))
    def crash(self, name: str, chance: int) -> None:
        if not chance:
            self.boot(name)

    # ------------------------------------------------------------------ wires and time

    @precondition(lambda self: self.wire)
    @rule(data=st.data(), twice=st.sampled_from([False, False, False, True]))
    def arrive(self, data: st.DataObject, twice: bool) -> None:
        """Any message may be the next, and come again."""
        at = data.draw(st.integers(0, len(self.wire) - 1))
        address, message = self.wire[at] if twice else self.wire.pop(at)
        self.deliver(address, message)

    @precondition(lambda self: self.wire)
    @rule()
    def arrive_all(self) -> None:
        """All that was said so far, in turn."""
        self.arrive_in_turn(len(self.wire))

    @precondition(lambda self: self.wire)
    @rule(count=st.integers(1, 20))
    def arrive_in_turn(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            self.deliver(*self.wire.pop(0))

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        del self.wire[data.draw(st.integers(0, len(self.wire) - 1))]

    @precondition(lambda self: any(node.running for node in self.nodes.values()))
    @rule(data=st.data(), well=st.sampled_from([True, True, True, False]))
    def move(self, data: st.DataObject, well: bool) -> None:
        """A copy ends, whole or anywhere in the middle."""
        running = [(n, b) for n, node in self.nodes.items() for b in node.running]
        name, batch_id = data.draw(st.sampled_from(sorted(running)))
        self.end_batch(self.nodes[name], batch_id, well)

    def end_batch(self, node: Node, batch_id: int, well: bool) -> None:
        batch = node.running.pop(batch_id)
        source = next((n for n in self.nodes.values() if n.segment == batch.peer), None)
        if source is None or not well:
            self.bring(node, TransferDone(batch_id=batch_id, error="the wire is cut"))
            return
        for op in batch.ops:
            part = source.memory[op.remote_offset : op.remote_offset + op.num_bytes]
            node.memory[op.local_offset : op.local_offset + op.num_bytes] = part
        self.bring(node, TransferDone(batch_id=batch_id))

    @rule(seconds=st.sampled_from([0.0, 1e-4, 0.02, 0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.heap.run_until(self.heap.now() + seconds)
        for node in self.nodes.values():
            node.machine.tick(self.heap.now())
            node.machine.check_integrity()

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def what_is_stored_is_right(self) -> None:
        for node in getattr(self, "nodes", {}).values():
            for block in node.machine.blocks.dram.stored_keys():
                assert node.holds(block), "wrong bytes"

    @invariant()
    def what_is_being_sent_stays_as_it_is(self) -> None:
        for asking in getattr(self, "asked", {}).values():
            for block, offset in zip(asking.run, asking.offsets, strict=False):
                assert asking.node.memory[offset : offset + BLOCK] == bytes_of(block)

    def teardown(self) -> None:
        """When words arrive again, nothing is held, and the gateway knows exactly what is where."""
        if not hasattr(self, "nodes"):
            return
        for at in [*self.pins]:
            del self.pins[at]
            self.wire.append((at[0].address, Unpin(reader=CLIENT, ticket=at[1])))
        self.grants.clear()
        for number in [*self.asked]:
            self.bring(self.asked.pop(number).node, AskEnded(number=number))
        for _ in range(60):
            self.wait(0.5)
            for node in self.nodes.values():
                for batch_id in [*node.running]:
                    self.end_batch(node, batch_id, well=True)
            while self.wire:
                self.deliver(*self.wire.pop(0))
                self.what_is_stored_is_right()
        self.index.check_integrity()
        for name, node in self.nodes.items():
            state = node.machine.state()
            assert node.machine.quiet, f"{name} still holds something"
            assert state.num_kept == 0, f"{name} still keeps something"
            assert node.machine.drained == state.draining, f"{name} is told to go and does not"
            blocks = node.machine.blocks
            tiers = blocks.dram.stored_keys(), blocks.tiering.ssd.stored_keys()
            in_dram, on_ssd = ((), ()) if state.draining else tiers
            assert self.index.held_by(name, Tier.DRAM) == set(in_dram)
            assert self.index.held_by(name, Tier.SSD) == set(on_ssd)


Pool.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
TestPool = Pool.TestCase
