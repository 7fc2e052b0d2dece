"""Quotas of tenants on the disks: shared out over them, kept at a restart, no way around them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import Tier
from mooncake.base.pool_messages import TenantUse
from mooncake.kvstore.eviction import LruPolicy
from mooncake.kvstore.storage.disk_tier import DiskTier
from mooncake.sim.world.disk import SimMedium
from tests.support.kvstore.node_world import BLOCK, NodeWorld, keys, worker

P = worker("prefill-0")


def world_of(quota_blocks: int, disks: int = 1, num_blocks: int = 4) -> NodeWorld:
    """A node that writes every block down at once."""
    world = NodeWorld(
        num_blocks, media=[SimMedium() for _ in range(disks)], ssd_blocks=6, ssd_write_at=0.0,
        ssd_min_uses=1, high_watermark=1.0, tenant_ssd_quota_bytes={"t": quota_blocks * BLOCK},
    )  # fmt: skip
    world.tick(1.0)
    return world


def put(world: NodeWorld, numbers: range, tenant: str = "") -> None:
    for number in numbers:
        world.put(P, keys(number), tenant)
        world.tick(world.now + 1)


def test_a_tenant_at_its_quota_overwrites_its_own_blocks() -> None:
    world = world_of(2)
    put(world, range(3))
    put(world, range(10, 14), "t")
    assert world.on_ssd == set(keys(0, 1, 2, 12, 13))
    put(world, range(3, 6))
    assert world.on_ssd == set(keys(2, 3, 4, 5, 12, 13)), "and others the oldest of all"


def test_a_node_says_what_its_tenants_have() -> None:
    world = NodeWorld(
        4, media=[SimMedium() for _ in range(2)], ssd_blocks=6, ssd_write_at=0.0, ssd_min_uses=1,
        high_watermark=1.0, tenant_ssd_quota_bytes={"t": 5 * BLOCK},
        tenant_quota_bytes={"t": 3 * BLOCK, "idle": 2 * BLOCK},
    )  # fmt: skip
    world.tick(1.0)
    put(world, range(1))
    put(world, range(10, 14), "t")
    told = world.node.state().tenants
    assert told == (
        TenantUse("idle", Tier.DRAM, 0, 2), TenantUse("t", Tier.DRAM, 3, 3),
        TenantUse("t", Tier.SSD, 4, 5),
    )  # fmt: skip


def test_a_tenant_without_ssd_quota_does_not_delay_others() -> None:
    world = world_of(0)
    put(world, range(10, 12), "t")
    put(world, range(2))
    assert world.on_ssd == set(keys(0, 1))


def test_a_tenant_whose_disk_fails_does_not_delay_others() -> None:
    """Its one block may lie on the second disk only; what others have goes to the first."""
    world = world_of(1, disks=2, num_blocks=16)
    world.media[1].refuses_writes = True
    put(world, range(10, 12), "t")
    assert world.node.counters["ssd_write_errors"] > 0
    put(world, range(4))
    assert world.on_ssd == set(keys(0, 1, 2, 3))


def test_a_restart_with_a_smaller_quota_keeps_the_newest() -> None:
    world = world_of(4)
    put(world, range(10, 14), "t")
    assert world.on_ssd == set(keys(10, 11, 12, 13))
    world.config = type(world.config)(
        dram_bytes=world.config.dram_bytes, ssd=world.config.ssd,
        tenant_ssd_quota_bytes={"t": 2 * BLOCK}, checksums=False,
    )  # fmt: skip
    world.boot()
    world.tick(world.now + 1)
    assert world.on_ssd == set(keys(12, 13))
    world.node.check_integrity()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(0, 300))
def test_a_quota_is_shared_out_whole(num_slots: list[int], quota: int) -> None:
    tier = DiskTier(num_slots, LruPolicy, {"t": quota})
    for disk in range(len(num_slots)):
        tier.open_disk(disk, [])
    held = 0
    for number in range(quota + sum(num_slots) + 1):
        reserved, evicted = tier.reserve([(number.to_bytes(4, "big"), "t", None)], 0.0)
        assert not evicted, "what is being written is not evicted"
        held += len(reserved)
        tier.check_integrity()
    assert held <= min(quota, sum(num_slots))
    assert (held > 0) == (quota > 0), "on whichever disk its part lies"
