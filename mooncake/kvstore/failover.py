"""A client of the whole pool, as a machine: its own node first, and another one when that is lost,
silent, or has not all of a run.

Owns what is known of the nodes and which of them failed of late. Moving bytes is `client`'s; what
lies where is asked of a gateway, and of the nodes themselves while no gateway answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from mooncake.base import BlockKey, MooncakeError, PeerLost, Tier, Unavailable, Welcome, WorkerRef
from mooncake.base.pool_messages import HoldersFound, Keep
from mooncake.kvstore.block_memory import Where
from mooncake.kvstore.calls import Attempt, Found, Got, Removed, Stated, Wrote
from mooncake.kvstore.client import PoolClient
from mooncake.kvstore.spread import Spread, Spreads
from mooncake.kvstore.whole_pool import AllStated, Described, Keepers, WholePool

MAX_ATTEMPTS = 3
"""Nodes that a call turns to in vain before it fails."""
PATIENCE_S = 4.0
"""A node that has not answered by then is left while there are others. It may bring blocks up from
its disks first.
"""
SUSPECT_S = 5.0
"""A node that failed comes after all others until it answers a question, which it is asked after so
long, and again after twice as long.
"""
MAX_SUSPECT_S = 60.0
GATEWAY_S = 1.0
"""A gateway that has not answered by then is done without."""
REFRESH_S = 10.0
"""How often the nodes are asked for while nothing happens; without a gateway every `GATEWAY_S`."""
DOUBT_S = 3.0
"""A node that a gateway does not name is forgotten if it is not named then either: a gateway that
was started again meets the nodes one after another.
"""
MAX_FORGOTTEN = 256
"""Lost nodes remembered."""

Start = Callable[[Attempt, Callable[[Any], None]], None]


@dataclass
class _Task:
    """A call, through all its attempts."""

    deadline_s: float
    start: Start
    done: Callable[[Any], None]
    tried: dict[str, MooncakeError | None] = field(default_factory=dict)
    """Address -> how it failed; None: it has no more of the run."""
    searched: bool = False
    """The gateway was asked for nodes."""


@dataclass
class _Run(_Task):
    """A get."""

    keys: Sequence[BlockKey] = ()
    num_whole: int = 0
    answered: bool = False
    """Some node said what it has."""


@dataclass
class _Suspect:
    """A node that failed."""

    store: WorkerRef
    probe_s: float
    pause_s: float = SUSPECT_S


class FailoverClient:
    """All calls of one client. Each ends once and within `timeout_s`, all its attempts together,
    and what a transfer takes to be called off; with the error of every node when none is left.
    """

    def __init__(self, client: PoolClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._now = float("-inf")
        self._whole = WholePool(client, timeout_s, lambda: self._now)
        self._known: dict[str, WorkerRef] = {}
        """By id, in the order in which they are turned to."""
        self._missing: set[str] = set()
        """Of those, the nodes that were not named last time."""
        self._own_id = ""
        self._suspects: dict[str, _Suspect] = {}
        """By address."""
        self._lost: dict[str, None] = {}
        self._refresh_s = float("-inf")
        self._gateway_silent = False
        self._has_learnt = False
        """A gateway has named the nodes, once."""
        self._used = ""
        self.num_moves = 0
        """How often `put_from` and `exists` went to another node than the time before."""

    @property
    def own_store(self) -> WorkerRef | None:
        """The pool of this client's node, or the one it was told to use, once known."""
        return self._client.store

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes that can be turned to, in that order."""
        return [ref.address for ref in self._order()]

    @property
    def num_open(self) -> int:
        return self._client.num_open

    # ------------------------------------------------------------------ calls

    def put_from(
        self,
        keys: Sequence[BlockKey],
        offsets: Where,
        done: Wrote,
        now: float,
        tenant: str = "",
    ) -> None:
        """As `PoolClient.put_from`, at the next node when one fails."""

        def start(at: Attempt, then: Wrote) -> None:
            self._client.put_from(keys, offsets, then, self._now, tenant, at)

        self._begin(start, done, now)

    def get_into(self, keys: Sequence[BlockKey], offsets: Where, done: Got, now: float) -> None:
        """As `PoolClient.get_into`; what one node does not give, others that hold it are asked
        for.
        """

        def start(at: Attempt, then: Got) -> None:
            first = run.num_whole
            self._client.get_into(keys[first:], offsets[first:], then, self._now, at)

        self._now = now
        run = _Run(now + self._timeout_s, start, done, keys=keys)
        self._fetch(run, self._order())

    def exists(self, keys: Sequence[BlockKey], done: Found, now: float) -> None:
        """As `PoolClient.exists`, of the node that puts go to now."""
        self._begin(
            lambda at, then: self._client.exists(keys, then, self._now, at), done, now
        )  # fmt: skip

    def remove(self, keys: Sequence[BlockKey], done: Removed, now: float) -> None:
        """As `WholePool.remove`."""
        self._now = now
        self._whole.remove(keys, done)

    def keep(
        self,
        keys: Sequence[BlockKey],
        keep: Keep,
        done: Keepers,
        now: float,
        epochs: Sequence[str] = (),
    ) -> None:
        """As `WholePool.keep`."""
        self._now = now
        self._whole.keep(keys, keep, done, epochs)

    def describe(self, keys: Sequence[BlockKey], done: Described, now: float) -> None:
        """As `WholePool.describe`."""
        self._now = now
        self._whole.describe(keys, done)

    def stat_all(self, done: AllStated, now: float) -> None:
        """As `WholePool.stat`."""
        self._now = now
        self._whole.stat(done)

    def stat(self, done: Stated, now: float) -> None:
        """As `PoolClient.stat`, of this client's own node."""
        self._client.stat(done, now, self._at_home(now))

    def drain(self, done: Stated, now: float) -> None:
        """As `PoolClient.drain`."""
        self._client.drain(done, now, self._at_home(now))

    def replicate(
        self,
        keys: Sequence[BlockKey],
        num_nodes: int,
        done: Spreads,
        now: float,
        tenant: str = "",
    ) -> None:
        """Have a run lie on so many nodes, as far as others of them take it."""
        self._now = now
        deadline_s = now + self._timeout_s
        spread = Spread(self._client, keys, num_nodes, tenant, deadline_s, done, lambda: self._now)

        def found(answer: HoldersFound | MooncakeError) -> None:
            if isinstance(answer, HoldersFound):
                self._meet(answer)
            spread.begin(self._order())

        self._client.find_holders(keys, found, now + min(self._timeout_s / 4, GATEWAY_S))

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take an answer, the end of a transfer, or news of the cluster."""
        self._now = now
        if isinstance(event, PeerLost):
            self._forget(event.worker)
        elif isinstance(event, Welcome):
            self._refresh_s = now  # a gateway that is new may know other nodes
        self._client.handle(event, now)
        if isinstance(event, Welcome):
            self._find_own()

    def tick(self, now: float) -> float | None:
        """Give up what takes too long, ask for the nodes there are; return when to come again."""
        self._now = now
        if now >= self._refresh_s:
            self._refresh_s = now + (REFRESH_S if self._known else GATEWAY_S)
            self._client.find_holders([], self._learn, now + GATEWAY_S)
        for suspect in list(self._suspects.values()):
            if now >= suspect.probe_s:
                self._probe(suspect)
        wakes = [self._client.tick(now), self._refresh_s]
        wakes += [suspect.probe_s for suspect in self._suspects.values()]
        return min(wake for wake in wakes if wake is not None)

    def check_integrity(self) -> None:
        """Raise AssertionError when a lost node would be turned to."""
        assert not any(ref.address in self._lost for ref in self._known.values())
        self._client.check_integrity()

    # ------------------------------------------------------------------ the nodes

    def _learn(self, answer: HoldersFound | MooncakeError) -> None:
        """Know the nodes that a gateway names; while none answers, those of before."""
        self._gateway_silent = isinstance(answer, MooncakeError)
        if isinstance(answer, MooncakeError):
            self._refresh_s = min(self._refresh_s, self._now + GATEWAY_S)
            return
        self._has_learnt = True
        named = {ref.worker_id: ref for ref in answer.stores}
        doubtful = {
            worker_id: ref
            for worker_id, ref in self._known.items()
            if worker_id not in named and worker_id not in self._missing
        }
        self._known, self._missing = {}, set(doubtful)
        self._meet(answer)
        self._known |= doubtful
        if doubtful:
            self._refresh_s = self._now + DOUBT_S

    def _meet(self, answer: HoldersFound) -> None:
        """Know these nodes too."""
        for ref in answer.stores:
            self._known[ref.worker_id] = ref
            self._lost.pop(ref.address, None)
        self._find_own()

    def _find_own(self) -> None:
        """Remember our own node by its id, so that it is found again at another address."""
        own = self._client.store
        if own is not None:
            named = [ref.worker_id for ref in self._known.values() if ref.address == own.address]
            self._own_id = own.worker_id or (named or [self._own_id])[0]

    def _forget(self, worker: WorkerRef) -> None:
        known = self._known.get(worker.worker_id)
        if known is not None and known.address == worker.address:
            if known.epoch != worker.epoch:
                return  # an earlier boot of it
            del self._known[worker.worker_id]
        self._suspects.pop(worker.address, None)
        self._lost[worker.address] = None
        if len(self._lost) > MAX_FORGOTTEN:
            del self._lost[next(iter(self._lost))]
        self._refresh_s = self._now

    def _order(self) -> list[WorkerRef]:
        """Return the nodes to turn to: our own, the others, those that failed a moment ago."""
        own, again = self._client.store, self._known.get(self._own_id)
        stores = [ref for ref in (again or own, *self._known.values()) if ref is not None]
        unique = {ref.address: ref for ref in stores if ref.address not in self._lost}
        return sorted(unique.values(), key=self._is_suspect)

    def _is_suspect(self, ref: WorkerRef) -> bool:
        return ref.address in self._suspects

    def _probe(self, suspect: _Suspect) -> None:
        """See whether a node answers again; no call waits for it."""

        def answered(answer: list[Tier | None] | MooncakeError) -> None:
            if not isinstance(answer, MooncakeError):
                self._suspects.pop(suspect.store.address, None)

        suspect.pause_s = min(2 * suspect.pause_s, MAX_SUSPECT_S)
        suspect.probe_s = self._now + suspect.pause_s
        at = Attempt(suspect.store, self._now + PATIENCE_S)
        self._client.exists([], answered, self._now, at)

    def _at_home(self, now: float) -> Attempt | None:
        self._now = now
        own = self._known.get(self._own_id) or self._client.store
        stores = [own] if own is not None else self._order()[:1]
        return Attempt(stores[0], now + self._timeout_s) if stores else None

    # ------------------------------------------------------------------ attempts

    def _begin(self, start: Start, done: Callable[[Any], None], now: float) -> None:
        self._now = now
        self._next(_Task(now + self._timeout_s, start, done))

    def _attempt(
        self, task: _Task, stores: list[WorkerRef], then: Callable[[WorkerRef, Any], None]
    ) -> bool:
        """Turn to the first of these nodes that has not been tried; False: nobody is left, or no
        time.
        """
        left = [ref for ref in stores if ref.address not in task.tried]
        if not left or len(task.tried) >= MAX_ATTEMPTS or self._now >= task.deadline_s:
            return False
        now, at = self._now, Attempt(left[0], task.deadline_s)
        if len(left) > 1 and len(task.tried) < MAX_ATTEMPTS - 1:
            # Others are left to turn to: half of the time is theirs.
            share = (task.deadline_s - now) / 2
            at = Attempt(left[0], now + share, now + min(share, PATIENCE_S))
        task.start(at, partial(then, left[0]))
        return True

    def _failed(self, task: _Task, store: WorkerRef, error: MooncakeError) -> None:
        task.tried[store.address] = error
        self._suspects.setdefault(store.address, _Suspect(store, self._now + SUSPECT_S))
        if len(self._suspects) > MAX_FORGOTTEN:
            del self._suspects[next(iter(self._suspects))]

    def _next(self, task: _Task) -> None:
        if self._attempt(task, self._order(), partial(self._on_answer, task)):
            return
        if task.searched or len(task.tried) >= MAX_ATTEMPTS or self._now >= task.deadline_s:
            task.done(_none_left(task))
            return

        def found(answer: HoldersFound | MooncakeError) -> None:
            if isinstance(answer, HoldersFound):
                self._meet(answer)
            self._next(task)

        task.searched = True
        self._search(task, [], found)

    def _on_answer(self, task: _Task, store: WorkerRef, answer: Any) -> None:
        if isinstance(answer, MooncakeError):
            self._failed(task, store, answer)
            self._next(task)
        else:
            self._suspects.pop(store.address, None)
            self.num_moves += self._used not in ("", store.address)
            self._used = store.address
            task.done(answer)

    def _search(
        self,
        task: _Task,
        keys: Sequence[BlockKey],
        found: Callable[[HoldersFound | MooncakeError], None],
    ) -> None:
        """Ask a gateway who could help; one that has just been silent is not waited for."""

        def answered(answer: HoldersFound | MooncakeError) -> None:
            self._gateway_silent = isinstance(answer, MooncakeError)
            found(answer)

        if self._gateway_silent:
            found(Unavailable("no gateway answers"))
        else:
            share = (task.deadline_s - self._now) / 4
            self._client.find_holders(keys, answered, self._now + min(share, GATEWAY_S))

    # ------------------------------------------------------------------ gets

    def _fetch(self, run: _Run, stores: list[WorkerRef]) -> None:
        if self._attempt(run, stores, partial(self._on_fetched, run)):
            return
        if run.searched or len(run.tried) >= MAX_ATTEMPTS or self._now >= run.deadline_s:
            whole = run.num_whole
            run.done(whole if run.answered else _none_left(run))
        elif run.answered and not self._has_others(run):
            run.done(run.num_whole)
        else:
            run.searched = True
            self._search(run, run.keys[run.num_whole :], partial(self._on_found, run))

    def _has_others(self, run: _Run) -> bool:
        """Whether there are other nodes, as far as is known."""
        known = self._known.values()
        return not self._has_learnt or any(ref.address not in run.tried for ref in known)

    def _on_found(self, run: _Run, answer: HoldersFound | MooncakeError) -> None:
        """Go on with those that hold the next block; while nobody knows with those that are well,
        and while nobody has answered with any.
        """
        stores: list[WorkerRef] = []
        if isinstance(answer, HoldersFound):
            self._meet(answer)
            pairs = zip(answer.stores, answer.num_blocks, strict=True)
            stores = [ref for ref, count in pairs if count]
        if not run.answered:
            stores += self._order()
        elif isinstance(answer, MooncakeError):
            stores += [ref for ref in self._order() if not self._is_suspect(ref)]
        self._fetch(run, stores)

    def _on_fetched(self, run: _Run, store: WorkerRef, answer: int | MooncakeError) -> None:
        if isinstance(answer, MooncakeError):
            self._failed(run, store, answer)
        else:
            self._suspects.pop(store.address, None)
            run.answered = True
            if answer:  # further on, others may have something
                run.tried = {at: error for at, error in run.tried.items() if error is not None}
            run.num_whole += answer
            run.tried[store.address] = None
        if run.num_whole == len(run.keys):
            run.done(run.num_whole)
            return
        run.searched = False
        self._fetch(run, [])


def _none_left(task: _Task) -> MooncakeError:
    """Return the error of a call that no node could answer."""
    errors = {at: error for at, error in task.tried.items() if error is not None}
    if len(errors) == 1:
        return next(iter(errors.values()))
    if errors:
        words = "; ".join(f"{at}: {error.message}" for at, error in errors.items())
        return Unavailable(f"no node of the pool could do it: {words}")
    return Unavailable("no pool node is known, or left: is a kvstore worker up on this node?")
