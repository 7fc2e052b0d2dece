"""A client of the pool, as a machine: reads and writes blocks at pool nodes, and asks nodes and
gateways questions. Programs that are not workers use it, such as another engine or an operator's
tool.

It joins the cluster in the role `client`, so that what it has pinned or reserved is reclaimed when
it is lost. `failover` and `broadcast` decide which node a call goes to. A call is
answered exactly once, and only when nothing touches its memory any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    Drain,
    Forbidden,
    KvLayout,
    MooncakeError,
    PeerLost,
    PinGranted,
    PutGranted,
    Tier,
    TransferError,
    Unavailable,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.messages import Answer, ChainHead, Refused, Replicate
from mooncake.base.pool_messages import (
    AskPool,
    BlocksDescribed,
    BlocksFound,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    FindReplicas,
    ForgetBlocks,
    PinsSet,
    PoolState,
    RemoveBlocks,
    ReplicasFound,
    SetPins,
    TakenOver,
)
from mooncake.kvstore.client.block_memory import BlockMemory, MemoryTransfers, Places, Where
from mooncake.kvstore.client.block_reader import BlockReader, ReadResult, is_of
from mooncake.kvstore.client.block_writer import ASK_AGAIN_S, BlockWrite, BlockWriter
from mooncake.kvstore.client.calls import Attempt, Call, Policy, run
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Region, Transfer, TransferDone

REPORT_INTERVAL_S = 0.5

Question = FindBlocks | RemoveBlocks | SetPins | DescribeBlocks | AskPool | Replicate
Kind = TypeVar("Kind", bound=Answer)
T = TypeVar("T")


@dataclass(frozen=True)
class ClientPorts:
    """The world of a client."""

    channel: Channel
    transfer: Transfer
    region: Region
    """The client's memory: host memory, registered with `transfer`."""
    gateway_address: str


@dataclass(frozen=True)
class _Request:
    """A question that is not answered yet."""

    store: WorkerRef | None
    """The node that is asked; None: the gateways."""
    give_up_s: float
    done: Callable[[Any], None]


@dataclass(kw_only=True, eq=False)
class _Put(BlockWrite):
    """A put of a client, and its transfer once the node has given room."""

    writer: BlockWriter
    transfers: MemoryTransfers
    memory: BlockMemory
    offsets: dict[BlockKey, int]
    deadline_s: float
    done: Callable[[list[BlockKey] | MooncakeError], None]
    transfer: int | None = None

    def fill(self, keys: Sequence[BlockKey], places: BlockPlaces, now: float) -> None:
        del now
        here = self.memory.at([self.offsets[key] for key in keys])
        checksums: list[int] = []

        def written(done: TransferDone, at: float) -> None:
            if done.error is None:
                self.writer.end(self, list(keys), at, checksums=checksums)
            else:
                self.writer.end(self, [], at, TransferError(done.error))

        self.transfer = self.transfers.write(here, places, self.deadline_s, written)
        with contextlib.suppress(TransferError):  # of a device: the node hashes them itself
            checksums += [self.memory.checksum(offset) for offset in here.offsets]  # as they move

    def stop(self, now: float) -> None:
        del now
        if self.transfer is not None:
            self.transfers.cancel(self.transfer)

    def ended(self, answer: list[BlockKey] | MooncakeError, now: float) -> None:
        del now
        self.done(answer)


