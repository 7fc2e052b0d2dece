"""Calls on the whole pool: each goes to all nodes, and its answer holds for all of them. A run is
copied until a given number of nodes hold it; its bytes go from node to node.

Policies above `PoolClient`. A gateway says which nodes exist. While no gateway answers, nothing is
known about all nodes, and calls fail that are for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from mooncake.base import BlockKey, MooncakeError, Tier, Unavailable, WorkerRef, rights
from mooncake.base.messages import Answer, Replicate
from mooncake.base.pool_messages import (
    AskPool,
    BlockCopy,
    BlocksDescribed,
    BlocksFound,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    FindReplicas,
    ForgetBlocks,
    LastingPin,
    PinsSet,
    PoolState,
    RemoveBlocks,
    SetPins,
    TakenOver,
)
from mooncake.kvstore.client.calls import Attempt, together
from mooncake.kvstore.client.client import PoolClient, Question

MAX_ROUNDS = 3
"""Rounds of a removal. When a node is lost meanwhile, gateways are told again, and they tell the
node later.
"""
GATEWAY_SHARE = 0.25
"""Share of the time that a gateway has to name the nodes."""
LOOK_SHARE = 0.5
"""Share of the remaining time in which nodes have to say where the blocks to be pinned are."""

HOLDERS_SHARE = 0.25
"""Share of the time in which nodes have to say whether they hold a run to copy. A node that does
not answer is left out.
"""

Kind = TypeVar("Kind", bound=Answer)


@dataclass(frozen=True)
class PinnedAt:
    """The result of `Broadcast.pin`."""

    epochs: list[str]
    """The boots of nodes that did what was asked for some block."""
    blocks: list[bool]
    """Whether some node did what was asked, for each block."""


@dataclass(frozen=True)
class Replica:
    """One node's copy of a block in one tier."""

    store: WorkerRef
    copy: BlockCopy


@dataclass(frozen=True)
class _PinRun:
    """Blocks that one node has to pin."""

    store: WorkerRef
    keys: list[BlockKey]
    lift: bool = False
    """True if they lie on SSD only, and are brought up first."""


