"""Blocks that are kept for a time: limits of a tenant and of all, and the end of their time."""

from __future__ import annotations

from mooncake.kvstore.storage.tenants import SLOT_S, KeptBlocks
from tests.support.kvstore.node_world import key, keys


def table(most: int = 8, of_tenant: int = 4, **others: int) -> KeptBlocks:
    return KeptBlocks(most, lambda tenant: others.get(tenant, of_tenant))


def test_blocks_end_in_time_and_not_before() -> None:
    kept = table()
    assert kept.keep(keys(1, 2), "t", 12.0) == (keys(2, 1), [])
    assert kept.next_s is not None
    assert 12.0 <= kept.next_s <= 12.0 + SLOT_S
    assert kept.expire(11.9) == []
    assert set(kept.expire(kept.next_s)) == set(keys(1, 2))
    assert (len(kept), kept.next_s) == (0, None)
    kept.check_integrity()


def test_another_request_makes_the_time_longer_and_none_makes_it_shorter() -> None:
    kept = table()
    kept.keep(keys(1, 2), "t", 3600.0)
    assert kept.keep(keys(1, 2, 3), "t", 300.0) == (keys(3), [])
    assert kept.expire(400.0) == keys(3)
    kept.keep(keys(1), "t", 5000.0)
    assert kept.expire(3700.0) == keys(2)
    assert key(1) in kept
    kept.check_integrity()


def test_the_oldest_chain_of_the_tenant_makes_room_and_the_tail_goes_before_the_head() -> None:
    kept = table(of_tenant=4)
    kept.keep(keys(1, 2), "t", 300.0)
    kept.keep(keys(3, 4), "t", 300.0)
    assert kept.keep(keys(5), "t", 300.0) == (keys(5), keys(2))
    kept.keep(keys(1), "t", 300.0)  # used again
    assert kept.keep(keys(6, 7), "t", 300.0)[1] == keys(4, 3)
    kept.check_integrity()


def test_of_a_chain_that_is_too_long_the_head_is_kept() -> None:
    kept = table(of_tenant=3)
    new, displaced = kept.keep(keys(*range(10)), "t", 300.0)
    assert (set(new), displaced) == (set(keys(0, 1, 2)), [])


def test_tenants_share_what_all_may_have() -> None:
    kept = table(most=6, of_tenant=5)
    kept.keep(keys(0, 1, 2, 3, 4), "much", 300.0)
    assert kept.keep(keys(10, 11, 12), "other", 300.0)[1] == keys(4, 3), "of the one with most"
    new, displaced = kept.keep(keys(20), "third", 300.0)
    assert new == keys(20)
    assert len(displaced) == 1
    kept.check_integrity()


def test_a_tenant_that_may_keep_nothing_keeps_nothing() -> None:
    kept = table(none=0)
    assert kept.keep(keys(1), "none", 300.0) == ([], [])
    assert table(most=0).keep(keys(1), "t", 300.0) == ([], [])
    assert not kept.forget(key(1))


def test_many_tenants_share_evenly() -> None:
    kept = KeptBlocks(10, lambda tenant: 10)
    for tenant in range(4):
        kept.keep(keys(*range(10 * tenant, 10 * tenant + 10)), f"t{tenant}", 300.0)
        kept.check_integrity()
    left = [sum(10 * t <= n < 10 * t + 10 for n in range(40) if key(n) in kept) for t in range(4)]
    assert (sum(left), max(left) - min(left)) == (10, 1)
    assert all(key(10 * tenant) in kept for tenant in range(4)), "the heads"
