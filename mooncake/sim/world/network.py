"""The simulated network: control messages with a delay, and bulk bytes over links that queue.

Messages of one pair stay in order. A transfer occupies the sender's and the receiver's link for its
bytes, once for each copy that the receiver keeps. The two directions are separate. A dead end
swallows messages, and fails transfers after `failure_s`, as a broken connection does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

import msgspec

from mooncake.base.kv_layout import SegmentRef
from mooncake.base.pool_messages import AnyMessage
from mooncake.rpc.codec import decode, encode
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.questions import Question, Questions
from mooncake.transfer.engine import Op, Pieces, Region, TransferBatch, TransferDone, TransferOp
from mooncake.transfer.grants import Fence, Grants


class NetworkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Delays, bandwidth and fault rates of the simulated network."""

    message_delay_s: float = 100e-6
    message_jitter_s: float = 0.0
    """The largest extra delay, drawn per message."""
    loss: float = 0.0
    """The share of messages that are lost."""
    reordered: float = 0.0
    """The share of messages that overtake those before them (a connection that broke and came
    back).
    """
    link_bytes_per_s: float = 50e9
    local_bytes_per_s: float = 50e9
    """The bandwidth between processes of one node."""
    transfer_latency_s: float = 20e-6
    failure_s: float = 0.5
    """The time until a transfer with a dead peer fails."""
    corruption: float = 0.0
    """The share of READ copies in which one bit arrives wrong (worlds with bytes)."""
    writes_by_hardware: bool = False
    """Whether bytes go on while the process that writes them stands still, and know nothing of
    grants. Then pages of a lost writer rest for a time. Otherwise the bytes stand still too, and
    land or are refused when the process goes on.
    """
    questions: bool = False
    """Whether processes take questions over their data connections. `loss` is also the share of
    questions whose connection breaks.
    """
    encode: bool = False
    """Whether messages pass through the real codec. This is slower, and finds what cannot
    travel.
    """


class SimRegion:
    """Registered memory. It has no bytes in a world that does not compare contents."""

    def __init__(self, region_id: int, num_bytes: int, buffer: memoryview | None) -> None:
        self.region_id = region_id
        self.num_bytes = num_bytes
        self.guarded = False
        self.num_copies = 1
        """How many ranks each hold all of it. What is written here, or read into it, goes to each
        of them.
        """
        self._buffer = buffer

    @property
    def buffer(self) -> memoryview:
        if self._buffer is None:
            raise ValueError("this world moves no real bytes")
        return self._buffer

    @property
    def fd(self) -> None:
        return None

    @property
    def device(self) -> str:
        return "host"

    def read(self, ranges: Sequence[tuple[int, int]]) -> Iterable[memoryview]:
        """Return the bytes of `ranges`. Raises ValueError in a world without bytes."""
        return (self.buffer[offset : offset + length] for offset, length in ranges)

    @property
    def has_bytes(self) -> bool:
        return self._buffer is not None


class Endpoint:
    """One process on the network: its message handler and its memory."""

    def __init__(self, address: str, node: str, deliver: Callable[[msgspec.Struct], None]) -> None:
        self.address = address
        self.node = node
        self.deliver = deliver
        self.regions: dict[int, SimRegion] = {}
        self.alive = True
        self.grants = Grants(defaultdict(int))
        self.still_until_s = 0.0
        """The process stands still until this time."""
        self.skew_s = 0.0
        """How far its clock is ahead."""
        self.hears = False
        """Whether it takes questions."""

    def holds(self, op: TransferOp) -> bool:
        """Whether the remote range of `op` lies in memory that is registered here."""
        region = self.regions.get(op.remote_region)
        return region is not None and op.remote_offset + op.num_bytes <= region.num_bytes


