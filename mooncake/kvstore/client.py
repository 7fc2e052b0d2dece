"""A client of the pool, as a machine: puts blocks from its own registered memory, gets blocks into
it, looks, removes, asks. For programs that are no worker: another engine, an operator's tool.

It joins the cluster in the role `client`, so that what it holds is reclaimed when it is lost. A
call ends through its callback exactly once, and only when nothing touches its memory any more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    Drain,
    KvLayout,
    MooncakeError,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Tier,
    TransferError,
    Unavailable,
    Unpin,
    Welcome,
    WorkerHello,
    WorkerLoad,
    WorkerRef,
)
from mooncake.base.messages import Replicate, WhoAreYou
from mooncake.base.pool_messages import (
    AskPool,
    BlocksDescribed,
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
    FindBlocks,
    FindHolders,
    ForgetBlocks,
    HoldersFound,
    Keep,
    KeepBlocks,
    PoolState,
    RemoveBlocks,
    TakenOver,
)
from mooncake.kvstore.block_memory import BlockMemory, Places, Where
from mooncake.kvstore.calls import (
    Answer,
    Ask,
    Attempt,
    Call,
    Found,
    Get,
    Got,
    Held,
    Here,
    Kept,
    Put,
    Question,
    Removed,
    Stated,
    Wrote,
)
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import Membership
from mooncake.transfer.engine import Op, Region, Transfer, TransferBatch, TransferDone, TransferOp

REPORT_INTERVAL_S = 0.5

Kind = TypeVar("Kind", bound=Answer)


@dataclass(frozen=True)
class ClientPorts:
    """The world of a client."""

    channel: Channel
    transfer: Transfer
    region: Region
    """Its memory: host memory, registered with `transfer`."""
    gateway_address: str


class PoolClient:
    """All calls of one client. Blocks lie packed in its own memory, as in the pool's, and in memory
    that was registered besides in the shape it has.
    """

    def __init__(
        self,
        hello: WorkerHello,
        layout: KvLayout,
        ports: ClientPorts,
        *,
        store: WorkerRef | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        """Calls go to `store`, or to the pool of this client's node once the gateway names it."""
        self._ports = ports
        self._memory = BlockMemory.packed(ports.region, layout)
        self._store = store
        self._timeout_s = timeout_s
        self._membership = Membership(
            hello, ports.channel, ports.gateway_address, Tier.HBM, list, REPORT_INTERVAL_S
        )
        self._worker = hello.worker
        self._calls: dict[int, Call] = {}
        self._batches: dict[int, int] = {}
        self._last_ticket = 0

    @property
    def store(self) -> WorkerRef | None:
        """The pool node that calls go to, once known."""
        return self._store or self._membership.kvstore

    @property
    def num_open(self) -> int:
        return len(self._calls)

    # ------------------------------------------------------------------ calls

    def put_from(
        self,
        keys: Sequence[BlockKey],
        offsets: Where,
        done: Wrote,
        now: float,
        tenant: str = "",
        at: Attempt | None = None,
    ) -> None:
        """Write blocks, a run of one chain, that lie at byte `offsets` of our memory, or elsewhere.
        They must not change before `done`. Raises ValueError for places that there are not.
        """
        places = self._places(keys, offsets)
        at = at or self._own(done, now)
        if at is None:
            return
        blocks = dict(zip(keys, places.offsets, strict=True))
        call = Put(at, done, memory=places.memory, blocks=blocks, done=done)
        ticket = self._open(call)
        self._send(
            at.store, PutStart(writer=self._worker, ticket=ticket, keys=list(blocks), tenant=tenant)
        )

    def get_into(
        self,
        keys: Sequence[BlockKey],
        offsets: Where,
        done: Got,
        now: float,
        at: Attempt | None = None,
    ) -> None:
        """Read a run of blocks to byte `offsets` of our memory, or elsewhere, whose content is lost
        even when less comes. Raises ValueError for places that there are not.
        """
        places = self._places(keys, offsets)
        at = at or self._own(done, now)
        if at is None:
            return
        self._pin(Get(at, done, places=places, keys=list(keys), done=done))

    def _pin(self, call: Get) -> None:
        ticket = self._open(call)
        self._send(call.at.store, PinBlocks(reader=self._worker, ticket=ticket, keys=call.keys))

    def exists(
        self, keys: Sequence[BlockKey], done: Found, now: float, at: Attempt | None = None
    ) -> None:
        """Ask in which tier blocks are; holds nothing, and promises nothing for later."""
        self._ask(
            lambda ticket: FindBlocks(asker=self._worker, ticket=ticket, keys=list(keys)),
            lambda answer: done(answer.tiers if isinstance(answer, BlocksFound) else _odd()),
            done,
            at or self._own(done, now),
        )

    def remove(
        self, keys: Sequence[BlockKey], done: Removed, now: float, at: Attempt | None = None
    ) -> None:
        """Take blocks out of all tiers of a node, but for those with a hard pin."""
        self._ask(
            lambda ticket: RemoveBlocks(asker=self._worker, ticket=ticket, keys=list(keys)),
            lambda answer: done(answer.removed if isinstance(answer, BlocksRemoved) else _odd()),
            done,
            at or self._own(done, now),
        )

    def keep(
        self,
        keys: Sequence[BlockKey],
        keep: Keep,
        done: Kept,
        now: float,
        epoch: str = "",
        at: Attempt | None = None,
    ) -> None:
        """Have blocks that lie in DRAM kept there, or not any more; `epoch` names the boot of the
        node that is meant, if not any.
        """
        self._ask(
            lambda ticket: KeepBlocks(
                asker=self._worker, ticket=ticket, keys=list(keys), keep=keep, epoch=epoch
            ),
            lambda answer: done(answer if isinstance(answer, BlocksKept) else _odd()),
            done,
            at or self._own(done, now),
        )

    def copy_to(
        self, at: Attempt, keys: Sequence[BlockKey], source: WorkerRef, done: Here, tenant: str = ""
    ) -> None:
        """Have a node pull a run from another one that holds it."""
        self._ask(
            lambda ticket: Replicate(
                source=source, keys=list(keys), tenant=tenant, asker=self._worker, ticket=ticket
            ),
            lambda answer: done(answer.keys if isinstance(answer, TakenOver) else _odd()),
            done,
            at,
        )

    def stat(self, done: Stated, now: float, at: Attempt | None = None) -> None:
        """Ask the node how it is doing."""
        self._ask(
            lambda ticket: AskPool(asker=self._worker, ticket=ticket),
            lambda answer: done(answer if isinstance(answer, PoolState) else _odd()),
            done,
            at or self._own(done, now),
        )

    def drain(self, done: Stated, now: float, at: Attempt | None = None) -> None:
        """Have the node take nothing more and save what is worth it; ask how far it is."""
        at = at or self._own(done, now)
        if at is not None:
            self._ports.channel.send(at.store.address, Drain())
            self.stat(done, now, at)

    def ask(
        self,
        at: Attempt,
        make: Callable[[WorkerRef, int], Question],
        kind: type[Kind],
        done: Callable[[Kind | MooncakeError], None],
    ) -> None:
        """Ask a node what `make` makes of who asks and the ticket; its answer is of one kind."""
        self._ask(
            lambda ticket: make(self._worker, ticket),
            lambda answer: done(answer if isinstance(answer, kind) else _odd()),
            done,
            at,
        )

    def find_holders(self, keys: Sequence[BlockKey], done: Held, deadline_s: float) -> None:
        """Ask the gateways which pool nodes hold a run, and which there are."""
        self.ask_gateways(
            lambda asker, ticket: FindHolders(asker=asker, ticket=ticket, keys=list(keys)),
            done,
            deadline_s,
        )

    def ask_gateways(
        self,
        make: Callable[[WorkerRef, int], FindHolders | ForgetBlocks],
        done: Held,
        deadline_s: float,
    ) -> None:
        """Ask all gateways; the first to answer counts."""
        addresses = self._membership.gateway_addresses
        gateway = WorkerRef("", "", addresses[0])

        def answered(answer: Answer) -> None:
            done(answer if isinstance(answer, HoldersFound) else _odd())

        ticket = self._open(Ask(Attempt(gateway, deadline_s), done, done=answered))
        question = make(self._worker, ticket)
        for address in addresses:
            self._ports.channel.send(address, question)

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take an answer or the end of a transfer; unknown ones are ignored."""
        match event:
            case PutGranted():
                self._on_put_granted(event)
            case PinGranted():
                self._on_pin_granted(event)
            case TransferDone():
                self._on_transfer_done(event)
            case BlocksFound() | BlocksRemoved() | BlocksKept() | BlocksDescribed():
                self._on_answer(event, event.store.address)
            case PoolState() | TakenOver():
                self._on_answer(event, event.store.address)
            case HoldersFound():
                self._on_answer(event, None)
            case Welcome():
                self._membership.on_welcome(event)
            case WhoAreYou():
                self._membership.on_who(event)
            case PeerLost():
                self._membership.on_peer_lost(event.worker)
                self._on_peer_lost(event.worker)
        del now

    def tick(self, now: float) -> float | None:
        """Give up calls that are not answered, report; return when to come again."""
        for ticket, call in list(self._calls.items()):
            if call.batch_id is None and call.answer_by_s <= now:
                where = call.at.store.address
                self._fail(ticket, TransferError(f"the pool node at {where} does not answer"))
        times = [call.answer_by_s for call in self._calls.values() if call.batch_id is None]
        times.append(self._membership.tick(now, lambda: WorkerLoad(num_running=self.num_open)))
        return min(times)

    def check_integrity(self) -> None:
        """Raise AssertionError when a transfer belongs to no call."""
        for batch_id, ticket in self._batches.items():
            assert self._calls[ticket].batch_id == batch_id

    # ------------------------------------------------------------------ puts

    def _on_put_granted(self, message: PutGranted) -> None:
        call = self._calls.get(message.ticket)
        if not isinstance(call, Put) or call.at.store.address != message.store.address:
            # Given up before: what was granted is nobody's.
            dropped = PutEnd(writer=self._worker, ticket=message.ticket, dropped=message.keys)
            self._send(message.store, dropped)
            return
        if call.batch_id is not None:
            return
        call.granted = message.keys
        if not message.keys:
            del self._calls[message.ticket]
            call.done([])
            return
        offsets = [call.blocks[key] for key in message.keys]
        ops = call.memory.ops(offsets, message.places)
        self._move(message.ticket, call, Op.WRITE, ops, message.places)
        with contextlib.suppress(TransferError):  # of a device: the node hashes them itself
            call.checksums = [call.memory.checksum(offset) for offset in offsets]  # as they travel

    def _put_ended(self, ticket: int, call: Put, error: str | None) -> None:
        written = call.granted if error is None else []
        dropped = [] if error is None else call.granted
        self._send(
            call.at.store,
            PutEnd(
                writer=self._worker,
                ticket=ticket,
                written=written,
                dropped=dropped,
                checksums=call.checksums if written else [],
            ),
        )
        call.done(written if error is None else TransferError(error))

    # ------------------------------------------------------------------ gets

    def _on_pin_granted(self, message: PinGranted) -> None:
        call = self._calls.get(message.ticket)
        if not isinstance(call, Get) or call.at.store.address != message.store.address:
            self._send(message.store, Unpin(reader=self._worker, ticket=message.ticket))
            return
        if call.batch_id is not None:
            return
        call.num_blocks = min(message.num_blocks, len(call.keys))
        call.checksums = message.checksums
        call.more = message.more and call.num_blocks < len(call.keys)
        if not call.num_blocks:
            del self._calls[message.ticket]
            self._send(call.at.store, Unpin(reader=self._worker, ticket=message.ticket))
            call.end(0)
            return
        places = call.places[: call.num_blocks]
        ops = places.memory.ops(places.offsets, message.places)
        self._move(message.ticket, call, Op.READ, ops, message.places)

    def _get_ended(self, ticket: int, call: Get, error: str | None) -> None:
        answer, corrupt = call.looked_at() if error is None else (TransferError(error), [])
        go_on = call.more and answer == call.num_blocks
        if not go_on:
            call.end(answer)
        self._send(call.at.store, Unpin(reader=self._worker, ticket=ticket, corrupt=corrupt))
        if go_on:
            call.advance()
            self._pin(call)

    # ------------------------------------------------------------------ both

    def _move(
        self, ticket: int, call: Call, op: Op, ops: list[TransferOp], places: BlockPlaces
    ) -> None:
        call.batch_id = self._ports.transfer.submit(
            TransferBatch(op=op, peer=places.segment, ops=ops, deadline_s=call.at.deadline_s)
        )
        self._batches[call.batch_id] = ticket

    def _on_transfer_done(self, event: TransferDone) -> None:
        ticket = self._batches.pop(event.batch_id, None)
        if ticket is None:
            return
        call = self._calls.pop(ticket)
        if isinstance(call, Put):
            self._put_ended(ticket, call, event.error)
        elif isinstance(call, Get):
            self._get_ended(ticket, call, event.error)

    def _on_answer(self, event: Answer, address: str | None) -> None:
        call = self._calls.get(event.ticket)
        if isinstance(call, Ask) and address in (None, call.at.store.address):
            del self._calls[event.ticket]
            call.done(event)

    def _on_peer_lost(self, worker: WorkerRef) -> None:
        """What the lost node had not granted yet fails now; running transfers are called off."""
        for ticket, call in list(self._calls.items()):
            if call.at.store.address != worker.address:
                continue
            if call.batch_id is None:
                self._fail(ticket, Unavailable("the pool node was lost"))
            else:
                self._ports.transfer.cancel(call.batch_id)

    def _ask(
        self,
        message: Callable[[int], Question],
        done: Callable[[Answer], None],
        fail: Callable[[MooncakeError], None],
        at: Attempt | None,
    ) -> None:
        if at is not None:
            ticket = self._open(Ask(at, fail, done=done))
            self._send(at.store, message(ticket))

    def _own(self, fail: Callable[[MooncakeError], None], now: float) -> Attempt | None:
        """Return where calls go of themselves; fails the call when that is not known."""
        if self.store is not None:
            return Attempt(self.store, now + self._timeout_s)
        fail(Unavailable("no pool node is known yet: is a kvstore worker up on this node?"))
        return None

    def _open(self, call: Call) -> int:
        self._last_ticket += 1
        self._calls[self._last_ticket] = call
        return self._last_ticket

    def _fail(self, ticket: int, error: MooncakeError) -> None:
        """End a call that was not granted anything; what comes for it later is given back."""
        call = self._calls.pop(ticket)
        if isinstance(call, Get):
            self._send(call.at.store, Unpin(reader=self._worker, ticket=ticket))
            call.end(error)
            return
        if isinstance(call, Put):
            dropped = list(call.blocks)
            self._send(call.at.store, PutEnd(writer=self._worker, ticket=ticket, dropped=dropped))
        call.fail(error)

    def _places(self, keys: Sequence[BlockKey], where: Where) -> Places:
        """Return where blocks of ours lie. Raises ValueError."""
        if len(keys) != len(where):
            raise ValueError(f"{len(where)} places for {len(keys)} blocks")
        return where if isinstance(where, Places) else self._memory.at(where)

    def _send(
        self,
        store: WorkerRef,
        message: PutStart | PutEnd | PinBlocks | Unpin | Question,
    ) -> None:
        self._ports.channel.send(store.address, message)


def _odd() -> TransferError:
    return TransferError("the pool answered something else")
