"""One pool on a trace: by hand, by bound, and against a plain model of LRU."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from mooncake.base import ConfigError
from mooncake.sim.trace_cache import POLICY_NAMES, hit_rate
from mooncake.sim.workload import TraceLine, describe, parse_trace
from tests.support.sim.traces import line, sessions


def plain_lru(trace: list[TraceLine], capacity: int) -> float:
    """Blocks leave one by one, the least recently used run's tail first."""
    stored: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for one in trace:
        total += len(one.hash_ids)
        for hash_id in one.hash_ids:
            if hash_id not in stored:
                break
            hits += 1
        for hash_id in reversed(one.hash_ids[:capacity]):
            stored.pop(hash_id, None)
            stored[hash_id] = None
        while len(stored) > capacity:
            stored.popitem(last=False)
    return hits / total


@pytest.mark.parametrize("capacity", [3, 40, 100, 10_000])
def test_lru_is_lru(capacity: int) -> None:
    trace = sessions(300)
    assert hit_rate(trace, "lru", capacity).hit_rate == pytest.approx(
        plain_lru(trace, capacity), abs=1e-6
    )


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_pool_without_bound_hits_all_there_is(policy: str) -> None:
    trace = sessions(200)
    rate = hit_rate(trace, policy, 1_000_000).hit_rate
    assert rate == pytest.approx(describe(trace).max_hit_rate, abs=1e-6)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_less_room_never_hits_more_than_all_there_is(policy: str) -> None:
    trace = sessions(200)
    best = describe(trace).max_hit_rate
    assert 0 <= hit_rate(trace, policy, 20).hit_rate <= best


def test_a_hole_ends_the_run() -> None:
    trace = parse_trace([line(0, 1536, ids=[1, 2, 3]), line(1, 1536, ids=[1, 9, 3])], "t")
    assert hit_rate(trace, "lru", 100).hit_rate == pytest.approx(1 / 6, abs=1e-6)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy"):
        hit_rate(sessions(2), "fifo", 10)
    with pytest.raises(ConfigError, match="capacity"):
        hit_rate(sessions(2), "lru", 0)