class PoolClient:
    """Gets, puts, pins and removes blocks for one client. Blocks lie packed in the client's own
    memory, as in the pool's. They may also lie in other registered memory, in the shape that it
    has.
    """

    def __init__(
        self,
        hello: WorkerHello,
        layout: KvLayout,
        ports: ClientPorts,
        *,
        store: WorkerRef | None = None,
    ) -> None:
        """Use `store` as this client's own node, or the pool node of its machine once the gateway
        names it.
        """
        self.ref = hello.worker
        self.now = float("-inf")
        """Time of the event, tick or start of a policy that is being handled."""
        self._channel = ports.channel
        self._memory = BlockMemory.packed(ports.region, layout)
        self._store = store
        self._membership = Membership(
            hello, ports.channel, ports.gateway_address, Tier.HBM, list, REPORT_INTERVAL_S
        )
        self._transfers = MemoryTransfers(ports.transfer)
        self._reader = BlockReader(hello.worker, ports.channel, self._transfers, verify=True)
        self._writer = BlockWriter(
            hello.worker,
            ports.channel,
            lambda peer, question, ended: self._transfers.ask_alone(
                peer, question, self.now + ASK_AGAIN_S, ended
            ),
        )
        self._requests: dict[int, _Request] = {}
        self._last_ticket = 0

    @property
    def store(self) -> WorkerRef | None:
        """The client's own node, once known."""
        return self._store or self._membership.kvstore

    @property
    def num_open(self) -> int:
        return len(self._requests) + self._reader.num_open + self._writer.num_open

    # ------------------------------------------------------------------ calls

    def run(self, policy: Policy[T], done: Callable[[T | MooncakeError], None], now: float) -> None:
        """Start a policy. `done` is called once, with its answer or with why there is none. Raises
        ValueError for places that do not exist.
        """
        self.now = now
        run(policy, done)

    def places(self, keys: Sequence[BlockKey], where: Where) -> Places:
        """Return where blocks lie, which may be byte offsets in the client's own memory. Raises
        ValueError.
        """
        if len(keys) != len(where):
            raise ValueError(f"{len(where)} places for {len(keys)} blocks")
        return where if isinstance(where, Places) else self._memory.at(where)

    def request(
        self, at: Attempt, question: Question, kind: type[Kind]
    ) -> Call[Kind | MooncakeError]:
        """Ask a node a question, and fill its ticket in here. The answer is of the kind given."""
        return self._ask(at.store, [at.store.address], question, kind, at.give_up_s)

    def ask_gateways(
        self, question: FindReplicas | ForgetBlocks, deadline_s: float
    ) -> Call[ReplicasFound | MooncakeError]:
        """Ask all gateways a question, and fill its ticket in here. The first answer counts."""
        addresses = self._membership.gateway_addresses
        return self._ask(None, addresses, question, ReplicasFound, deadline_s)

    def read(
        self, at: Attempt, keys: Sequence[BlockKey], places: Places
    ) -> Call[int | MooncakeError]:
        """Read a run of blocks into `places`, whose old content is lost even when fewer come. The
        answer is the number of leading blocks that arrived, verified if the node gave checksums.
        """

        def begin(done: Callable[[int | MooncakeError], None]) -> None:
            def ended(result: ReadResult, _now: float) -> None:
                done(result.num_blocks or result.error or 0)

            self._reader.start(
                at.store, keys, places, at.deadline_s, ended, answer_by_s=at.answer_by_s
            )

        return Call(begin)

    def write(
        self, at: Attempt, keys: Sequence[BlockKey], places: Places, tenant: str = ""
    ) -> Call[list[BlockKey] | MooncakeError]:
        """Write blocks, a run of one chain, which must not change before the answer. The answer is
        the keys of those that were written. The others were stored already, or there was no room.
        """

        def begin(done: Callable[[list[BlockKey] | MooncakeError], None]) -> None:
            offsets = dict(zip(keys, places.offsets, strict=True))
            put = _Put(
                store=at.store, keys=list(offsets), timeout_s=at.give_up_s - self.now,
                writer=self._writer, transfers=self._transfers, memory=places.memory,
                offsets=offsets, deadline_s=at.deadline_s, done=done,
            )  # fmt: skip
            self._writer.start(put, tenant)

        return Call(begin)

    def report_use(self, store: WorkerRef, run: Sequence[BlockKey]) -> None:
        """Tell a node that a chain of stored blocks was used, although nothing is written."""
        self._writer.report_use(store, ChainHead(list(run), len(run)))

    def start_drain(self, store: WorkerRef) -> None:
        """Have a node accept nothing more. There is no answer."""
        self._channel.send(store.address, Drain())

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take an answer or the end of a transfer. Unknown ones are ignored, and so are answers to
        an earlier boot.
        """
        self.now = now
        if isinstance(event, Answer) and event.asker != self.ref:
            return
        match event:
            case PutGranted():
                self._writer.on_granted(event, now)
            case PinGranted():
                self._reader.on_granted(event, now)
            case TransferDone():
                self._transfers.on_done(event, now)
            case (
                BlocksFound() | BlocksRemoved() | PinsSet() | BlocksDescribed() | PoolState()
                | TakenOver()
            ):  # fmt: skip
                self._on_answer(event, event.store.address)
            case ReplicasFound():
                self._on_answer(event, None)
            case Refused():
                self._on_refused(event, now)
            case PeerLost():
                self._membership.handle(event)
                self._on_peer_lost(event.worker, now)
            case _:
                self._membership.handle(event)

    def tick(self, now: float) -> float:
        """Give up calls that are not answered, verify what arrived, and report. Return when to call
        again.
        """
        self.now = now
        wakes = [self._reader.tick(now), self._writer.tick(now)]
        for ticket, request in list(self._requests.items()):
            if request.give_up_s <= now:
                del self._requests[ticket]
                store = request.store
                asked = "no gateway" if store is None else f"the pool node at {store.address}"
                verb = "answers" if store is None else "does not answer"
                request.done(TransferError(f"{asked} {verb}"))
        wakes += [request.give_up_s for request in self._requests.values()]
        wakes.append(self._membership.tick(now, lambda: WorkerLoad(num_running=self.num_open)))
        return min(wake for wake in wakes if wake is not None)

    def check_integrity(self) -> None:
        """Raise AssertionError when a read was lost."""
        self._reader.check_integrity()

    # ------------------------------------------------------------------ questions

    def _ask(
        self,
        store: WorkerRef | None,
        addresses: Sequence[str],
        question: Question | FindReplicas | ForgetBlocks,
        kind: type[Kind],
        give_up_s: float,
    ) -> Call[Kind | MooncakeError]:
        def begin(done: Callable[[Kind | MooncakeError], None]) -> None:
            def answered(answer: Answer | MooncakeError) -> None:
                if not isinstance(answer, kind | MooncakeError):
                    answer = TransferError("the pool answered something else")
                done(answer)

            self._last_ticket += 1
            self._requests[self._last_ticket] = _Request(store, give_up_s, answered)
            message = msgspec.structs.replace(question, ticket=self._last_ticket)
            for address in addresses:
                self._channel.send(address, message)

        return Call(begin)

    def _on_answer(self, event: Answer, address: str | None) -> None:
        request = self._requests.get(event.ticket)
        expected = request.store.address if request is not None and request.store else None
        if request is not None and address == expected:
            del self._requests[event.ticket]
            request.done(event)

    def _on_refused(self, event: Refused, now: float) -> None:
        """End the call whose message was refused, with the reason that was given."""
        self._membership.handle(event)
        error = Forbidden(event.reason)
        if event.message == "PinBlocks":
            self._reader.on_refused(event.ticket, error, now)
        elif event.message == "PutStart":
            self._writer.on_refused(event.ticket, error, now)
        elif (request := self._requests.pop(event.ticket, None)) is not None:
            request.done(error)

    def _on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """Fail what the lost node had not answered yet, and cancel running transfers."""
        self._reader.on_peer_lost(worker, now)
        self._writer.on_peer_lost(worker, now)
        for ticket, request in list(self._requests.items()):
            if request.store is not None and is_of(request.store, worker):
                del self._requests[ticket]
                request.done(Unavailable("the pool node was lost"))