class Network:
    """All endpoints and the wires between their nodes."""

    def __init__(self, heap: EventHeap, config: NetworkConfig, random: Random) -> None:
        self.heap = heap
        self.config = config
        self._random = random
        self._endpoints: dict[str, Endpoint] = {}
        self._last_arrival: dict[tuple[str, str], float] = {}
        self._link_free: dict[tuple[str, str], float] = {}
        self._cut: set[tuple[str, str]] = set()
        """Pairs (from, to) of nodes between which nothing passes in this direction."""
        self.listener: Callable[[str, str, AnyMessage], None] | None = None
        """Gets every message that is sent: (from, to, message)."""
        self.num_bytes_moved = 0
        self.on_write: Callable[[Endpoint, TransferBatch], None] | None = None
        """Gets every WRITE as it lands, with its receiver."""
        self.num_writes_refused = 0
        """How many writes were refused because their grant had been revoked."""
        self.questions = Questions(self, random)

    def attach(self, endpoint: Endpoint) -> None:
        """Connect a process under a new address."""
        if endpoint.address in self._endpoints:
            raise ValueError(f"{endpoint.address} is attached already")
        self._endpoints[endpoint.address] = endpoint

    def detach(self, address: str) -> None:
        """Disconnect a process."""
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            endpoint.alive = False

    def partition(self, node_a: str, node_b: str, *, cut: bool) -> None:
        """Cut or mend the wire between two nodes, both ways."""
        self.partition_one_way(node_a, node_b, cut=cut)
        self.partition_one_way(node_b, node_a, cut=cut)

    def partition_one_way(self, source: str, target: str, *, cut: bool) -> None:
        """Cut or mend the wire from one node to another. The way back stays as it is."""
        if cut:
            self._cut.add((source, target))
        else:
            self._cut.discard((source, target))

    def send(self, source: Endpoint, address: str, message: AnyMessage) -> None:
        """Deliver a control message later. It is lost when the receiver does not exist."""
        target = self._endpoints.get(address)
        if target is None or (source.node, target.node) in self._cut:
            return
        if self.config.loss and self._random.random() < self.config.loss:
            return
        if self.config.encode:
            message = decode(encode(message))
        delay = self.config.message_delay_s
        if self.config.message_jitter_s:
            delay += self._random.random() * self.config.message_jitter_s
        arrival = self.heap.now() + delay
        if not (self.config.reordered and self._random.random() < self.config.reordered):
            pair = (source.address, address)
            arrival = max(arrival, self._last_arrival.get(pair, 0.0))
            self._last_arrival[pair] = arrival
        if self.listener is not None:
            self.listener(source.address, address, message)
        self.heap.at(arrival, lambda: self._arrive(target, message))

    def corrupts(self) -> bool:
        """Draw whether the next copy arrives damaged."""
        return self.config.corruption > 0 and self._random.random() < self.config.corruption

    def find(self, engine_id: str) -> Endpoint | None:
        """Return the living process with this segment."""
        return self._endpoints.get(engine_id)

    def reserve(self, source: str, target: str, num_bytes: int) -> float:
        """Queue bytes on the links from node to node; return when the last one arrives."""
        config, now = self.config, self.heap.now()
        self.num_bytes_moved += num_bytes
        if source == target:
            key = [(source, "local")]
            seconds = num_bytes / config.local_bytes_per_s
        else:
            key = [(source, "out"), (target, "in")]
            seconds = num_bytes / config.link_bytes_per_s
        # Each link is kept busy by itself, like the flows that share it. A transfer that waits for
        # a busy receiver does not delay the sender's transfers to others.
        done_s = now
        for link in key:
            free_s = max(now, self._link_free.get(link, 0.0)) + seconds
            self._link_free[link] = free_s
            done_s = max(done_s, free_s)
        return done_s + config.transfer_latency_s

    def is_cut(self, a: Endpoint, b: Endpoint) -> bool:
        """Whether the wire between two processes is cut in either direction. A transfer
        needs both.
        """
        return bool(self._cut) and not self._cut.isdisjoint([(a.node, b.node), (b.node, a.node)])

    def _arrive(self, target: Endpoint, message: AnyMessage) -> None:
        if target.alive:
            target.deliver(message)


