"""Samples a simulated cluster at regular times.

It reads the Conductor's views and the runners' clocks, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import nlargest

from mooncake.base.blocks import BlockKey, block_keys
from mooncake.base.messages import Role
from mooncake.kvstore.node.node import KvNode
from mooncake.prefill.worker import PrefillWorker
from mooncake.sim.measure import Measures, Moment
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, Arrival, prompt_tokens
from mooncake.sim.world.runner import SimRunner
from mooncake.sim.world.world import World

NUM_MOMENTS = 120
RANKS = (1, 10, 100, 1000, 10_000)
"""The ranks, by use, of blocks whose replicas are counted (Mooncake, FAST'25, figure 11)."""


class Watch:
    """Takes `NUM_MOMENTS` samples, evenly spread over the arrivals."""

    def __init__(
        self, world: World, measures: Measures, ttft_slo_s: float, tbt_slo_s: float
    ) -> None:
        self._world = world
        self._measures = measures
        self._ttft_slo_s = ttft_slo_s
        self._tbt_slo_s = tbt_slo_s
        self._every_s = 1.0
        self._until_s = 0.0
        self._busy_s = {Role.PREFILL: 0.0, Role.DECODE: 0.0}
        self._hit = self._prompt = 0
        self._uses: Counter[int] = Counter()
        self._first_use: dict[int, Arrival] = {}
        self._keys: dict[int, BlockKey] = {}

    def start(self, first_s: float, last_s: float) -> None:
        """Sample from `first_s` to `last_s` (seconds)."""
        self._every_s = max(1.0, (last_s - first_s) / NUM_MOMENTS)
        self._until_s = last_s
        self._world.heap.at(first_s + self._every_s, self._look)

    def count_blocks(self, arrival: Arrival) -> None:
        """Count one use of each of these blocks."""
        ids = arrival.line.hash_ids
        self._uses.update(ids)
        for hash_id in ids:
            self._first_use.setdefault(hash_id, arrival)

    def _look(self) -> None:
        measures, now = self._measures, self._world.heap.now()
        hit, prompt = measures.hit_tokens - self._hit, measures.prompt_tokens - self._prompt
        self._hit, self._prompt = measures.hit_tokens, measures.prompt_tokens
        views = self._world.conductor.views
        prefills = [view for view in views if view.role == Role.PREFILL]
        decodes = [view for view in views if view.role == Role.DECODE]
        queues = [view.queued_s() for view in prefills or decodes]
        gaps = [
            view.cost.tbt_s(max(1, view.num_sequences()), view.num_context_tokens())
            for view in decodes
        ]
        hot = self._hot_blocks() if self._world.has_pools else [[] for _ in RANKS]
        measures.timeline.append(
            Moment(
                at_s=round(now, 3),
                prefill_load=round(_mean(queues) / self._ttft_slo_s, 4),
                decode_load=round(_mean(gaps) / self._tbt_slo_s, 4),
                prefill_busy=self._busy(Role.PREFILL),
                decode_busy=self._busy(Role.DECODE),
                num_decoding=sum(view.load.num_running for view in decodes),
                hit_rate=round(hit / prompt, 4) if prompt else 0.0,
                num_completed=measures.num_completed,
                num_rejected=sum(measures.rejected.values()),
                replicas=_around(hot, self._world.num_pool_replicas),
                holders=_around(hot, self._num_holders),
            )
        )
        if now + self._every_s <= self._until_s + 1e-6:
            self._world.heap.after(self._every_s, self._look)

    def _busy(self, role: Role) -> float:
        runners = self._world.runners(role)
        total = sum(runner.busy_s for runner in runners if isinstance(runner, SimRunner))
        workers = self._world.workers.values()
        count = sum(each.spec.role is role and not each.retired for each in workers)
        share = (total - self._busy_s[role]) / (self._every_s * count) if count else 0.0
        self._busy_s[role] = total
        return round(min(share, 1.0), 4)

    def _hot_blocks(self) -> list[list[BlockKey]]:
        """Return some blocks around each rank of popularity; for the first rank only the
        top one.
        """
        ranked = nlargest(RANKS[-1] + 5, self._uses.items(), key=lambda item: (item[1], -item[0]))
        return [
            [self._key(h) for h, _ in ranked[rank - 1 : rank - 1 + min(rank, 5)]] for rank in RANKS
        ]

    def _num_holders(self, key: BlockKey) -> int:
        """Return how many nodes hold a block that prefill could use."""
        nodes = set()
        for worker in self._world.workers.values():
            machine = worker.machine
            if isinstance(machine, KvNode):
                holds = machine.stores(key)
            else:
                holds = isinstance(machine, PrefillWorker) and bool(
                    machine.instance.pool.match([key])
                )
            if holds:
                nodes.add(worker.spec.node_id)
        return len(nodes)

    def _key(self, hash_id: int) -> BlockKey:
        """Return the key of a trace block, computed from the first request that used it."""
        key = self._keys.get(hash_id)
        if key is None:
            line = self._first_use[hash_id].line
            keys = block_keys(
                self._world.config.layout.fingerprint,
                prompt_tokens(line) + [0] * TRACE_BLOCK_TOKENS,
                TRACE_BLOCK_TOKENS,
                line.tenant,
            )
            key = keys[line.hash_ids.index(hash_id)]
            self._keys[hash_id] = key
        return key


def _around(hot: Sequence[Sequence[BlockKey]], count: Callable[[BlockKey], int]) -> list[float]:
    """Return the mean count of the blocks around each rank."""
    return [round(_mean([count(key) for key in keys]), 2) for keys in hot]


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
