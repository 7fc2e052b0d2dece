"""One wish for copies of a run: nodes are asked who holds all of it, then as many of the others as
are wanted still are told to pull it from those, and one more for each that could not.

Pure; begun by a client of the pool, which ends every question. Bytes go from node to node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mooncake.base import BlockKey, MooncakeError, Tier, WorkerRef
from mooncake.kvstore.calls import Attempt
from mooncake.kvstore.client import PoolClient

Spreads = Callable[[int | MooncakeError], None]
"""On how many nodes the whole run lies."""
LOOK_SHARE = 0.25
"""Of the time, what nodes have to say whether they hold the run; who does not is left out."""


class Spread:
    """See the module; to be begun once."""

    def __init__(
        self,
        client: PoolClient,
        keys: Sequence[BlockKey],
        num_nodes: int,
        tenant: str,
        deadline_s: float,
        done: Spreads,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._keys = keys
        self._num_nodes = num_nodes
        self._tenant = tenant
        self._deadline_s = deadline_s
        self._done = done
        self._clock = clock
        self._holders: list[WorkerRef] = []
        self._others: list[WorkerRef] = []
        """Those that could take a copy, the next one first."""
        self._num_open = 0
        self._num_told = 0

    def begin(self, stores: Sequence[WorkerRef]) -> None:
        """Ask these nodes; copies are made by, and told to, one after another in this order."""
        now = self._clock()
        by_s = now + (self._deadline_s - now) * LOOK_SHARE
        answers: dict[str, list[Tier | None] | MooncakeError] = {}

        def looked(store: WorkerRef, answer: list[Tier | None] | MooncakeError) -> None:
            answers[store.address] = answer
            if len(answers) == len(stores):
                self._on_looked([(each, answers[each.address]) for each in stores])

        for store in stores:
            self._client.exists(self._keys, partial(looked, store), now, Attempt(store, by_s))
        if not stores:
            self._done(0)

    def _on_looked(
        self, answers: Sequence[tuple[WorkerRef, list[Tier | None] | MooncakeError]]
    ) -> None:
        for store, answer in answers:
            if not isinstance(answer, MooncakeError):
                (self._others if None in answer else self._holders).append(store)
        self._go_on()

    def _go_on(self) -> None:
        left_s = self._deadline_s - self._clock()
        while self._holders and self._others and left_s > 0:
            if len(self._holders) + self._num_open >= self._num_nodes:
                break
            source = self._holders[self._num_told % len(self._holders)]
            target = self._others.pop(0)
            self._num_told += 1
            self._num_open += 1
            # Half of the time is for the one that is told should this one fail.
            at = Attempt(target, self._deadline_s - (left_s / 2 if self._others else 0.0))
            then = partial(self._on_copied, target)
            self._client.copy_to(at, self._keys, source, then, self._tenant)
        if not self._num_open:
            self._done(len(self._holders))

    def _on_copied(self, target: WorkerRef, answer: list[BlockKey] | MooncakeError) -> None:
        self._num_open -= 1
        if not isinstance(answer, MooncakeError) and set(self._keys) <= set(answer):
            self._holders.append(target)
        self._go_on()
