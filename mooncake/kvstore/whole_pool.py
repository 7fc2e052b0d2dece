"""Calls that are for the pool as a whole: each goes to all nodes there are, and its answer says
what holds for all of them.

Pure; begun by a client of the pool, which ends every question. A gateway says which nodes there
are: while none answers, nobody can tell what the pool holds, and calls fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mooncake.base import BlockKey, MooncakeError, Tier, Unavailable, WorkerRef
from mooncake.base.pool_messages import (
    AskPool,
    BlockCopy,
    BlocksDescribed,
    BlocksFound,
    BlocksKept,
    BlocksRemoved,
    DescribeBlocks,
    FindBlocks,
    FindHolders,
    ForgetBlocks,
    HoldersFound,
    Keep,
    KeepBlocks,
    PoolState,
    RemoveBlocks,
)
from mooncake.kvstore.calls import Answer, Attempt, Question, Removed
from mooncake.kvstore.client import PoolClient

MAX_ROUNDS = 3
"""Of a removal: when a node is lost meanwhile, gateways are told again, who tell it later."""
GATEWAY_SHARE = 0.25
"""Of the time, what a gateway has to name the nodes."""
LOOK_SHARE = 0.5
"""Of the time left then, what nodes have to say where blocks are that are to be kept."""

Kind = TypeVar("Kind", bound=Answer)
Ask = tuple[WorkerRef, Callable[[WorkerRef, int], Question]]
"""(whom, what: given who asks and the ticket)"""


@dataclass(frozen=True)
class KeptAt:
    """What became of a wish to keep blocks."""

    epochs: list[str]
    """Of the boots of nodes that keep some of them now, or no longer do."""
    blocks: list[bool]
    """Whether some node did as was wished."""


@dataclass(frozen=True)
class Replica:
    """What one node has of a block in one tier."""

    store: WorkerRef
    copy: BlockCopy


Keepers = Callable[[KeptAt | MooncakeError], None]
Described = Callable[[list[list[Replica]] | MooncakeError], None]
"""All copies of each block."""
AllStated = Callable[[list[tuple[WorkerRef, PoolState | MooncakeError]] | MooncakeError], None]


class WholePool:
    """All such calls of one client; each ends within `timeout_s`."""

    def __init__(self, client: PoolClient, timeout_s: float, clock: Callable[[], float]) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock

    # ------------------------------------------------------------------ calls

    def remove(self, keys: Sequence[BlockKey], done: Removed) -> None:
        """Take blocks out of all nodes for good; of each, whether it was somewhere and is not
        any more. A hard pin anywhere protects what it is on. Fails when a node cannot be asked, but
        does not come to its end while that one is away: gateways tell it then.
        """
        deadline_s = self._clock() + self._timeout_s
        was_here: set[BlockKey] = set()

        def begin(rounds: int) -> None:
            def found(stores: list[WorkerRef]) -> None:
                asks: list[Ask] = [
                    (store, lambda asker, ticket: RemoveBlocks(
                        asker=asker, ticket=ticket, keys=list(keys)
                    )) for store in stores
                ]  # fmt: skip
                self._ask_all(asks, BlocksRemoved, deadline_s, partial(answered, rounds))

            self._find_nodes(
                lambda asker, ticket: ForgetBlocks(asker=asker, ticket=ticket, keys=list(keys)),
                deadline_s, found, done,
            )  # fmt: skip

        def answered(
            rounds: int, answers: list[tuple[WorkerRef, BlocksRemoved | MooncakeError]]
        ) -> None:
            left: set[BlockKey] = set()
            for _, answer in answers:
                if not isinstance(answer, MooncakeError):
                    was_here.update(_chosen(keys, answer.removed))
                    left.update(_chosen(keys, answer.left))
            failure = _failure(answers)
            if failure is None:
                done([key in was_here and key not in left for key in keys])
            elif rounds > 1 and self._clock() < deadline_s:
                begin(rounds - 1)
            else:
                done(failure)

        begin(MAX_ROUNDS)

    def keep(
        self, keys: Sequence[BlockKey], keep: Keep, done: Keepers, epochs: Sequence[str] = ()
    ) -> None:
        """Have blocks kept wherever they lie in DRAM, and what lies on SSD only by one node that
        brings it up; or, with `Keep.NO`, nowhere any more. `epochs` names the boots that are meant,
        if not all.
        """
        deadline_s = self._clock() + self._timeout_s

        def found(stores: list[WorkerRef]) -> None:
            meant = [store for store in stores if not epochs or store.epoch in epochs]
            if keep is Keep.NO:
                go_on([self._wish(store, keys, keep) for store in meant], None)
                return
            asks: list[Ask] = [
                (store, lambda asker, ticket: FindBlocks(
                    asker=asker, ticket=ticket, keys=list(keys)
                )) for store in meant
            ]  # fmt: skip
            now = self._clock()
            self._ask_all(asks, BlocksFound, now + (deadline_s - now) * LOOK_SHARE, looked)

        def looked(answers: list[tuple[WorkerRef, BlocksFound | MooncakeError]]) -> None:
            go_on(self._wishes(keys, keep, answers), _failure(answers))

        def go_on(wishes: list[tuple[list[BlockKey], Ask]], failure: MooncakeError | None) -> None:
            def answered(answers: list[tuple[WorkerRef, BlocksKept | MooncakeError]]) -> None:
                done_at: dict[str, None] = {}
                kept: set[BlockKey] = set()
                for (run, _), (_, answer) in zip(wishes, answers, strict=True):
                    if not isinstance(answer, MooncakeError) and any(answer.kept):
                        done_at[answer.store.epoch] = None
                        kept.update(_chosen(run, answer.kept))
                blocks = [key in kept for key in keys]
                unsure = failure or _failure(answers)
                if unsure is not None and (keep is Keep.NO or not all(blocks)):
                    done(unsure)
                else:
                    done(KeptAt(list(done_at), blocks))

            self._ask_all([ask for _, ask in wishes], BlocksKept, deadline_s, answered)

        self._every_node(deadline_s, found, done)

    def describe(self, keys: Sequence[BlockKey], done: Described) -> None:
        """Return all copies there are of each block. Fails when a node does not say."""
        deadline_s = self._clock() + self._timeout_s

        def found(stores: list[WorkerRef]) -> None:
            asks: list[Ask] = [
                (store, lambda asker, ticket: DescribeBlocks(
                    asker=asker, ticket=ticket, keys=list(keys)
                )) for store in stores
            ]  # fmt: skip
            self._ask_all(asks, BlocksDescribed, deadline_s, answered)

        def answered(answers: list[tuple[WorkerRef, BlocksDescribed | MooncakeError]]) -> None:
            failure = _failure(answers)
            if failure is not None:
                done(failure)
                return
            replicas: list[list[Replica]] = [[] for _ in keys]
            for store, answer in answers:
                if not isinstance(answer, MooncakeError):
                    for found_here, copies in zip(replicas, answer.copies, strict=True):
                        found_here += [Replica(store, copy) for copy in copies]
            done(replicas)

        self._every_node(deadline_s, found, done)

    def stat(self, done: AllStated) -> None:
        """Return how each node is doing, or why it does not say."""
        deadline_s = self._clock() + self._timeout_s

        def found(stores: list[WorkerRef]) -> None:
            asks: list[Ask] = [
                (store, lambda asker, ticket: AskPool(asker=asker, ticket=ticket))
                for store in stores
            ]
            self._ask_all(asks, PoolState, deadline_s, done)

        self._every_node(deadline_s, found, done)

    # ------------------------------------------------------------------ wishes to keep

    def _wishes(
        self,
        keys: Sequence[BlockKey],
        keep: Keep,
        answers: Sequence[tuple[WorkerRef, BlocksFound | MooncakeError]],
    ) -> list[tuple[list[BlockKey], Ask]]:
        """Return who is to keep what: all that have it in DRAM; else the first that has it."""
        tiers = [
            (store, dict(zip(keys, answer.tiers, strict=True)))
            for store, answer in answers
            if not isinstance(answer, MooncakeError)
        ]
        in_dram = {key for _, here in tiers for key in keys if here[key] is Tier.DRAM}
        wishes = []
        for store, here in tiers:
            wishes.append(self._wish(store, [key for key in keys if here[key] is Tier.DRAM], keep))
            below = [key for key in keys if here[key] is Tier.SSD and key not in in_dram]
            in_dram.update(below)
            wishes.append(self._wish(store, below, keep, lift=True))
        return [(run, ask) for run, ask in wishes if run]

    def _wish(
        self, store: WorkerRef, keys: Sequence[BlockKey], keep: Keep, *, lift: bool = False
    ) -> tuple[list[BlockKey], Ask]:
        run = list(keys)

        def make(asker: WorkerRef, ticket: int) -> KeepBlocks:
            return KeepBlocks(
                asker=asker, ticket=ticket, keys=run, keep=keep, epoch=store.epoch, lift=lift
            )

        return run, (store, make)

    # ------------------------------------------------------------------ asking

    def _every_node(
        self,
        deadline_s: float,
        found: Callable[[list[WorkerRef]], None],
        fail: Callable[[MooncakeError], None],
    ) -> None:
        self._find_nodes(
            lambda asker, ticket: FindHolders(asker=asker, ticket=ticket, keys=[], every=True),
            deadline_s, found, fail,
        )  # fmt: skip

    def _find_nodes(
        self,
        make: Callable[[WorkerRef, int], FindHolders | ForgetBlocks],
        deadline_s: float,
        found: Callable[[list[WorkerRef]], None],
        fail: Callable[[MooncakeError], None],
    ) -> None:
        """Ask gateways which nodes there are."""

        def answered(answer: HoldersFound | MooncakeError) -> None:
            if isinstance(answer, MooncakeError):
                fail(Unavailable(
                    "no gateway says which nodes the pool has, so this cannot be done everywhere: "
                    f"{answer.message}"
                ))  # fmt: skip
            elif not answer.stores:
                fail(Unavailable("the pool has no node: is a kvstore worker up?"))
            else:
                found(answer.stores)

        now = self._clock()
        self._client.ask_gateways(make, answered, now + (deadline_s - now) * GATEWAY_SHARE)

    def _ask_all(
        self,
        asks: Sequence[Ask],
        kind: type[Kind],
        deadline_s: float,
        done: Callable[[list[tuple[WorkerRef, Kind | MooncakeError]]], None],
    ) -> None:
        """Ask each node its question; `done` gets all answers, in the order of the questions."""
        answers: dict[int, Kind | MooncakeError] = {}

        def answered(number: int, answer: Kind | MooncakeError) -> None:
            answers[number] = answer
            if len(answers) == len(asks):
                done([(store, answers[number]) for number, (store, _) in enumerate(asks)])

        if not asks:
            done([])
        for number, (store, make) in enumerate(asks):
            self._client.ask(Attempt(store, deadline_s), make, kind, partial(answered, number))


def _chosen(keys: Sequence[BlockKey], flags: Sequence[bool]) -> list[BlockKey]:
    return [key for key, flag in zip(keys, flags, strict=False) if flag]


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
