"""Drain migration: a draining node hands the blocks that only it holds to other nodes, hottest
first, at a bounded rate and for a bounded time.

Pure; owned by the node. A gateway says which blocks lie on other nodes too, and which nodes stay.
Those nodes take over what they have room for, and read it from this node as from any pool node.
Blocks that no node takes remain, on SSD if they are there. Until the migration is over, the node
serves its readers as before.

The state of a block (one table of legal moves, `TRANSITIONS`):

    UNASKED ◄─► ASKED ──► SOLE ◄─► ORDERED ──► COPIED ──► UNASKED (its new home was lost)
                  └─────► ELSEWHERE ──► UNASKED
    and from the first four to LEFT
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from mooncake.base import BlockKey, InternalError, WorkerRef
from mooncake.base.pool_messages import (
    DrainProgress,
    FindHomes,
    HomesFound,
    LastingPin,
    TakenOver,
    TakeOver,
)
from mooncake.kvstore.storage.tiering import Tiering

if TYPE_CHECKING:
    from mooncake.kvstore.node.blocks import NodePorts

ORDER_BYTES = 16 << 20
"""Bytes of the blocks that one order names, at most."""
QUESTION_BLOCKS = 512
"""Blocks that one question to a gateway names, at most."""
ANSWER_S = 1.0
"""A gateway that has not answered after this time is asked again, or another one is."""
MAX_QUESTIONS = 3
"""The migration ends after this many questions in a row without an answer."""
MAX_TRIES = 3
"""Orders that may name the same block."""
GRACE_S = 2.0
"""An answer to an order is awaited this much longer than its receiver takes at most."""


class State(Enum):
    """The state of a block on the draining node."""

    UNASKED = "unasked"
    """A gateway is still to be asked whether another node holds it."""
    ASKED = "asked"
    SOLE = "sole"
    """Only this node holds it; it waits to be copied."""
    ORDERED = "ordered"
    """Another node was told to take it over."""
    COPIED = "copied"
    ELSEWHERE = "elsewhere"
    """Another node held it before."""
    LEFT = "left"
    """The block stays here: no node has room for it, or the migration is over."""


TRANSITIONS: dict[State, frozenset[State]] = {
    State.UNASKED: frozenset({State.ASKED, State.LEFT}),
    State.ASKED: frozenset({State.UNASKED, State.SOLE, State.ELSEWHERE, State.LEFT}),
    State.SOLE: frozenset({State.ORDERED, State.LEFT}),
    State.ORDERED: frozenset({State.SOLE, State.COPIED, State.LEFT}),
    State.COPIED: frozenset({State.UNASKED}),
    State.ELSEWHERE: frozenset({State.UNASKED}),
    State.LEFT: frozenset(),
}
"""Legal moves of a block. A block that was evicted is forgotten when its turn comes."""

_SAFE = (State.COPIED, State.ELSEWHERE)


class _Kind(NamedTuple):
    """What the blocks of one order have in common."""

    tenant: str
    pin: LastingPin
    reused: bool


@dataclass(slots=True)
class _Block:
    state: State
    tries: int = 0
    """Orders that named it in vain."""
    home: WorkerRef | None = None
    """The node that took it over."""


@dataclass(frozen=True, slots=True)
class _Question:
    ticket: int
    keys: list[BlockKey]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class _Order:
    home: WorkerRef
    kind: _Kind
    keys: list[BlockKey]
    deadline_s: float


@dataclass(slots=True)
class _Home:
    """A node that stays, and how much room it is known to have."""

    ref: WorkerRef
    num_free: int
    full: set[_Kind] = field(default_factory=set)
    """Kinds of blocks for which it said that it has no more room."""


class DrainMigration:
    """Moves the blocks of one draining node to others. It does nothing before `begin`."""

    def __init__(self, ports: NodePorts, tiering: Tiering, more_comes: Callable[[], bool]) -> None:
        """`more_comes` returns whether blocks are being written that may still become complete."""
        self._config = config = ports.config
        self._worker, self._channel = ports.worker, ports.channel
        self._membership = ports.membership
        self._dram, self._tiering = tiering.dram, tiering
        self._more_comes = more_comes
        self._order_blocks = max(1, ORDER_BYTES // self._dram.block_bytes)
        self._max_ordered = max(1, config.drain_queue_bytes // self._dram.block_bytes)
        self._blocks: dict[BlockKey, _Block] = {}
        self._num: Counter[State] = Counter()
        self._unasked: deque[BlockKey] = deque()
        """The UNASKED blocks in their order, and the SOLE ones below."""
        self._sole: deque[BlockKey] = deque()
        self._question: _Question | None = None
        self._num_unanswered = 0
        self._orders: dict[int, _Order] = {}
        self._homes: dict[str, _Home] = {}
        self._named: set[WorkerRef] = set()
        """All nodes that a gateway has named, including those that are gone."""
        self._last_ticket = 0
        self._next_order_s = 0.0
        self._deadline_s: float | None = None
        self.over = False

    @property
    def begun(self) -> bool:
        return self._deadline_s is not None

    def is_home(self, worker: WorkerRef) -> bool:
        """Return whether this node is taking over blocks. It then reads them for no request."""
        home = self._homes.get(worker.worker_id)
        return home is not None and home.ref == worker

    def begin(self, now: float) -> None:
        """Begin with the blocks in DRAM: those used more than once first, and among both groups the
        hottest first. Then come blocks that are only on disks, newest first.
        """
        if self.begun:
            return
        self._deadline_s = now + self._config.drain_s
        hot = sorted(self._dram.hottest_first(), key=self._tiering.is_one_off)
        cold = [key for key in self._tiering.ssd.stored_keys() if not self._dram.has(key)]
        self._add([*hot, *reversed(cold)])
        self._go_on(now)

    def add(self, keys: list[BlockKey]) -> None:
        """Add blocks that became complete after the migration began."""
        if self.begun:
            self._add([key for key in keys if key not in self._blocks])

    def progress(self) -> DrainProgress | None:
        """Return the progress of the migration; None before it has begun."""
        if not self.begun:
            return None
        blocks = self._blocks.items()
        left = [key for key, block in blocks if block.state not in _SAFE and self._is_here(key)]
        return DrainProgress(
            over=self.over,
            num_copied=self._num[State.COPIED],
            num_elsewhere=self._num[State.ELSEWHERE],
            num_left=len(left),
            num_left_on_ssd=sum(map(self._tiering.ssd.has, left)),
        )

    def tick(self, now: float) -> float | None:
        """Give up questions and orders without an answer, and send what is due. Return when to call
        again.
        """
        if not self.begun or self.over:
            return None
        if self._question is not None and self._question.deadline_s <= now:
            for key in reversed(self._question.keys):
                self._move(key, State.UNASKED)
                self._unasked.appendleft(key)
            self._question = None
            self._num_unanswered += 1
        for ticket in [t for t, order in self._orders.items() if order.deadline_s <= now]:
            self._end_order(ticket, set())
        self._go_on(now)
        return None if self.over else self._next_s(now)

    def _next_s(self, now: float) -> float | None:
        assert self._deadline_s is not None
        times = [self._deadline_s, *(order.deadline_s for order in self._orders.values())]
        if self._question is not None:
            times.append(self._question.deadline_s)
        if self._sole and self._room() > 0 and self._next_order_s > now:
            times.append(self._next_order_s)
        return min(times)

    def on_homes(self, message: HomesFound, now: float) -> None:
        """Take a gateway's answer: which blocks lie on other nodes too, and which nodes stay."""
        question = self._question
        if question is None or question.ticket != message.ticket:
            return
        self._question, self._num_unanswered = None, 0
        known = {home.ref: home for home in self._homes.values()}
        homes = [known.get(h.store, _Home(h.store, h.num_free_blocks)) for h in message.homes]
        self._homes = {home.ref.worker_id: home for home in homes}
        self._named.update(home.ref for home in homes)
        elsewhere = dict(zip(question.keys, message.elsewhere, strict=False))
        for key in question.keys:
            if elsewhere.get(key) and not self._is_pinned(key):
                self._move(key, State.ELSEWHERE)
            else:
                self._move(key, State.SOLE)
                self._sole.append(key)
        self._go_on(now)

    def on_taken(self, message: TakenOver, now: float) -> None:
        """Take a node's answer to an order: which blocks it has copied."""
        order = self._orders.get(message.ticket)
        if order is None or order.home != message.store:
            return
        home = self._homes.get(message.store.worker_id)
        if home is not None and message.is_full:
            home.full.add(order.kind)
        self._end_order(message.ticket, set(message.keys))
        self._go_on(now)

    def on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """Begin again with the blocks that a lost node had taken over, and with all those that
        other nodes held: the lost node may have been the one.
        """
        if not self.begun or self.over or worker not in self._named:
            return
        if self.is_home(worker):
            del self._homes[worker.worker_id]
        for ticket in [t for t, order in self._orders.items() if order.home == worker]:
            self._end_order(ticket, set())
        for key, block in self._blocks.items():
            if block.state is State.ELSEWHERE or block.home == worker:
                self._move(key, State.UNASKED)
                block.home = None
                self._unasked.append(key)
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
        gateways = self._membership.welcoming
        if not gateways:
            self._stop()
            return
        number = min(len(self._unasked), QUESTION_BLOCKS)
        keys = [self._unasked.popleft() for _ in range(number)]
        for key in keys:
            self._move(key, State.ASKED)
        self._last_ticket += 1
        self._question = _Question(self._last_ticket, keys, now + ANSWER_S)
        self._channel.send(
            gateways[self._num_unanswered % len(gateways)],
            FindHomes(asker=self._worker, ticket=self._last_ticket, keys=keys),
        )

    def _room(self) -> int:
        return self._max_ordered - self._num[State.ORDERED]

    def _order_next(self, now: float) -> bool:
        """Order one node to take over the next blocks of a kind. Return False when no order may be
        sent now.
        """
        while self._sole and not self._is_here(self._sole[0]):
            key = self._sole.popleft()  # it was evicted
            self._num[self._blocks.pop(key).state] -= 1
        room = min(self._order_blocks, self._room())
        if not self._sole or now < self._next_order_s or room < 1:
            return False
        kind = self._kind(self._sole[0])
        home = self._choose(kind)
        if home is None:
            self._move(self._sole.popleft(), State.LEFT)
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
            return _Kind(self._tiering.ssd.block(key).tenant, LastingPin.NONE, reused=True)
        block = self._dram.block(key)
        return _Kind(block.tenant, block.lasting_pin, self._tiering.is_reused(key))

    def _choose(self, kind: _Kind) -> _Home | None:
        """Return the node with most free room that may still take such blocks."""
        homes = [home for home in self._homes.values() if kind not in home.full]
        return max(homes, key=lambda home: (home.num_free, home.ref.worker_id), default=None)

    def _send(self, home: _Home, kind: _Kind, keys: list[BlockKey], now: float) -> None:
        for key in keys:
            self._move(key, State.ORDERED)
        self._last_ticket += 1
        deadline_s = now + self._config.replicate_timeout_s + GRACE_S
        self._orders[self._last_ticket] = _Order(home.ref, kind, keys, deadline_s)
        home.num_free -= len(keys)
        seconds = len(keys) * self._dram.block_bytes / self._config.drain_bytes_per_s
        self._next_order_s = max(self._next_order_s, now) + seconds
        self._channel.send(
            home.ref.address,
            TakeOver(
                source=self._worker, ticket=self._last_ticket, keys=keys, tenant=kind.tenant,
                pin=kind.pin, reused=kind.reused,
            ),
        )  # fmt: skip

    def _end_order(self, ticket: int, taken: Set[BlockKey]) -> None:
        """End an order: blocks that were not taken are tried again a few times."""
        order = self._orders.pop(ticket)
        for key in reversed(order.keys):
            block = self._blocks[key]
            if key in taken:
                self._move(key, State.COPIED)
                block.home = order.home
                continue
            block.tries += 1
            if block.tries < MAX_TRIES:
                self._move(key, State.SOLE)
                self._sole.appendleft(key)
            else:
                self._move(key, State.LEFT)

    def _stop(self) -> None:
        self.over = True
        for key, block in self._blocks.items():
            if block.state not in (*_SAFE, State.LEFT):
                self._move(key, State.LEFT)
        self._unasked.clear()
        self._sole.clear()
        self._orders.clear()
        self._question = None

    # ------------------------------------------------------------------ states

    def _add(self, keys: list[BlockKey]) -> None:
        state = State.LEFT if self.over else State.UNASKED
        self._blocks.update((key, _Block(state)) for key in keys)
        self._num[state] += len(keys)
        self._unasked.extend([] if self.over else keys)

    def _move(self, key: BlockKey, state: State) -> None:
        """Put a block into another state. Raises InternalError when the move is not one of
        `TRANSITIONS`.
        """
        block = self._blocks[key]
        if state not in TRANSITIONS[block.state]:
            raise InternalError(
                f"block {key.hex()} cannot go from {block.state.value} to {state.value}"
            )
        self._num[block.state] -= 1
        self._num[state] += 1
        block.state = state

    def _is_pinned(self, key: BlockKey) -> bool:
        """Return whether a block has a soft or hard pin, which its copy must have too."""
        return self._dram.has(key) and self._dram.block(key).lasting_pin is not LastingPin.NONE

    def _is_here(self, key: BlockKey) -> bool:
        return self._dram.has(key) or self._tiering.ssd.has(key)

    def check_integrity(self) -> None:
        """Raise AssertionError when a block's state is not what queues and orders say."""
        assert self._room() >= 0
        queues: dict[State, list[BlockKey]] = {
            State.UNASKED: list(self._unasked),
            State.ASKED: [] if self._question is None else self._question.keys,
            State.SOLE: list(self._sole),
            State.ORDERED: [key for order in self._orders.values() for key in order.keys],
        }
        states = {key: block.state for key, block in self._blocks.items()}
        assert +self._num == Counter(states.values())
        for state, keys in queues.items():
            assert sorted(keys) == sorted(key for key in states if states[key] is state)
