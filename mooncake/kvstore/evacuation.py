"""A node that drains hands to others what only it holds: hottest first, so much at a time, and not
for ever.

Pure; owned by the node. A gateway says what lies elsewhere and who stays; those take what they have
room for, and read it from us as from any pool node. What nobody takes is left, on SSD or not at
all. Until it is over the node goes on serving its readers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from mooncake.base import BlockKey, WorkerRef
from mooncake.base.pool_messages import (
    DrainProgress,
    FindHomes,
    Home,
    HomesFound,
    Keep,
    TakenOver,
    TakeOver,
)
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.tiering import Tiering
from mooncake.rpc.channel import Channel

ORDER_BYTES = 16 << 20
QUESTION_BLOCKS = 512
"""Blocks that a gateway is asked about at once."""
ANSWER_S = 1.0
"""A gateway that has not answered by then is asked again, or another one."""
MAX_QUESTIONS = 3
"""Asked in vain so often, there is nobody to copy to."""
MAX_TRIES = 3
"""Orders that a block may be in."""
GRACE_S = 2.0
"""Longer than who takes over gives itself, its answer is not waited for."""


class _Kind(NamedTuple):
    """What the blocks of one order have in common."""

    tenant: str
    keep: Keep
    reused: bool


class _Order:
    __slots__ = ("deadline_s", "home", "keys", "kind")

    def __init__(
        self, home: WorkerRef, kind: _Kind, keys: list[BlockKey], deadline_s: float
    ) -> None:
        self.home = home
        self.kind = kind
        self.keys = keys
        self.deadline_s = deadline_s


class _Home:
    """A node that stays, and what we think of it."""

    __slots__ = ("full", "num_free", "ref")

    def __init__(self, home: Home) -> None:
        self.ref = home.store
        self.num_free = home.num_free_blocks
        self.full: set[_Kind] = set()
        """It has no room for more of these."""


class Evacuation:
    """The blocks of one node on their way to others. Does nothing before `begin`."""

    def __init__(
        self,
        config: KvStoreConfig,
        worker: WorkerRef,
        channel: Channel,
        tiers: tuple[DramTier, Tiering],
        gateways: Callable[[], list[str]],
        more_comes: Callable[[], bool],
    ) -> None:
        """`gateways` returns where those are that know us, `more_comes` whether blocks are being
        written that may become whole yet.
        """
        self._config = config
        self._worker = worker
        self._channel = channel
        self._dram, self._tiering = tiers
        self._gateways = gateways
        self._more_comes = more_comes
        self._order_blocks = max(1, ORDER_BYTES // self._dram.block_bytes)
        self._max_on_way = max(1, config.drain_queue_bytes // self._dram.block_bytes)
        self._unasked: deque[BlockKey] = deque()
        self._question: tuple[int, list[BlockKey], float] | None = None
        """(ticket, blocks, when it is given up)"""
        self._num_unanswered = 0
        self._sole: deque[BlockKey] = deque()
        """Only here, and to be copied."""
        self._orders: dict[int, _Order] = {}
        self._num_on_way = 0
        self._tries: dict[BlockKey, int] = {}
        self._homes: dict[str, _Home] = {}
        self._met: dict[WorkerRef, None] = {}
        """All nodes that have been named, those that are gone included."""
        self._copied: dict[BlockKey, WorkerRef] = {}
        """Block -> the node that took it over."""
        self._elsewhere: dict[BlockKey, None] = {}
        self._left: dict[BlockKey, None] = {}
        """Not copied, for now or for good."""
        self._last_ticket = 0
        self._next_order_s = 0.0
        self._deadline_s: float | None = None
        self.over = False

    @property
    def begun(self) -> bool:
        return self._deadline_s is not None

    def is_home(self, worker: WorkerRef) -> bool:
        """Whether this is a node that takes over: what it reads, it reads for that."""
        home = self._homes.get(worker.worker_id)
        return home is not None and home.ref == worker

    def begin(self, now: float) -> None:
        """Copy what is in DRAM: what was asked for more than once before the rest, and of both the
        hottest first; then what is on disks only, newest first.
        """
        if self.begun:
            return
        self._deadline_s = now + self._config.drain_s
        hot = sorted(self._dram.hottest_first(), key=self._tiering.is_one_off)
        cold = [key for key in self._tiering.ssd.stored_keys() if not self._dram.has(key)]
        self._left = dict.fromkeys([*hot, *reversed(cold)])
        self._unasked.extend(self._left)
        self._go_on(now)

    def add(self, keys: list[BlockKey]) -> None:
        """Blocks have become whole that were being written when it began."""
        if self.begun:
            known = self._left.keys() | self._copied.keys() | self._elsewhere.keys()
            new = [key for key in keys if key not in known]
            self._left.update(dict.fromkeys(new))
            self._unasked.extend([] if self.over else new)

    def progress(self) -> DrainProgress | None:
        """Return how far it is; None before it has begun."""
        if not self.begun:
            return None
        left = [key for key in self._left if self._is_here(key)]
        return DrainProgress(
            over=self.over,
            num_copied=len(self._copied),
            num_elsewhere=len(self._elsewhere),
            num_left=len(left),
            num_left_on_ssd=sum(map(self._tiering.ssd.has, left)),
        )

    def tick(self, now: float) -> float | None:
        """Give up what is not answered, order what is due; return when to come again."""
        if not self.begun or self.over:
            return None
        if self._question is not None and self._question[2] <= now:
            self._unasked.extendleft(reversed(self._question[1]))
            self._question = None
            self._num_unanswered += 1
        for ticket in [t for t, order in self._orders.items() if order.deadline_s <= now]:
            self._end_order(ticket, [])
        self._go_on(now)
        return None if self.over else self._next_s(now)

    def _next_s(self, now: float) -> float | None:
        assert self._deadline_s is not None
        times = [self._deadline_s, *(order.deadline_s for order in self._orders.values())]
        if self._question is not None:
            times.append(self._question[2])
        if self._sole and self._num_on_way < self._max_on_way and self._next_order_s > now:
            times.append(self._next_order_s)
        return min(times)

    def on_homes(self, message: HomesFound, now: float) -> None:
        """A gateway has answered."""
        if self.over or self._question is None or self._question[0] != message.ticket:
            return
        keys, self._question, self._num_unanswered = self._question[1], None, 0
        named = {home.store.worker_id: home for home in message.homes}
        self._homes = {
            name: known for name, known in self._homes.items()
            if name in named and named[name].store == known.ref
        }  # fmt: skip
        for name, home in named.items():
            if name not in self._homes:
                self._homes[name] = _Home(home)
                self._met[home.store] = None
        for key, is_elsewhere in zip(keys, message.elsewhere, strict=False):
            if is_elsewhere and not self._is_kept(key):
                self._elsewhere[key] = None
                self._left.pop(key, None)
            else:
                self._sole.append(key)
        self._go_on(now)

    def on_taken(self, message: TakenOver, now: float) -> None:
        """A node has copied what it could."""
        order = self._orders.get(message.ticket)
        home = self._homes.get(message.store.worker_id)
        if order is None or order.home != message.store:
            return
        if home is not None and message.is_full:
            home.full.add(order.kind)
        taken = set(message.keys)
        self._end_order(message.ticket, [key for key in order.keys if key in taken])
        self._go_on(now)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """What such a node had taken over is ours alone again, and so may others be that it had."""
        if not self.begun or self.over or worker not in self._met:
            return
        if self.is_home(worker):
            del self._homes[worker.worker_id]
        for ticket in [t for t, order in self._orders.items() if order.home == worker]:
            self._end_order(ticket, [])
        again = [key for key, home in self._copied.items() if home == worker]
        for key in again:
            del self._copied[key]
        again += self._elsewhere
        self._elsewhere.clear()
        self._left.update(dict.fromkeys(again))
        self._unasked.extend(again)
        self._go_on(now)

    # ------------------------------------------------------------------ asking and ordering

    def _go_on(self, now: float) -> None:
        assert self._deadline_s is not None
        if self.over:
            return
        if now >= self._deadline_s or self._num_unanswered >= MAX_QUESTIONS:
            self._stop()
            return
        while self._order_next(now):
            pass
        if self._unasked and self._question is None and len(self._sole) < QUESTION_BLOCKS:
            self._ask(now)
        busy = self._unasked or self._question or self._sole or self._orders
        if not busy and not self._more_comes():
            self._stop()

    def _ask(self, now: float) -> None:
        gateways = self._gateways()
        if not gateways:
            self._stop()
            return
        number = min(len(self._unasked), QUESTION_BLOCKS)
        keys = [self._unasked.popleft() for _ in range(number)]
        self._last_ticket += 1
        self._question = (self._last_ticket, keys, now + ANSWER_S)
        self._channel.send(
            gateways[self._num_unanswered % len(gateways)],
            FindHomes(asker=self._worker, ticket=self._last_ticket, keys=keys),
        )

    def _order_next(self, now: float) -> bool:
        """Have one node take over the next blocks of a kind; False when none may be sent now."""
        while self._sole and not self._is_here(self._sole[0]):
            self._left.pop(self._sole.popleft(), None)
        if not self._sole or now < self._next_order_s:
            return False
        room = min(self._order_blocks, self._max_on_way - self._num_on_way)
        if room < 1:
            return False
        kind = self._kind(self._sole[0])
        home = self._choose(kind)
        if home is None:
            self._sole.popleft()  # nobody has room for it
            return True
        keys = [self._sole.popleft()]
        while self._sole and len(keys) < room:
            key = self._sole[0]
            if not self._is_here(key) or self._kind(key) != kind:
                break
            keys.append(self._sole.popleft())
        self._send(home, kind, keys, now)
        return True

    def _kind(self, key: BlockKey) -> _Kind:
        if not self._dram.has(key):
            return _Kind(self._tiering.ssd.block(key).tenant, Keep.NO, reused=True)
        return _Kind(self._dram.tenant(key), self._dram.kept(key), self._tiering.is_reused(key))

    def _choose(self, kind: _Kind) -> _Home | None:
        """Return the node with most free room, as far as we know."""
        homes = [home for home in self._homes.values() if kind not in home.full]
        return max(homes, key=lambda home: (home.num_free, home.ref.worker_id), default=None)

    def _send(self, home: _Home, kind: _Kind, keys: list[BlockKey], now: float) -> None:
        self._last_ticket += 1
        deadline_s = now + self._config.replicate_timeout_s + GRACE_S
        self._orders[self._last_ticket] = _Order(home.ref, kind, keys, deadline_s)
        self._num_on_way += len(keys)
        home.num_free -= len(keys)
        seconds = len(keys) * self._dram.block_bytes / self._config.drain_bytes_per_s
        self._next_order_s = max(self._next_order_s, now) + seconds
        self._channel.send(
            home.ref.address,
            TakeOver(
                source=self._worker, ticket=self._last_ticket, keys=keys, tenant=kind.tenant,
                keep=kind.keep, reused=kind.reused,
            ),
        )  # fmt: skip

    def _end_order(self, ticket: int, taken: list[BlockKey]) -> None:
        order = self._orders.pop(ticket)
        self._num_on_way -= len(order.keys)
        for key in taken:
            self._copied[key] = order.home
            self._left.pop(key, None)
        for key in reversed(order.keys):
            if key not in self._copied:
                tries = self._tries[key] = self._tries.get(key, 0) + 1
                if tries < MAX_TRIES:
                    self._sole.appendleft(key)

    def _stop(self) -> None:
        self.over = True
        self._unasked.clear()
        self._sole.clear()
        self._orders.clear()
        self._tries.clear()
        self._question, self._num_on_way = None, 0

    def _is_kept(self, key: BlockKey) -> bool:
        """Whether somebody wants a block kept: the copy that is elsewhere must be, too."""
        return self._dram.has(key) and self._dram.kept(key) is not Keep.NO

    def _is_here(self, key: BlockKey) -> bool:
        return self._dram.has(key) or self._tiering.ssd.has(key)

    def check_integrity(self) -> None:
        """Raise AssertionError when a block is nowhere in the books, or twice."""
        assert self._num_on_way == sum(len(order.keys) for order in self._orders.values())
        on_way = {key for order in self._orders.values() for key in order.keys}
        assert len(on_way) == self._num_on_way <= self._max_on_way
        assert self._copied.keys().isdisjoint(self._elsewhere)
        assert self._left.keys().isdisjoint([*self._copied, *self._elsewhere])
        waiting = {*self._sole, *self._unasked, *on_way}
        assert len(self._sole) + len(self._unasked) + len(on_way) == len(waiting)
        assert waiting <= self._left.keys()
