"""A client of all nodes of a pool, as a machine. It uses its own node first, and another one when
that is lost, does not answer, or lacks part of a run.

Calls are coroutines that `FailoverClient.run` drives. It asks a gateway where blocks lie, or the
nodes themselves while no gateway answers. Each call ends within `timeout_s` for all its attempts
together, plus the time that a transfer takes to stop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from mooncake.base import (
    BlockKey,
    MooncakeError,
    PeerLost,
    Tier,
    Unavailable,
    Welcome,
    WorkerRef,
    rights,
)
from mooncake.base.pool_messages import (
    AskPool,
    BlocksFound,
    FindBlocks,
    FindReplicas,
    PoolState,
    ReplicasFound,
)
from mooncake.kvstore.client.block_memory import Where
from mooncake.kvstore.client.broadcast import Broadcast
from mooncake.kvstore.client.calls import Attempt, Call, Policy
from mooncake.kvstore.client.client import PoolClient
from mooncake.kvstore.client.nodes import GATEWAY_S, REFRESH_S, KnownNodes, Suspect

MAX_ATTEMPTS = 3
"""Nodes that a call tries in vain before it fails."""
SILENT_NODE_S = 4.0
"""If a node has not answered by then, another one is used, if there is one. The node may have to
bring blocks up from its disks first.
"""

T = TypeVar("T")
_Used = tuple[WorkerRef, Sequence[BlockKey]]
"""A node, and a run that was put there or read."""


class _Attempts:
    """The nodes that one call has tried, and those that it may try next."""

    def __init__(self, deadline_s: float, stores: list[WorkerRef]) -> None:
        self.deadline_s = deadline_s
        self.stores = stores
        """Nodes to use, the first one first; those tried already are skipped."""
        self.tried: dict[str, MooncakeError | None] = {}
        """Address -> why it failed; None: the node has no more of the run."""
        self.answered = False
        """True if some node has answered."""
        self.searched = False
        """True if gateways were asked since `stores` were all tried."""

    def next(self, now: float) -> Attempt | None:
        """Return the attempt at the next node, or None if there is no further node, or no time."""
        left = [ref for ref in self.stores if ref.address not in self.tried]
        if not left or self.are_over(now):
            return None
        if len(left) == 1 or len(self.tried) == MAX_ATTEMPTS - 1:
            return Attempt(left[0], self.deadline_s)
        # Others are left to turn to: half of the time is theirs.
        share = (self.deadline_s - now) / 2
        return Attempt(left[0], now + share, now + min(share, SILENT_NODE_S))

    def are_over(self, now: float) -> bool:
        """Return whether no more nodes may be tried."""
        return len(self.tried) >= MAX_ATTEMPTS or now >= self.deadline_s

    def error(self) -> MooncakeError:
        """Return the error of a call that no node could answer."""
        errors = {at: error for at, error in self.tried.items() if error is not None}
        if len(errors) == 1:
            return next(iter(errors.values()))
        if errors:
            words = "; ".join(f"{at}: {error.message}" for at, error in errors.items())
            return Unavailable(f"no node of the pool could do it: {words}")
        return Unavailable("no pool node is known, or left: is a kvstore worker up on this node?")


class FailoverClient:
    """Makes each call at the next node when one fails. A call fails with the error of every node
    when none is left.
    """

    def __init__(self, client: PoolClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._nodes = KnownNodes(lambda: client.store)
        self._used = ""
        """Address of the node that the last put or look used."""
        self.broadcast = Broadcast(client, timeout_s)
        """Calls on all nodes."""
        self.num_moves = 0
        """How often `put_from` and `exists` used another node than the time before."""

    @property
    def own_store(self) -> WorkerRef | None:
        """The pool of this client's node, or the one it was told to use, once known."""
        return self._client.store

    @property
    def nodes(self) -> list[str]:
        """Addresses of the nodes that calls use, in that order."""
        return [ref.address for ref in self._nodes.order()]

    def run(self, policy: Policy[T], done: Callable[[T | MooncakeError], None], now: float) -> None:
        """Start one of the calls below, or of `broadcast`; `done` is called once with its answer.
        Raises ValueError for places that there are not.
        """
        self._client.run(policy, done, now)

    # ------------------------------------------------------------------ calls

    async def put_from(
        self, keys: Sequence[BlockKey], where: Where, tenant: str = ""
    ) -> list[BlockKey]:
        """Write blocks, a run of one chain, which must not change meanwhile. Return the keys of
        those that were written. The others were stored already, or there was no room.
        """
        places = self._client.places(keys, where)
        deadline_s = self._client.now + self._timeout_s
        written: list[BlockKey] = []
        used: dict[int, _Used] = {}
        for start in range(0, len(keys), rights.MAX_KEYS_AT_ONCE):
            some = slice(start, start + rights.MAX_KEYS_AT_ONCE)

            def write(at: Attempt, some: slice = some) -> Call[list[BlockKey] | MooncakeError]:
                used[some.start] = at.store, keys[some]
                return self._client.write(at, keys[some], places[some], tenant)

            put: list[BlockKey] = await self._at_some_node(write, deadline_s)
            written += put
        self._report(list(used.values())[:-1])
        return written

    async def get_into(self, keys: Sequence[BlockKey], where: Where) -> int:
        """Read a run of blocks into places, whose old content is lost even when fewer come. Return
        how many leading blocks came. Blocks that one node does not give are read from others that
        hold them.
        """
        places = self._client.places(keys, where)
        attempts = self._attempts()
        count, used = 0, list[_Used]()
        while count < len(keys):
            at = await self._next(attempts, keys[count:])
            if at is None:
                break
            some = slice(count, count + rights.MAX_KEYS_AT_ONCE)
            came = await self._client.read(at, keys[some], places[some])
            if came == len(keys[some]) < len(keys) - count:
                used.append((at.store, keys[some]))
                count += came
                continue
            attempts.stores, attempts.searched = [], False
            if isinstance(came, MooncakeError):
                self._failed(attempts, at.store, came)
                continue
            self._nodes.answered(at.store)
            attempts.answered = True
            count += came
            if came:  # further on, nodes that had no more may have something
                attempts.tried = {at: error for at, error in attempts.tried.items() if error}
            attempts.tried[at.store.address] = None
        self._report(used)
        if count < len(keys) and not attempts.answered:
            raise attempts.error()
        return count

    async def exists(self, keys: Sequence[BlockKey]) -> list[Tier | None]:
        """Return in which tier blocks are at the node that puts go to now. It keeps no block, so
        the answer may be outdated at once.
        """
        question = FindBlocks(asker=self._client.ref, ticket=0, keys=list(keys))
        found = await self._at_some_node(
            lambda at: self._client.request(at, question, BlocksFound)
        )  # fmt: skip
        return found.tiers

    async def match(self, keys: Sequence[BlockKey]) -> int:
        """Return how many leading blocks of a run the nodes hold together, as far as a gateway
        knows. While no gateway answers, the node that puts go to is asked. It keeps no block, so
        the answer may be outdated at once.
        """
        deadline_s, count = self._client.now + self._timeout_s, 0
        while count < len(keys):
            found = await self._search(keys[count:], deadline_s)
            if isinstance(found, MooncakeError):
                tiers = await self.exists(keys[count:])
                return count + next((n for n, tier in enumerate(tiers) if tier is None), len(tiers))
            more = max(found.num_blocks, default=0)
            if not more:
                break
            count += more
        return count

    async def stat(self) -> PoolState:
        """Return the figures of this client's own node."""
        return await self._ask_own(self._own_node())

    async def drain(self) -> PoolState:
        """Have the client's own node accept nothing more and save what is worth it; return its
        progress.
        """
        own = self._own_node()
        self._client.start_drain(own)
        return await self._ask_own(own)

    async def replicate(self, keys: Sequence[BlockKey], num_nodes: int, tenant: str = "") -> int:
        """Copy a run until `num_nodes` nodes hold it, as far as other nodes accept it. Return how
        many do.
        """
        deadline_s = self._client.now + self._timeout_s
        by_s = self._client.now + min(self._timeout_s / 4, GATEWAY_S)
        found = await self._client.ask_gateways(self._find(keys), by_s)
        if not isinstance(found, MooncakeError):
            self._nodes.add(found.stores)
        return await self.broadcast.replicate(
            keys, self._nodes.order(), num_nodes, tenant, deadline_s
        )

    # ------------------------------------------------------------------ the machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take an answer, the end of a transfer, or news of the cluster."""
        if isinstance(event, PeerLost):
            self._nodes.forget(event.worker, now)
        elif isinstance(event, Welcome):
            self._nodes.refresh_s = now  # a gateway that is new may know other nodes
        self._client.handle(event, now)
        if isinstance(event, Welcome):
            self._nodes.find_own()

    def tick(self, now: float) -> float | None:
        """Give up what takes too long, and ask which nodes exist. Return when to call again."""
        nodes = self._nodes
        if now >= nodes.refresh_s:
            nodes.refresh_s = now + (REFRESH_S if len(nodes) else GATEWAY_S)
            self.run(self._refresh(), lambda _: None, now)
        for suspect in list(nodes.suspects.values()):
            if now >= suspect.probe_s:
                suspect.postpone(now)
                self.run(self._probe(suspect), lambda _: None, now)
        wakes = [self._client.tick(now), nodes.refresh_s]
        wakes += [suspect.probe_s for suspect in nodes.suspects.values()]
        return min(wakes)

    def check_integrity(self) -> None:
        """Raise AssertionError when a lost node would be used."""
        self._nodes.check_integrity()
        self._client.check_integrity()

    # ------------------------------------------------------------------ policy

    def _report(self, used: Sequence[_Used]) -> None:
        """Have nodes evict the end of a chain first, though these runs came before it."""
        for store, run in reversed(used):
            self._client.report_use(store, run)

    async def _at_some_node(
        self, call: Callable[[Attempt], Call[T | MooncakeError]], deadline_s: float | None = None
    ) -> T:
        """Make a call at the first node that answers it."""
        attempts = self._attempts(deadline_s)
        while (at := await self._next(attempts, [])) is not None:
            answer = await call(at)
            if isinstance(answer, MooncakeError):
                self._failed(attempts, at.store, answer)
                attempts.stores = self._nodes.order()
                continue
            self._nodes.answered(at.store)
            self.num_moves += self._used not in ("", at.store.address)
            self._used = at.store.address
            return answer
        raise attempts.error()

    def _attempts(self, deadline_s: float | None = None) -> _Attempts:
        by_s = self._client.now + self._timeout_s if deadline_s is None else deadline_s
        return _Attempts(by_s, self._nodes.order())

    async def _next(self, attempts: _Attempts, keys: Sequence[BlockKey]) -> Attempt | None:
        """Return a call's attempt at the next node, to read a run of blocks or for anything else.
        Return None if no node is left.

        When all were tried, a gateway is asked for nodes that hold the next block. While none
        answers, the call uses nodes that are not suspect; if no node has answered it yet, it uses
        all.
        """
        now = self._client.now
        at = attempts.next(now)
        if at is not None or attempts.searched or attempts.are_over(now):
            return at
        if attempts.answered and not self._nodes.has_others(list(attempts.tried)):
            return None
        attempts.searched = True
        found = await self._search(keys, attempts.deadline_s)
        if not isinstance(found, MooncakeError):
            pairs = zip(found.stores, found.num_blocks, strict=True)
            attempts.stores = [ref for ref, count in pairs if count]
        if not attempts.answered:
            attempts.stores += self._nodes.order()
        elif isinstance(found, MooncakeError):
            attempts.stores += [r for r in self._nodes.order() if not self._nodes.is_suspect(r)]
        return attempts.next(self._client.now)

    async def _search(
        self, keys: Sequence[BlockKey], deadline_s: float
    ) -> ReplicasFound | MooncakeError:
        """Ask gateways which nodes hold a run. A gateway that did not answer a moment ago is not
        waited for.
        """
        if self._nodes.gateway_silent:
            return Unavailable("no gateway answers")
        now = self._client.now
        by_s = now + min((deadline_s - now) / 4, GATEWAY_S)
        found = await self._client.ask_gateways(self._find(keys), by_s)
        self._nodes.gateway_silent = isinstance(found, MooncakeError)
        if not isinstance(found, MooncakeError):
            self._nodes.add(found.stores)
        return found

    async def _refresh(self) -> None:
        """Ask gateways which nodes exist."""
        by_s = self._client.now + GATEWAY_S
        answer = await self._client.ask_gateways(self._find([]), by_s)
        self._nodes.learn(answer, self._client.now)

    async def _probe(self, suspect: Suspect) -> None:
        """Check whether a node answers again. No call waits for it."""
        at = Attempt(suspect.store, self._client.now + SILENT_NODE_S)
        question = FindBlocks(asker=self._client.ref, ticket=0, keys=[])
        answer = await self._client.request(at, question, BlocksFound)
        if not isinstance(answer, MooncakeError):
            self._nodes.answered(suspect.store)

    async def _ask_own(self, own: WorkerRef) -> PoolState:
        at = Attempt(own, self._client.now + self._timeout_s)
        question = AskPool(asker=self._client.ref, ticket=0)
        state = await self._client.request(at, question, PoolState)
        if isinstance(state, MooncakeError):
            raise state
        return state

    def _own_node(self) -> WorkerRef:
        """Return the client's own node, otherwise the first node."""
        own = self._nodes.own or next(iter(self._nodes.order()), None)
        if own is None:
            raise Unavailable(
                "no pool node is known yet: is a kvstore worker up on this node?"
            )  # fmt: skip
        return own

    def _failed(self, attempts: _Attempts, store: WorkerRef, error: MooncakeError) -> None:
        attempts.tried[store.address] = error
        self._nodes.failed(store, self._client.now)

    def _find(self, keys: Sequence[BlockKey]) -> FindReplicas:
        """Return the question that asks a gateway which nodes hold these blocks. It names only the
        first of them if they are too many for one question.
        """
        some = list(keys[: rights.MAX_KEYS_AT_ONCE])
        return FindReplicas(asker=self._client.ref, ticket=0, keys=some)