class Broadcast:
    """Makes the calls of one client that go to all pool nodes, such as to remove or pin blocks.
    Each ends within `timeout_s`.
    """

    def __init__(self, client: PoolClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s

    async def remove(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Remove blocks from all nodes for good. Return for each whether it was stored somewhere
        and is not any more. A hard pin on any node protects its block.

        Raises Unavailable when a node cannot be asked. The removal still reaches this node:
        gateways tell it when it is back.
        """
        deadline_s = self._deadline_s()
        run = list(keys)
        was_here: set[BlockKey] = set()
        for rounds_left in reversed(range(MAX_ROUNDS)):
            for start in range(0, len(run), rights.MAX_KEYS_AT_ONCE) or (0,):
                some = run[start : start + rights.MAX_KEYS_AT_ONCE]
                forget = ForgetBlocks(asker=self._client.ref, ticket=0, keys=some)
                stores = await self._nodes(forget, deadline_s)
            question = RemoveBlocks(asker=self._client.ref, ticket=0, keys=run)
            answers = await self._ask_all(stores, question, BlocksRemoved, deadline_s)
            left: set[BlockKey] = set()
            for _, answer in _given(answers):
                was_here.update(_chosen(run, answer.removed))
                left.update(_chosen(run, answer.left))
            failure = _failure(answers)
            if failure is None:
                break
            if not rounds_left or self._client.now >= deadline_s:
                raise failure
        return [key in was_here and key not in left for key in run]

    async def pin(
        self, keys: Sequence[BlockKey], pin: LastingPin, epochs: Sequence[str] = ()
    ) -> PinnedAt:
        """Pin blocks wherever they lie in DRAM. If a block lies on SSD only, one node brings it up
        and pins it. `LastingPin.NONE` unpins them everywhere. `epochs` restricts the call to these
        boots of nodes.

        Raises Unavailable when a node that may hold a block does not answer.
        """
        deadline_s = self._deadline_s()
        stores = await self._all_nodes(deadline_s)
        meant = [store for store in stores if not epochs or store.epoch in epochs]
        failure: MooncakeError | None = None
        if pin is LastingPin.NONE:
            runs = [_PinRun(store, list(keys)) for store in meant]
        else:
            now = self._client.now
            question = FindBlocks(asker=self._client.ref, ticket=0, keys=list(keys))
            by_s = now + (deadline_s - now) * LOOK_SHARE
            found = await self._ask_all(meant, question, BlocksFound, by_s)
            runs, failure = _runs_to_pin(keys, found), _failure(found)
        questions = [
            (run.store, SetPins(
                asker=self._client.ref, ticket=0, keys=run.keys, pin=pin,
                epoch=run.store.epoch, lift=run.lift,
            ))
            for run in runs
        ]  # fmt: skip
        answers = await self._ask(questions, PinsSet, deadline_s)
        failure = failure or _failure(answers)
        done_at: dict[str, None] = {}
        done: set[BlockKey] = set()
        for run, (_, answer) in zip(runs, answers, strict=True):
            if not isinstance(answer, MooncakeError) and any(answer.done):
                done_at[answer.store.epoch] = None
                done.update(_chosen(run.keys, answer.done))
        blocks = [key in done for key in keys]
        if failure is not None and (pin is LastingPin.NONE or not all(blocks)):
            raise failure
        return PinnedAt(list(done_at), blocks)

    async def describe(self, keys: Sequence[BlockKey]) -> list[list[Replica]]:
        """Return all copies of each block. Raises Unavailable when a node does not answer."""
        deadline_s = self._deadline_s()
        question = DescribeBlocks(asker=self._client.ref, ticket=0, keys=list(keys))
        stores = await self._all_nodes(deadline_s)
        answers = await self._ask_all(stores, question, BlocksDescribed, deadline_s)
        failure = _failure(answers)
        if failure is not None:
            raise failure
        replicas: list[list[Replica]] = [[] for _ in keys]
        for store, answer in _given(answers):
            for found, copies in zip(replicas, answer.copies, strict=True):
                found += [Replica(store, copy) for copy in copies]
        return replicas

    async def stat_all(self) -> list[tuple[WorkerRef, PoolState | MooncakeError]]:
        """Return the figures of each node, or why it does not answer."""
        deadline_s = self._deadline_s()
        stores = await self._all_nodes(deadline_s)
        question = AskPool(asker=self._client.ref, ticket=0)
        return await self._ask_all(stores, question, PoolState, deadline_s)

    async def replicate(
        self,
        keys: Sequence[BlockKey],
        stores: Sequence[WorkerRef],
        num_nodes: int,
        tenant: str,
        deadline_s: float,
    ) -> int:
        """Copy a run until `num_nodes` of these nodes hold it; return how many do at the end."""
        now = self._client.now
        look = FindBlocks(asker=self._client.ref, ticket=0, keys=list(keys))
        by_s = now + (deadline_s - now) * HOLDERS_SHARE
        sources: list[WorkerRef] = []
        others: list[WorkerRef] = []
        for store, found in _given(await self._ask_all(stores, look, BlocksFound, by_s)):
            (others if None in found.tiers else sources).append(store)
        while sources and others and len(sources) < num_nodes and self._client.now < deadline_s:
            wanted = num_nodes - len(sources)
            targets, others = others[:wanted], others[wanted:]
            # Half of the time is for those that are asked should one of these fail.
            limit_s = deadline_s - ((deadline_s - self._client.now) / 2 if others else 0.0)
            pulls = [
                (target, Replicate(
                    source=sources[number % len(sources)], keys=list(keys), tenant=tenant,
                    asker=self._client.ref,
                ))
                for number, target in enumerate(targets)
            ]  # fmt: skip
            for target, taken in _given(await self._ask(pulls, TakenOver, limit_s)):
                if set(keys) <= set(taken.keys):
                    sources.append(target)
        return len(sources)

    def _deadline_s(self) -> float:
        return self._client.now + self._timeout_s

    async def _all_nodes(self, deadline_s: float) -> list[WorkerRef]:
        question = FindReplicas(asker=self._client.ref, ticket=0, keys=[], every=True)
        return await self._nodes(question, deadline_s)

    async def _nodes(
        self, question: FindReplicas | ForgetBlocks, deadline_s: float
    ) -> list[WorkerRef]:
        """Ask gateways which nodes exist. `question` must be one whose answer names them."""
        by_s = self._client.now + (deadline_s - self._client.now) * GATEWAY_SHARE
        answer = await self._client.ask_gateways(question, by_s)
        if isinstance(answer, MooncakeError):
            raise Unavailable(
                "no gateway says which nodes the pool has, so this cannot be done everywhere: "
                f"{answer.message}"
            )
        if not answer.stores:
            raise Unavailable("the pool has no node: is a kvstore worker up?")
        return answer.stores

    async def _ask_all(
        self, stores: Sequence[WorkerRef], question: Question, kind: type[Kind], by_s: float
    ) -> list[tuple[WorkerRef, Kind | MooncakeError]]:
        """Ask each node the same question; return each with its answer."""
        return await self._ask([(store, question) for store in stores], kind, by_s)

    async def _ask(
        self, questions: Sequence[tuple[WorkerRef, Question]], kind: type[Kind], by_s: float
    ) -> list[tuple[WorkerRef, Kind | MooncakeError]]:
        """Ask each node its question; return each with its answer."""
        asked = [self._client.request(Attempt(node, by_s), each, kind) for node, each in questions]
        nodes = [node for node, _ in questions]
        return list(zip(nodes, await together(asked), strict=True))


def _runs_to_pin(
    keys: Sequence[BlockKey], found: Sequence[tuple[WorkerRef, BlocksFound | MooncakeError]]
) -> list[_PinRun]:
    """Return which blocks each node has to pin: all nodes that have a block in DRAM, otherwise the
    first that has it below DRAM.
    """
    tiers = [(store, dict(zip(keys, given.tiers, strict=True))) for store, given in _given(found)]
    in_dram = {key for _, here in tiers for key in keys if here[key] is Tier.DRAM}
    runs = []
    for store, here in tiers:
        runs.append(_PinRun(store, [key for key in keys if here[key] is Tier.DRAM]))
        below = [key for key in keys if _is_below(here[key]) and key not in in_dram]
        in_dram.update(below)
        runs.append(_PinRun(store, below, lift=True))
    return [run for run in runs if run.keys]


def _is_below(tier: Tier | None) -> bool:
    return tier is not None and tier.is_below_dram


def _chosen(keys: Sequence[BlockKey], flags: Sequence[bool]) -> list[BlockKey]:
    return [key for key, flag in zip(keys, flags, strict=False) if flag]


def _given(
    answers: Sequence[tuple[WorkerRef, Kind | MooncakeError]],
) -> list[tuple[WorkerRef, Kind]]:
    """Return the nodes that have answered, with their answers."""
    return [(node, each) for node, each in answers if not isinstance(each, MooncakeError)]


def _failure(answers: Sequence[tuple[WorkerRef, object]]) -> MooncakeError | None:
    """Return the error of a call that not all nodes have answered."""
    words = [
        f"{store.worker_id} at {store.address}: {answer.message}"
        for store, answer in answers
        if isinstance(answer, MooncakeError)
    ]
    if not words:
        return None
    return Unavailable(f"not all nodes of the pool could be asked: {'; '.join(words)}")
