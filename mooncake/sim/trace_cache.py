"""The hit rate of one pool of a given size on a trace, which bounds a cluster's hit rate.

It runs the shipped eviction policies over block ids without time: the next request can use a
request's blocks at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mooncake.base import BlockKey, ConfigError
from mooncake.kvstore.eviction import POLICIES, EvictionPolicy
from mooncake.sim.workload import TraceLine

POLICY_NAMES = {"lru": "lru", "lfu": "lfu", "length-aware": "length", "cost-aware": "cost"}
"""Names on the command line -> names in `kvstore.eviction`."""


class CacheHitRate(msgspec.Struct, frozen=True, kw_only=True):
    """The hit rate of one pool size and policy."""

    policy: str
    capacity: int
    """Blocks."""
    hit_rate: float
    """The cached blocks in requests' leading runs, divided by all blocks."""


def hit_rate(trace: Sequence[TraceLine], policy_name: str, capacity: int) -> CacheHitRate:
    """Return the hit rate of a pool of `capacity` blocks.

    Raises:
        ConfigError: no such policy, or no capacity.
    """
    if policy_name not in POLICY_NAMES:
        raise ConfigError(f"policy: {policy_name!r} is not one of {', '.join(POLICY_NAMES)}")
    if capacity < 1:
        raise ConfigError(f"capacity: {capacity} is less than one block; give 1 or more blocks")
    policy = POLICIES[POLICY_NAMES[policy_name]]()
    stored: set[BlockKey] = set()
    num_hits = num_blocks = 0
    for line in trace:
        keys = [hash_id.to_bytes(8, "big") for hash_id in line.hash_ids]
        num_blocks += len(keys)
        hits = 0
        for key in keys:
            if key not in stored:
                break
            hits += 1
        num_hits += hits
        _use(policy, stored, list(dict.fromkeys(keys[:capacity])), capacity)
    return CacheHitRate(
        policy=policy_name, capacity=capacity, hit_rate=round(num_hits / num_blocks, 6)
    )


def _use(
    policy: EvictionPolicy, stored: set[BlockKey], keys: list[BlockKey], capacity: int
) -> None:
    """Store a request's blocks without evicting one of them for another."""
    for key in keys:
        if key in stored:
            policy.hold(key)
    new = [key for key in keys if key not in stored]
    while len(stored) + len(new) > capacity:
        victim = policy.pop()
        if victim is None:
            break
        stored.discard(victim)
    stored.update(new)
    policy.release(keys)
    policy.access(keys)
