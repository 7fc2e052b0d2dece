"""Eviction policies: who goes first, and that nobody goes who may not."""

from __future__ import annotations

import random

import pytest

from mooncake.kvstore.eviction import (
    ATTENTION_SHARE,
    POLICIES,
    EvictionPolicy,
    LruPolicy,
    RankedPolicy,
    cost_aware_policy,
    length_aware_policy,
    lfu_policy,
)
from tests.support.kvstore.node_world import key, keys


def store(policy: EvictionPolicy, run: list[bytes]) -> None:
    policy.release(run)
    policy.access(run)


def drain(policy: EvictionPolicy) -> list[bytes]:
    gone = []
    while (victim := policy.pop()) is not None:
        gone.append(victim)
    return gone


@pytest.mark.parametrize("name", POLICIES)
def test_tails_of_one_run_go_before_its_head(name: str) -> None:
    policy = POLICIES[name]()
    store(policy, keys(1, 2, 3, 4))
    assert drain(policy) == keys(4, 3, 2, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_held_stays_and_what_is_forgotten_is_gone(name: str) -> None:
    policy = POLICIES[name]()
    store(policy, keys(1, 2, 3, 4))
    policy.hold(key(4))
    policy.hold(key(4))
    policy.forget(key(2))
    policy.forget(key(9))
    assert len(policy) == 2
    assert drain(policy) == keys(3, 1)
    policy.release([key(4)])
    assert len(policy) == 1
    assert drain(policy) == [key(4)]
    assert len(policy) == 0


def test_lru_evicts_the_run_used_longest_ago() -> None:
    policy = LruPolicy()
    store(policy, keys(1, 2))
    store(policy, keys(3, 4))
    policy.access(keys(1, 2))
    assert drain(policy) == keys(4, 3, 2, 1)


def test_an_access_to_unknown_keys_brings_nothing_in() -> None:
    for make in POLICIES.values():
        policy = make()
        policy.access(keys(1, 2))
        assert policy.pop() is None
        assert len(policy) == 0


def test_lfu_evicts_the_least_used_and_then_the_longest_unused() -> None:
    policy = lfu_policy()
    for number in (1, 2, 3):
        store(policy, keys(number))
    policy.access(keys(1))
    policy.access(keys(3))
    policy.access(keys(1))
    assert drain(policy) == keys(2, 3, 1)


def test_length_aware_evicts_the_deepest_of_those_equally_used() -> None:
    policy = length_aware_policy()
    store(policy, keys(1, 2, 3))
    store(policy, keys(4, 5, 6, 7))
    policy.access(keys(4))
    policy.access(keys(1, 2, 3))
    assert drain(policy) == keys(7, 6, 5, 3, 2, 4, 1)


def test_cost_aware_keeps_what_is_dear_to_recompute() -> None:
    """A long chain's tail is worth no more than a short chain of its length; its head far more."""
    policy = cost_aware_policy()
    long_run, short_run = keys(*range(10)), keys(20, 21, 22)
    store(policy, long_run)
    store(policy, short_run)
    order = drain(policy)
    # Three short blocks (ranks 1, 2, 3) fall among the last blocks of the long chain.
    assert order[:2] == [key(22), key(9)]
    assert order[-7:] == list(reversed(keys(*range(7))))


def test_cost_aware_counts_attention_over_what_stands_before() -> None:
    """With the same number of blocks behind them, deeper blocks cost more to compute again."""
    policy = cost_aware_policy()
    deep = keys(*range(2 * round(1 / ATTENTION_SHARE)))
    store(policy, deep)
    store(policy, keys(5000, 5001))
    assert drain(policy)[:3] == [key(5001), key(5000), deep[-1]]


def test_cost_aware_forgets_old_fame() -> None:
    """A block used often long ago goes once newer ones of less use have aged past it."""
    policy = cost_aware_policy()
    store(policy, keys(1))
    for _ in range(3):
        policy.access(keys(1))
    gone = []
    for number in range(10, 30):
        store(policy, keys(number))
        if len(policy) > 2:
            gone.append(policy.pop())
    assert key(1) in gone
    assert gone.index(key(1)) > 2


def test_outdated_heap_entries_do_not_pile_up() -> None:
    policy = RankedPolicy(lambda usage, _floor: (usage.accesses,))
    run = keys(*range(10))
    store(policy, run)
    for _ in range(1_000):
        policy.access(run)
    assert policy.num_heap_entries <= 2 * len(run) + 64
    assert drain(policy) == list(reversed(run))


@pytest.mark.parametrize("name", POLICIES)
def test_only_released_blocks_are_ever_chosen(name: str) -> None:
    """Against a plain set, under a few thousand random calls."""
    chance = random.Random(5)
    policy = POLICIES[name]()
    stored: set[bytes] = set()
    loose: set[bytes] = set()
    for _ in range(3_000):
        run = [key(n) for n in range(chance.randrange(20), chance.randrange(1, 24))]
        action = chance.choice(["release", "hold", "forget", "access", "pop"])
        if action == "release" and run:
            policy.release(run)
            loose.update(run)
            stored.update(run)
        elif action == "hold" and run:
            policy.hold(run[0])
            loose.discard(run[0])
        elif action == "forget" and run:
            policy.forget(run[0])
            loose.discard(run[0])
            stored.discard(run[0])
        elif action == "access":
            policy.access(run)
        elif action == "pop":
            victim = policy.pop()
            assert (victim in loose) if loose else victim is None
            loose.discard(victim or b"")
        assert len(policy) == len(loose)
    assert sorted(drain(policy)) == sorted(loose)


def test_lru_is_the_textbook_order_under_random_use() -> None:
    chance = random.Random(6)
    policy = LruPolicy()
    order: list[bytes] = []
    held: bytes | None = None
    for _ in range(4_000):
        first = chance.randrange(12)
        run = [key(n) for n in range(first, first + chance.randrange(1, 5))]
        touched = list(reversed(run))
        if chance.random() < 0.5:
            # A release brings in what is new; what has a place keeps it.
            policy.release(run)
            order += [k for k in touched if k not in order]
            held = None if held in run else held
        else:
            policy.access(run)
            touched = [k for k in touched if k in order]
            order = [k for k in order if k not in touched] + touched
        if held is None and order and chance.random() < 0.2:
            held = chance.choice(order)
            policy.hold(held)
        free = [k for k in order if k != held]
        assert len(policy) == len(free)
        if chance.random() < 0.4:
            assert policy.pop() == (free[0] if free else None)
            order = [k for k in order if k not in free[:1]]


def test_lru_keeps_the_place_of_what_is_held() -> None:
    policy = LruPolicy()
    policy.release(keys(1))
    policy.release(keys(2))
    policy.release(keys(3))
    policy.hold(key(1))
    policy.release(keys(1))
    assert policy.pop() == key(1)
    policy.hold(key(2))
    assert policy.pop() == key(3)
    assert policy.pop() is None
    policy.release(keys(4))
    policy.release(keys(2))
    assert [policy.pop(), policy.pop()] == keys(2, 4), "its turn had come before"
