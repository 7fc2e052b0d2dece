"""A world for one kvstore node: a channel that remembers, an arena one can write to, a gateway."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from mooncake.base import (
    AnyMessage,
    BlockEvents,
    BlockPlaces,
    KvLayout,
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
from mooncake.base.messages import Message
from mooncake.kvstore.block_checksum import checksum_of
from mooncake.kvstore.config import KvStoreConfig, ObjectStoreConfig, SsdConfig
from mooncake.kvstore.node.node import KvNode
from mooncake.kvstore.node.questions import NIL
from mooncake.rpc.codec import decode
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.disk import SimBucket, SimDiskConfig, SimDisks, SimMedium
from mooncake.sim.world.network import SimRegion
from mooncake.transfer.engine import Pieces, Region, TransferBatch
from mooncake.transfer.grants import Fence, Grants

LAYOUT = KvLayout(num_layers=2, block_tokens=4, kv_width=4, dtype="float16", fingerprint="test")
BLOCK = LAYOUT.block_bytes
GATEWAY = WorkerRef("gateway", "g1", "inproc://gateway")
STORE = WorkerRef("kv-0", "k1", "inproc://kv-0")

Answer = TypeVar("Answer", bound=Message)


def worker(name: str, epoch: str = "e1") -> WorkerRef:
    return WorkerRef(name, epoch, f"inproc://{name}")


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


class CountedKey(bytes):
    """A key that counts how often such keys are compared."""

    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.num_compared += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


def content(block: bytes, layer: int) -> bytes:
    """Return the bytes of a slice that no other block or layer has."""
    return (block + bytes([layer])).ljust(LAYOUT.slice_bytes, b"\xa5")


class RecordingChannel:
    """Keeps what was sent, by address."""

    address = STORE.address

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []

    def send(self, address: str, message: AnyMessage) -> None:
        self.sent.append((address, message))

    def figures(self) -> dict[str, float]:
        return {}


REGION_ID = 3


class LocalTransfer:
    """Allocates; nothing is moved by it."""

    segment = SegmentRef("kv-0-boot", {}, "here")

    def __init__(self) -> None:
        self.regions: list[SimRegion] = []
        self.lent: Counter[tuple[str, int, bool]] = Counter()
        """Client, offset and whether it is to be written -> how often it is lent."""
        self.grants = Grants(defaultdict(int))
        self.usual_fence = Fence.CLOSED
        self.fences: dict[int, Fence] = {}
        self.answers: dict[int, tuple[AnyMessage | None, list[int]]] = {}
        """The answer to each question, and where the blocks behind it lie."""
        self.refusals: dict[int, str] = {}

    def allocate(self, num_bytes: int, label: str) -> Region:
        buffer = memoryview(bytearray(num_bytes))
        self.regions.append(SimRegion(REGION_ID, num_bytes, buffer))
        return self.regions[-1]

    def register(self, buffer: memoryview, label: str) -> Region:
        raise NotImplementedError

    def unregister(self, region: Region) -> None:
        raise NotImplementedError

    def lend(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        self.lent.update((holder, offset, write) for offset in pieces.offsets)

    def take_back(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        for offset in pieces.offsets:
            assert self.lent[holder, offset, write] > 0, "it was lent"
        self.lent -= Counter((holder, offset, write) for offset in pieces.offsets)

    def guard(self, region: Region) -> None:
        assert isinstance(region, SimRegion)
        region.guarded = True

    def grant(self) -> int:
        return self.grants.issue()

    def revoke(self, grant: int) -> None:
        self.grants.revoke(grant)

    def fence(self, grant: int) -> Fence:
        assert self.grants.permit(grant).withdrawn is not None, "it was revoked first"
        return self.fences.get(grant, self.usual_fence)

    def takes_questions(self, peer: SegmentRef) -> bool:
        raise NotImplementedError

    def hear_questions(self) -> None:
        """The tests hand questions to the node."""

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        assert region is self.regions[0]
        told = None if answer == NIL else decode(answer)
        self.answers[number] = told, list(pieces.offsets)

    def refuse(self, number: int, reason: str) -> None:
        self.refusals[number] = reason

    def submit(self, batch: TransferBatch) -> int:
        raise NotImplementedError

    def cancel(self, batch_id: int) -> None:
        raise NotImplementedError

    def counters(self) -> Mapping[str, float]:
        return {}


class NodeWorld:
    """One node of `num_blocks` blocks, welcomed by a gateway, and peers that talk to it.

    With `media` it has disks of `ssd_blocks` slots each; `restart` keeps them. `bucket` may be that
    of other worlds too. Disks and buckets work while `tick` lets time pass.
    """

    def __init__(
        self,
        num_blocks: int = 8,
        *,
        welcomed: bool = True,
        media: list[SimMedium] | None = None,
        ssd_blocks: int = 8,
        bucket: SimBucket | None = None,
        bucket_blocks: int = 64,
        **settings,
    ) -> None:
        self.media = media or []
        self.bucket = bucket
        settings.setdefault("checksums", False)
        self.config = KvStoreConfig(
            dram_bytes=num_blocks * BLOCK + BLOCK // 2,
            ssd=[
                SsdConfig(directory=f"/{n}", num_bytes=ssd_blocks * BLOCK)
                for n in range(len(self.media))
            ],
            object_store=None
            if bucket is None
            else ObjectStoreConfig(bucket="blocks", num_bytes=bucket_blocks * BLOCK),
            **settings,
        )
        self.heap = EventHeap()
        self._tickets = 0
        self._num_boots = 0
        self.disks: SimDisks | None = None
        self.boot(welcomed=welcomed)

    @property
    def now(self) -> float:
        return self.heap.now()

    def boot(self, *, welcomed: bool = True) -> None:
        """Start the node, or kill it and start it again: disks stay, memory does not."""
        if self.disks is not None:
            self.disks.kill()
        self._num_boots += 1
        self.store = WorkerRef("kv-0", f"k{self._num_boots}", "inproc://kv-0")
        hello = WorkerHello(
            worker=self.store, role=Role.KVSTORE, node_id="node-0", host="here", pid=1,
            layout_fingerprint=LAYOUT.fingerprint, block_tokens=LAYOUT.block_tokens, num_blocks=0,
        )  # fmt: skip
        self.channel = RecordingChannel()
        self.transfer = LocalTransfer()
        tiers = (Tier.DRAM, Tier.SSD, Tier.OBJECT)
        self.inventories: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}
        self._last_events = dict.fromkeys(tiers, 0)
        num_slots = [ssd.num_bytes // BLOCK for ssd in self.config.ssd]
        media = list(self.media)
        if self.bucket is not None and self.config.object_store is not None:
            media.append(self.bucket)
            num_slots.append(self.config.object_store.num_bytes // BLOCK)
        self.disks = SimDisks(self.heap, SimDiskConfig(), media, num_slots, LAYOUT, self._on_disk)
        self.node = KvNode(
            self.config, hello, LAYOUT, self.channel, self.transfer, GATEWAY.address, self.disks
        )
        if welcomed:
            self.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))

    @property
    def inventory(self) -> set[bytes]:
        """What the gateway believes to lie in DRAM."""
        return self.inventories[Tier.DRAM]

    @property
    def on_ssd(self) -> set[bytes]:
        """What the gateway believes to lie on SSD."""
        return self.inventories[Tier.SSD]

    @property
    def in_bucket(self) -> set[bytes]:
        """What the gateway believes that this node can read from the bucket."""
        return self.inventories[Tier.OBJECT]

    def handle(self, message: msgspec.Struct) -> list[tuple[str, AnyMessage]]:
        """Bring a message; return what was sent because of it."""
        before = len(self.channel.sent)
        self.node.handle(message, self.now)
        if self.media or self.bucket is not None:
            self.node.tick(self.now)
        return self._after(before)

    def tick(self, now: float) -> float | None:
        """Move time; disks work meanwhile."""
        self.heap.run_until(now)
        before = len(self.channel.sent)
        wake = self.node.tick(now)
        self._after(before)
        return wake

    def _on_disk(self, event: msgspec.Struct) -> None:
        """A disk has something to tell."""
        self.handle(event)

    def _after(self, before: int) -> list[tuple[str, AnyMessage]]:
        """Check the node, and replay what it told the gateway into `inventory`."""
        self.node.check_integrity()
        sent = self.channel.sent[before:]
        for address, message in sent:
            if isinstance(message, BlockEvents):
                assert address == GATEWAY.address
                self._last_events[message.tier] += 1
                assert message.sequence_no == self._last_events[message.tier]
                inventory = self.inventories[message.tier]
                if message.snapshot:
                    inventory.clear()
                assert not set(message.stored) & set(message.removed)
                assert inventory >= set(message.removed), "removed what was not there"
                assert inventory.isdisjoint(message.stored), "stored twice"
                inventory -= set(message.removed)
                inventory |= set(message.stored)
        return sent

    def answer(self, message: AnyMessage, kind: type[Answer]) -> Answer:
        """Bring a message that wants one answer of `kind`; return it."""
        [found] = [sent for _, sent in self.handle(message) if isinstance(sent, kind)]
        return found

    def ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def load(self):
        """Return the newest load report's load."""
        self.tick(self.now + 1)
        reports = [sent for _, sent in self.channel.sent if type(sent).__name__ == "LoadReport"]
        return reports[-1].load

    # -------------------------------------------------------------- shorthand for whole stories

    def start(self, writer: WorkerRef, wanted: list[bytes], tenant: str = "") -> PutGranted:
        return self.answer(
            PutStart(writer=writer, ticket=self.ticket(), keys=wanted, tenant=tenant), PutGranted
        )

    def end(self, writer: WorkerRef, grant: PutGranted, written=None, dropped=()) -> None:
        written = grant.keys if written is None else written
        self.handle(
            PutEnd(writer=writer, ticket=grant.ticket, written=list(written), dropped=list(dropped))
        )

    def put(self, writer: WorkerRef, wanted: list[bytes], tenant: str = "") -> list[bytes]:
        """Put whole blocks with their bytes; return the keys that were granted."""
        grant = self.start(writer, wanted, tenant)
        for block, offset in zip(grant.keys, grant.places.offsets, strict=True):
            self.write(grant.places, offset, block)
        self.end(writer, grant)
        return grant.keys

    def pin(self, reader: WorkerRef, wanted: list[bytes]) -> PinGranted:
        return self.answer(PinBlocks(reader=reader, ticket=self.ticket(), keys=wanted), PinGranted)

    def pin_soon(self, reader: WorkerRef, wanted: list[bytes], seconds: float = 1.0) -> PinGranted:
        """Pin what may have to come up from a disk first."""
        before = len(self.channel.sent)
        ticket = self.ticket()
        self.handle(PinBlocks(reader=reader, ticket=ticket, keys=wanted))
        self.tick(self.now + seconds)
        [granted] = [
            sent for _, sent in self.channel.sent[before:]
            if isinstance(sent, PinGranted) and sent.ticket == ticket
        ]  # fmt: skip
        return granted

    def unpin(self, reader: WorkerRef, pinned: PinGranted) -> None:
        self.handle(Unpin(reader=reader, ticket=pinned.ticket))

    # -------------------------------------------------------------- bytes

    def write(self, places: BlockPlaces, offset: int, block: bytes) -> None:
        """Do what a writer's transfers do: one slice a layer."""
        for layer in range(LAYOUT.num_layers):
            self._slice(places, offset, layer)[:] = content(block, layer)

    def holds(self, places: BlockPlaces, offset: int, block: bytes) -> bool:
        """Whether the bytes of `block` lie whole at `offset`."""
        return all(
            self._slice(places, offset, layer) == content(block, layer)
            for layer in range(LAYOUT.num_layers)
        )

    def checksum(self, block: bytes) -> int:
        """Return the checksum of `block` when it is right."""
        whole = b"".join(content(block, n) for n in range(LAYOUT.num_layers))
        return checksum_of(whole, LAYOUT)

    def _slice(self, places: BlockPlaces, offset: int, layer: int) -> memoryview:
        assert places.segment == self.transfer.segment
        assert places.region == REGION_ID
        start = offset + layer * places.layer_stride
        stop = start + LAYOUT.slice_bytes
        buffer = self.transfer.regions[0].buffer
        assert 0 <= start < stop <= len(buffer)
        return buffer[start:stop]
