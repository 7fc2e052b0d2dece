"""Copies of blocks of other pool nodes: pulled when asked to, dropped when nobody uses them; and
blocks taken over from nodes that drain, which are ours from then on.

Pure; owned by the node, which grants memory like for any put. A copy is an ordinary block from the
moment it is whole; it carries the checksum its owner promised, and is hashed again here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from mooncake.base import (
    BlockKey,
    BlockPlaces,
    KvLayout,
    PinBlocks,
    PinGranted,
    Unpin,
    WorkerRef,
)
from mooncake.base.messages import Replicate
from mooncake.base.pool_messages import Keep, TakenOver, TakeOver
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.tiering import Tiering
from mooncake.rpc.channel import Channel
from mooncake.transfer.engine import Op, Transfer, TransferBatch, TransferDone, TransferOp

MAX_PULLS = 64
"""Runs pulled at once; further orders are dropped: who gave them sees no copy and may ask again."""

_Order = Replicate | TakeOver
Copied = Callable[[list[BlockKey], list[BlockKey]], None]
"""(blocks that are whole now, blocks evicted to make room for copies or dropped as cold)"""


class _Pull:
    __slots__ = (
        "answer", "batch_id", "checksums", "deadline_s", "keys", "order", "source", "unwanted",
    )  # fmt: skip

    def __init__(
        self, order: _Order, answer: TakenOver, keys: list[BlockKey], deadline_s: float
    ) -> None:
        self.source = order.source
        self.order = order
        self.answer = answer
        """To who ordered it, should nothing come."""
        self.keys = keys
        self.deadline_s = deadline_s
        self.batch_id: int | None = None
        self.checksums: list[int] = []
        self.unwanted: set[BlockKey] = set()
        """Removed from the pool while they came."""


class Replicator:
    """All pulls of one node, and which of its blocks are copies."""

    def __init__(
        self,
        config: KvStoreConfig,
        layout: KvLayout,
        tiers: tuple[DramTier, Tiering],
        ports: tuple[Channel, Transfer, int],
        worker: WorkerRef,
        copied: Copied,
        counters: Counter[str],
    ) -> None:
        """`ports`: channel, transfer, and the arena's region."""
        self._config = config
        self._layout = layout
        self._dram, self._tiering = tiers
        self._channel, self._transfer, self._region_id = ports
        self._worker = worker
        self._copied = copied
        self._counters = counters
        self._pulls: dict[int, _Pull] = {}
        self._batches: dict[int, int] = {}
        self._last_ticket = 0
        self._copies: OrderedDict[BlockKey, float] = OrderedDict()
        """Copy -> when it was used last; longest ago first."""

    @property
    def quiet(self) -> bool:
        """Nothing is being pulled."""
        return not self._pulls

    def begin(self, order: Replicate, now: float, *, refused: bool) -> None:
        """Pull what is not known here of a run, as far as there is room from its first block on;
        `refused`: this node goes, and takes nothing.
        """
        run = dict.fromkeys(self._wanted(order, now))
        here = [key for key in run if self._dram.has(key)]
        wanted = [key for key in run if not self._dram.is_known(key)]
        granted: dict[BlockKey, int] = {}
        may_pull = len(self._pulls) < MAX_PULLS and order.source != self._worker
        if wanted and may_pull and not refused:
            # All of the run: what of it is here is not to make room for the rest.
            granted, evicted = self._dram.reserve(list(run), order.tenant)
            self._copied([], evicted)
        is_full = len(granted) < len(wanted)
        self._counters["replicas_refused"] += bool(wanted and not granted and not refused)
        answer = TakenOver(ticket=order.ticket, store=self._worker, keys=here, is_full=is_full)
        self._pull(order, granted, answer, now)

    def take_over(self, order: TakeOver, now: float, *, refused: bool) -> None:
        """Pull what a node that drains is about to take with it, and answer it; `refused`: this one
        goes too.

        Blocks that were asked for more than once may push out such as were not; none push out what
        has been asked for as often.
        """
        if refused:
            answer = TakenOver(ticket=order.ticket, store=self._worker, keys=[], is_full=True)
            self._pull(order, {}, answer, now)
            return
        ssd, known = self._tiering.ssd, self._dram.is_known
        run = self._wanted(order, now)
        here = [key for key in run if self._dram.has(key) or ssd.has(key)]
        self._inherit(order, [key for key in here if self._dram.has(key)])
        wanted = [key for key in run if not (known(key) or ssd.has(key))]
        answer = TakenOver(ticket=order.ticket, store=self._worker, keys=here)
        granted: dict[BlockKey, int] = {}
        if wanted and len(self._pulls) < MAX_PULLS:
            granted, evicted = self._dram.reserve(wanted, order.tenant, self._may_evict(order))
            self._copied([], evicted)
            is_full = len(granted) < len(wanted)
            answer = msgspec.structs.replace(answer, is_full=is_full)
        self._pull(order, granted, answer, now)

    def _wanted(self, order: _Order, now: float) -> list[BlockKey]:
        """Leave out what is being removed from the pool: who has it still has not heard of that."""
        removed = self._tiering.removed
        return [key for key in order.keys if not removed.is_unwanted(key, now)]

    def _may_evict(self, order: TakeOver) -> Callable[[BlockKey], bool]:
        if order.keep is not Keep.NO:
            return lambda _key: True
        return self._tiering.is_one_off if order.reused else lambda _key: False

    def _pull(
        self, order: _Order, granted: Mapping[BlockKey, int], answer: TakenOver, now: float
    ) -> None:
        """Ask the owner for what was granted; with nothing, the answer is ready."""
        if not granted:
            self._tell(order, answer)
            return
        pull = _Pull(order, answer, list(granted), now + self._config.replicate_timeout_s)
        self._last_ticket += 1
        self._pulls[self._last_ticket] = pull
        self._channel.send(
            pull.source.address,
            PinBlocks(reader=self._worker, ticket=self._last_ticket, keys=list(pull.keys)),
        )

    def on_pin_granted(self, message: PinGranted) -> None:
        """The owner holds the blocks: read them."""
        pull = self._pulls.get(message.ticket)
        if pull is None or pull.source != message.store:
            unpin = Unpin(reader=self._worker, ticket=message.ticket)
            self._channel.send(message.store.address, unpin)
            return
        if pull.batch_id is not None:
            return
        num_blocks = min(message.num_blocks, len(pull.keys))
        for key in pull.keys[num_blocks:]:
            self._dram.abandon(key, None)
        pull.keys = pull.keys[:num_blocks]
        pull.checksums = message.checksums[:num_blocks]
        if not num_blocks:
            self._end(message.ticket)
            return
        ops = self._reads(message.places, pull.keys)
        batch = TransferBatch(
            op=Op.READ, peer=message.places.segment, ops=ops, deadline_s=pull.deadline_s
        )
        pull.batch_id = self._transfer.submit(batch)
        self._batches[pull.batch_id] = message.ticket

    def on_transfer_done(self, event: TransferDone, now: float) -> None:
        """The bytes are here, or will not come; nothing writes to that memory any more."""
        ticket = self._batches.pop(event.batch_id, None)
        if ticket is None:
            return
        pull = self._pulls[ticket]
        if event.error is None:
            came, pull.keys = pull.keys, [key for key in pull.keys if key not in pull.unwanted]
            self._dram.commit(pull.keys)
            for key, checksum in zip(came, pull.checksums, strict=False):
                if checksum and key not in pull.unwanted:
                    self._dram.learn_checksum(key, checksum)
            self._own(pull, now)
            self._copied(pull.keys, [])
            pull.keys = [key for key in came if key in pull.unwanted]
        self._end(ticket)

    def _own(self, pull: _Pull, now: float) -> None:
        """The blocks of a pull are whole: copies, or ours for good."""
        order, keys = pull.order, pull.keys
        pull.answer = msgspec.structs.replace(pull.answer, keys=[*pull.answer.keys, *keys])
        if isinstance(order, Replicate):
            for key in reversed(keys):
                self._copies[key] = now
            self._counters["blocks_replicated"] += len(keys)
            return
        if not order.reused:
            self._tiering.used(keys)
        self._inherit(order, keys)
        self._counters["blocks_taken_over"] += len(keys)

    def _inherit(self, order: TakeOver, keys: Sequence[BlockKey]) -> None:
        """These blocks in DRAM are no copies from now on, and kept as they were by who goes."""
        self.evicted(keys)
        if order.reused:
            self._tiering.adopt(keys)
        for key in keys if order.keep is not Keep.NO else []:
            if self._dram.kept(key) is not Keep.HARD and not self._dram.keep(key, order.keep):
                self._dram.keep(key, Keep.SOFT)

    def forget(self, key: BlockKey) -> None:
        """A block is removed from the pool: if it is being pulled, it never becomes whole."""
        for pull in self._pulls.values():
            if key in pull.keys:
                pull.unwanted.add(key)

    def on_peer_lost(self, worker: WorkerRef) -> None:
        """Runs that were not being read yet do not come; a read under way fails by itself."""
        for ticket in [t for t, pull in self._pulls.items() if pull.source == worker]:
            if self._pulls[ticket].batch_id is None:
                self._end(ticket)

    def used(self, keys: Sequence[BlockKey], now: float) -> None:
        """Somebody read this run; of interest where it holds copies."""
        if not self._copies:
            return
        for key in reversed(keys):
            if key in self._copies:
                self._copies[key] = now
                self._copies.move_to_end(key)

    def evicted(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are gone, or no copies any more."""
        for key in keys:
            self._copies.pop(key, None)

    def tick(self, now: float) -> float | None:
        """Give up on owners that do not answer, drop cold copies; return when to come again."""
        for ticket in [t for t, pull in self._pulls.items() if pull.batch_id is None]:
            if self._pulls[ticket].deadline_s <= now:
                self._end(ticket)
        idle_s = self._config.replica_idle_s
        cold: list[BlockKey] = []
        while self._copies:
            key, used_s = next(iter(self._copies.items()))
            if used_s + idle_s > now:
                break
            del self._copies[key]
            if not self._dram.is_kept(key) and self._dram.discard(key):
                cold.append(key)
            else:
                self._copies[key] = now  # somebody reads or pins it: it is not cold
        self._counters["replicas_dropped"] += len(cold)
        self._copied([], cold)
        times = [pull.deadline_s for pull in self._pulls.values() if pull.batch_id is None]
        if self._copies:
            times.append(next(iter(self._copies.values())) + idle_s)
        return min(times, default=None)

    def _end(self, ticket: int) -> None:
        pull = self._pulls.pop(ticket)
        for key in pull.keys:
            self._dram.abandon(key, None)
        self._counters["replicas_failed"] += bool(pull.keys)
        unpin = Unpin(reader=self._worker, ticket=ticket)
        self._channel.send(pull.source.address, unpin)
        self._tell(pull.order, pull.answer)

    def _tell(self, order: _Order, answer: TakenOver) -> None:
        """Answer who ordered, if that wants to know."""
        asker = order.asker if isinstance(order, Replicate) else order.source
        if asker is not None:
            self._channel.send(asker.address, answer)

    def _reads(self, places: BlockPlaces, keys: list[BlockKey]) -> list[TransferOp]:
        """Return one copy a block where it lies together there too, else one a slice."""
        size, num_layers = self._layout.slice_bytes, self._layout.num_layers
        if places.layer_stride == size:
            size, num_layers = self._layout.block_bytes, 1
        return [
            TransferOp(
                self._region_id,
                here + layer * size,
                places.region,
                there + layer * places.layer_stride,
                size,
            )
            for here, there in zip(self._dram.offsets(keys), places.offsets, strict=False)
            for layer in range(num_layers)
        ]

    def filling(self) -> set[BlockKey]:
        """Return what is being filled in DRAM (for checks)."""
        return {key for pull in self._pulls.values() for key in pull.keys}

    def check_integrity(self) -> None:
        """Raise AssertionError when copies or pulls are not what they say."""
        assert all(self._dram.has(key) for key in self._copies), "a copy that is not here"
        keys = [key for pull in self._pulls.values() for key in pull.keys]
        assert len(set(keys)) == len(keys), "a block is pulled twice"
        for batch_id, ticket in self._batches.items():
            assert self._pulls[ticket].batch_id == batch_id
