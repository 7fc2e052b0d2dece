"""The DRAM tier and its allocator: states of blocks, and that misuse is caught."""

from __future__ import annotations

import pytest

from mooncake.base import InternalError
from mooncake.base.rights import tenant_key
from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.eviction import LruPolicy
from mooncake.kvstore.storage.dram import DramTier, UniformAllocator
from mooncake.kvstore.storage.tenants import TenantEviction
from tests.support.kvstore.node_world import key, keys


def tier_of(num_blocks: int, **settings) -> DramTier:
    return DramTier(KvStoreConfig(high_watermark=1.0, **settings), num_blocks, 100)


def test_the_allocator_gives_every_piece_once() -> None:
    allocator = UniformAllocator(3, 100)
    assert [allocator.allocate() for _ in range(4)] == [0, 100, 200, None]
    allocator.free(100)
    assert allocator.num_free == 1
    assert allocator.allocate() == 100


@pytest.mark.parametrize("offset", [0, 50, 150, 300, -100])
def test_the_allocator_takes_back_only_what_is_out(offset: int) -> None:
    allocator = UniformAllocator(3, 100)
    taken = allocator.allocate()
    assert taken == 0
    allocator.free(taken)
    with pytest.raises(InternalError, match=str(offset)):
        allocator.free(offset)


def test_a_block_goes_from_free_to_writing_to_stored_to_evicted() -> None:
    tier = tier_of(2)
    granted, evicted = tier.reserve(keys(1, 2), "")
    assert (granted, evicted) == ({key(1): 0, key(2): 100}, [])
    assert (tier.num_free, tier.num_writing, tier.num_stored) == (0, 2, 0)
    assert tier.is_known(key(1))
    assert not tier.has(key(1))
    assert tier.leading(keys(1)) == 0
    tier.commit(keys(1))
    assert (tier.num_writing, tier.num_stored) == (1, 1)
    assert tier.stored_keys() == keys(1)
    granted, evicted = tier.reserve(keys(3, 4), "")
    assert (granted, evicted) == ({key(3): 0}, keys(1))
    tier.check_integrity()


def test_memory_that_rests_counts_as_held_until_it_is_used_again() -> None:
    tier = tier_of(2)
    tier.reserve(keys(1, 2), "")
    offset = tier.abandon(key(1), rests=True)
    tier.abandon(key(2))
    assert (tier.num_free, tier.num_quarantined) == (1, 1)
    tier.check_integrity()
    tier.reuse([offset])
    assert (tier.num_free, tier.num_quarantined) == (2, 0)
    tier.check_integrity()


def test_whole_blocks_are_neither_committed_again_nor_abandoned() -> None:
    tier = tier_of(1)
    tier.reserve(keys(1), "")
    tier.commit(keys(1))
    with pytest.raises(InternalError, match="committed twice"):
        tier.commit(keys(1))
    with pytest.raises(InternalError, match="cannot be abandoned"):
        tier.abandon(key(1))


def test_a_key_twice_in_one_pin_is_pinned_twice() -> None:
    tier = tier_of(1)
    tier.reserve(keys(1), "")
    tier.commit(keys(1))
    tier.pin(keys(1, 1))
    assert (tier.num_pinned, tier.pin_counts()) == (1, {key(1): 2})
    tier.unpin(keys(1))
    assert tier.reserve(keys(2), "") == ({}, [])
    tier.unpin(keys(1))
    assert tier.reserve(keys(2), "") == ({key(2): 0}, keys(1))
    tier.check_integrity()


@pytest.mark.parametrize("damage", ["leak", "share", "count", "pin"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    tier = tier_of(3)
    tier.reserve(keys(1, 2), "")
    tier.commit(keys(1, 2))
    tier.check_integrity()
    blocks = vars(tier)["_blocks"]
    if damage == "leak":
        vars(tier)["_allocator"].allocate()
    elif damage == "share":
        blocks[key(1)].offset = blocks[key(2)].offset
    elif damage == "count":
        blocks[key(1)].whole = False
    else:
        blocks[key(1)].pins += 1
    with pytest.raises(AssertionError):
        tier.check_integrity()


def test_a_quota_below_one_block_admits_nothing() -> None:
    tier = tier_of(3, tenant_quota_bytes={"a": 99})
    assert tier.reserve(keys(1), "a") == ({}, [])
    assert tier.num_free == 3


def test_a_tenants_count_follows_what_is_given_up_and_evicted() -> None:
    eviction = TenantEviction(LruPolicy, {"a": 2})
    eviction.charge(key(1), "a")
    eviction.charge(key(2), "a")
    eviction.charge(key(3), "b")
    assert eviction.is_full(key(9), "a")
    assert not eviction.is_full(key(9), "b")
    eviction.forget(key(1))
    assert (eviction.use()["a"][0], eviction.is_full(key(9), "a")) == (1, False)
    eviction.release(keys(3, 2))
    assert eviction.pop("a") == key(2)
    assert eviction.use()["a"][0] == 0
    assert eviction.pop("a") is None
    assert eviction.pop() == key(3)
    eviction.check_integrity()


def test_a_tenants_own_order_follows_use_and_holds() -> None:
    eviction = TenantEviction(LruPolicy, {"a": 3, "b": 3})
    for number, tenant in ((1, "a"), (2, "b"), (3, "a"), (4, "b"), (5, "a")):
        eviction.charge(key(number), tenant)
        eviction.release(keys(number))
    eviction.access(keys(1))
    eviction.hold(key(3))
    assert eviction.pop("a") == key(5)
    assert eviction.pop() == key(2)
    assert (eviction.use()["a"][0], eviction.use()["b"][0]) == (2, 1)
    assert eviction.pop("a") == key(1)
    assert eviction.pop("a") is None, "what is held stays"
    eviction.check_integrity()


def test_clients_of_a_tenant_without_a_quota_have_the_usual_one() -> None:
    """It bounds what they store, not what engines keep for the tenant; others are not touched."""
    tier = tier_of(64, client_quota_share=0.25)
    engines = [key(n) for n in range(20)]
    tier.reserve(engines, "acme")
    tier.commit(engines)
    clients = [tenant_key(key(n), "acme") for n in range(20)]
    granted, evicted = tier.reserve(clients, "acme")
    assert (list(granted), evicted) == (clients[:16], [])
    tier.commit(clients[:16])
    assert tier.tenant_use() == {"acme": (16, 16)}
    granted, evicted = tier.reserve(clients[16:], "acme")
    assert list(granted) == clients[16:]
    assert len(evicted) == 4
    assert set(evicted) < set(clients[:16]), "its own blocks make room"
    named = tier_of(64, client_quota_share=0.25, tenant_quota_bytes={"acme": 30 * 100})
    assert len(named.reserve(clients, "acme")[0]) == 20, "a quota of its own counts instead"
    for each in [*clients[:16], *clients[16:]]:
        if tier.has(each):
            tier.discard(each)
        elif tier.is_known(each):
            tier.abandon(each)
    assert tier.tenant_use() == {}, "nothing is remembered of a tenant that has nothing"
    tier.check_integrity()