class SimChannel:
    """The channel port of one simulated process."""

    def __init__(self, network: Network, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint

    @property
    def address(self) -> str:
        return self._endpoint.address

    def send(self, address: str, message: AnyMessage) -> None:
        if self._endpoint.alive:
            self._network.send(self._endpoint, address, message)

    def figures(self) -> Mapping[str, float]:
        return {}


class SimTransfer:
    """The transfer port of one simulated process. The process's address names its segment."""

    def __init__(
        self, network: Network, endpoint: Endpoint, *, with_bytes: bool, skew_s: float = 0.0
    ) -> None:
        self._network = network
        self._endpoint = endpoint
        endpoint.skew_s = skew_s
        self._with_bytes = with_bytes
        self._last_batch = 0
        self._last_region = 0
        self._started_s: dict[int, float] = {}
        self._cancelled: set[int] = set()

    @property
    def segment(self) -> SegmentRef:
        endpoints = {"sim": "", **({"questions": ""} if self._endpoint.hears else {})}
        return SegmentRef(self._endpoint.address, endpoints, self._endpoint.node)

    def allocate(self, num_bytes: int, label: str) -> SimRegion:
        """Return simulated memory. `label` is for people and is not kept."""
        del label
        self._last_region += 1
        buffer = memoryview(bytearray(num_bytes)) if self._with_bytes else None
        region = SimRegion(self._last_region, num_bytes, buffer)
        self._endpoint.regions[region.region_id] = region
        return region

    def register(self, buffer: memoryview, label: str) -> Region:
        """Make existing memory reachable. `label` is for people and is not kept."""
        del label
        self._last_region += 1
        region = SimRegion(self._last_region, buffer.nbytes, buffer)
        self._endpoint.regions[region.region_id] = region
        return region

    def lend(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        """Do nothing: in the simulated world all processes are workers."""

    def take_back(self, holder: str, region: Region, pieces: Pieces, *, write: bool) -> None:
        """Do nothing, as `lend`."""

    def unregister(self, region: Region) -> None:
        self._endpoint.regions.pop(region.region_id, None)

    def guard(self, region: Region) -> None:
        self._endpoint.regions[region.region_id].guarded = True

    def grant(self) -> int:
        return self._endpoint.grants.issue()

    def revoke(self, grant: int) -> None:
        self._endpoint.grants.revoke(grant)

    def fence(self, grant: int) -> Fence:
        del grant
        by_hardware = self._network.config.writes_by_hardware
        return Fence.UNKNOWN if by_hardware else Fence.CLOSED

    def takes_questions(self, peer: SegmentRef) -> bool:
        return "questions" in peer.endpoints

    def hear_questions(self) -> None:
        self._endpoint.hears = self._network.config.questions

    def answer(self, number: int, answer: bytes, region: Region, pieces: Pieces) -> None:
        self._network.questions.answer(number, answer, region, pieces)

    def refuse(self, number: int, reason: str) -> None:
        self._network.questions.end(number, reason)

    def _ask(self, batch_id: int, batch: TransferBatch, owner: Endpoint) -> None:
        """Ask a process. Nothing is written here once the batch has ended or was cancelled."""

        def is_wanted() -> bool:
            return batch_id in self._started_s and batch_id not in self._cancelled

        def ended(error: str | None, answer: bytes, num_bytes: int) -> None:
            self._finish(batch_id, error, num_bytes, answer)

        question = Question(self._endpoint, owner, batch.ops, is_wanted, ended)
        self._network.questions.ask(question, batch.question)

    def submit(self, batch: TransferBatch) -> int:
        self._last_batch += 1
        batch_id = self._last_batch
        network, heap = self._network, self._network.heap
        self._started_s[batch_id] = heap.now()
        # A deadline is on the clock of the process that set it.
        deadline_s = (
            batch.deadline_s - self._endpoint.skew_s if batch.deadline_s is not None else None
        )
        peer = network.find(batch.peer.engine_id)
        if peer is None or network.is_cut(self._endpoint, peer):
            fails_s = heap.now() + network.config.failure_s
            if deadline_s is not None:
                fails_s = min(fails_s, deadline_s)
            heap.at(fails_s, lambda: self._fail(batch_id, "the peer does not answer"))
            return batch_id
        if batch.question:
            self._ask(batch_id, batch, peer)
            if deadline_s is not None:
                heap.at(deadline_s, lambda: self._fail(batch_id, "deadline"))
            return batch_id
        num_bytes = sum(op.num_bytes for op in batch.ops)
        carried = sum(op.num_bytes * self._num_copies(batch.op, op, peer) for op in batch.ops)
        here, there = self._endpoint.node, peer.node
        source, target = (here, there) if batch.op is Op.WRITE else (there, here)
        done_s = network.reserve(source, target, carried)
        if deadline_s is not None and done_s > deadline_s:
            heap.at(deadline_s, lambda: self._fail(batch_id, "deadline"))
        else:
            heap.at(done_s, lambda: self._apply(batch_id, batch, peer, num_bytes))
        return batch_id

    def _num_copies(self, kind: Op, op: TransferOp, peer: Endpoint) -> int:
        """Return the number of ranks whose memories get a piece."""
        if kind is Op.WRITE:
            region = peer.regions.get(op.remote_region)
        else:
            region = self._endpoint.regions.get(op.local_region)
        return region.num_copies if region is not None else 1

    def cancel(self, batch_id: int) -> None:
        """Make a batch end soon and copy nothing."""
        network = self._network
        self._cancelled.add(batch_id)
        network.heap.after(network.config.failure_s, lambda: self._fail(batch_id, "cancelled"))

    def counters(self) -> Mapping[str, float]:
        return {}

    def _apply(self, batch_id: int, batch: TransferBatch, peer: Endpoint, num_bytes: int) -> None:
        if self._stands_still(lambda: self._apply(batch_id, batch, peer, num_bytes)):
            return
        if batch_id in self._cancelled or batch_id not in self._started_s:
            self._finish(batch_id, "cancelled", 0)
            return
        if not self._endpoint.alive:
            return
        if not peer.alive or self._network.is_cut(self._endpoint, peer):
            self._finish(batch_id, "the peer was lost", 0)
            return
        error = self._refusal(batch, peer)
        if error is None:
            if batch.op is Op.WRITE and self._network.on_write is not None:
                self._network.on_write(peer, batch)
            error = next((e for op in batch.ops if (e := self._copy(batch.op, op, peer))), None)
        self._finish(batch_id, error, 0 if error else num_bytes)

    def _stands_still(self, again: Callable[[], None]) -> bool:
        """Whether this process stands still, and its bytes with it. If so, `again` is called when
        it goes on.
        """
        heap, until_s = self._network.heap, self._endpoint.still_until_s
        if self._network.config.writes_by_hardware or heap.now() >= until_s:
            return False
        heap.at(until_s, again)
        return True

    def _refusal(self, batch: TransferBatch, peer: Endpoint) -> str | None:
        """Return why a WRITE may not land, as its receiver says. Simulated hardware does not ask
        it.
        """
        if batch.op is Op.READ or self._network.config.writes_by_hardware:
            return None
        if batch.grant:
            refusal = peer.grants.permit(batch.grant).withdrawn
            self._network.num_writes_refused += refusal is not None
            return refusal
        guarded = any(peer.regions[op.remote_region].guarded for op in batch.ops)
        return "the peer refuses: it is written to by grants only" if guarded else None

    def _copy(self, kind: Op, op: TransferOp, peer: Endpoint) -> str | None:
        local = self._endpoint.regions.get(op.local_region)
        remote = peer.regions.get(op.remote_region)
        if local is None or op.local_offset + op.num_bytes > local.num_bytes:
            return "the local range is not registered"
        if remote is None or not peer.holds(op):
            return "the peer refuses: the range is not registered"
        if not (local.has_bytes and remote.has_bytes):
            return None
        here = local.buffer[op.local_offset : op.local_offset + op.num_bytes]
        there = remote.buffer[op.remote_offset : op.remote_offset + op.num_bytes]
        if kind is Op.WRITE:
            there[:] = here
        else:
            here[:] = there
            if self._network.corrupts():
                here[0] ^= 1
        return None

    def _fail(self, batch_id: int, error: str) -> None:
        """End a batch whose deadline has passed, or that was cancelled. Bytes that are on their way
        come first while this process stands still.
        """
        if not self._stands_still(lambda: self._fail_soon(batch_id, error)):
            self._finish(batch_id, error, 0)

    def _fail_soon(self, batch_id: int, error: str) -> None:
        self._network.heap.after(0.0, lambda: self._finish(batch_id, error, 0))

    def _finish(
        self, batch_id: int, error: str | None, num_bytes: int, answer: bytes = b""
    ) -> None:
        """End a batch unless it has ended. A cancelled batch may have ended before."""
        started_s = self._started_s.pop(batch_id, None)
        if started_s is None:
            return
        self._cancelled.discard(batch_id)
        if self._endpoint.alive:
            seconds = self._network.heap.now() - started_s
            self._endpoint.deliver(
                TransferDone(
                    batch_id=batch_id, error=error, num_bytes=num_bytes, seconds=seconds,
                    answer=answer,
                )
            )  # fmt: skip
