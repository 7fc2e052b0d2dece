"""Finds the smallest cluster that keeps almost every request inside both limits, and its P:D ratio.

Pure search. A function passed in simulates one cluster.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mooncake.sim.results.result import SimulationResult
from mooncake.sim.simulation import SimulationConfig

WANTED_RATIO = 0.99


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate cluster and its result."""

    num_nodes: int
    num_prefill: int
    num_decode: int
    effective_ratio: float
    ttft_inside: bool
    """Whether the wait for the first token is short enough."""
    ttft_p99_s: float
    tbt_p99_ms: float
    prefill_utilisation: float
    decode_utilisation: float
    chosen: bool = False

    @property
    def enough(self) -> bool:
        return self.effective_ratio >= WANTED_RATIO


Attempt = Callable[[SimulationConfig], SimulationResult]


class _Search:
    def __init__(self, base: SimulationConfig, attempt: Attempt) -> None:
        self._base = base
        self._attempt = attempt
        self.tried: dict[tuple[int, int], Tried] = {}

    def at(self, num_prefill: int, num_decode: int) -> Tried:
        known = self.tried.get((num_prefill, num_decode))
        if known is None:
            config = msgspec.structs.replace(
                self._base, num_prefill=num_prefill, num_decode=num_decode
            )
            known = self.tried[num_prefill, num_decode] = _tried(self._attempt(config))
        return known


def plan_cluster(base: SimulationConfig, attempt: Attempt, max_nodes: int) -> list[Tried]:
    """Return all clusters that were tried, smallest first; one is marked `chosen` if any is enough.

    The search grows the pool that misses its limit until the cluster is enough. Then it takes
    instances away, first from one pool, then from the other, then trades one for another, as long
    as the cluster stays enough.
    """
    search = _Search(base, attempt)
    best = _grow(search, max_nodes)
    while best is not None:
        smaller = _shrink(search, best)
        if smaller is None:
            break
        best = smaller
    chosen = (best.num_prefill, best.num_decode) if best is not None else None
    ordered = sorted(search.tried.values(), key=lambda one: (one.num_nodes, one.num_prefill))
    return [
        msgspec.structs.replace(one, chosen=(one.num_prefill, one.num_decode) == chosen)
        for one in ordered
    ]


def _grow(search: _Search, max_nodes: int) -> Tried | None:
    prefill, decode = 1, 1
    while True:
        one = search.at(prefill, decode)
        if one.num_nodes > max_nodes:
            return None
        if one.enough:
            return one
        if not one.ttft_inside:
            prefill += max(1, prefill // 2)
        else:
            decode += max(1, decode // 2)


def _shrink(search: _Search, best: Tried) -> Tried | None:
    """Return a smaller cluster that is enough. The larger pool is cut first."""
    prefill, decode = best.num_prefill, best.num_decode
    steps = [(prefill - 1, decode), (prefill, decode - 1)]
    if decode > prefill:
        steps.reverse()
    # Remove one instance and strengthen the other pool by one.
    steps += [(prefill - 2, decode + 1), (prefill + 1, decode - 2)]
    for num_prefill, num_decode in steps:
        if num_prefill >= 1 and num_decode >= 1:
            one = search.at(num_prefill, num_decode)
            if one.enough:
                return one
    return None


def _tried(result: SimulationResult) -> Tried:
    return Tried(
        num_nodes=result.num_nodes,
        num_prefill=result.num_prefill,
        num_decode=result.num_decode,
        effective_ratio=result.effective_ratio,
        ttft_inside=result.ttft_inside_ratio >= WANTED_RATIO,
        ttft_p99_s=result.ttft_s.p99,
        tbt_p99_ms=result.tbt_slow10_ms.p99,
        prefill_utilisation=result.prefill_utilisation,
        decode_utilisation=result.decode_utilisation,
    )
