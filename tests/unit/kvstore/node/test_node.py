"""The kvstore node, story by story: puts, pins, eviction, lost workers, talk with the gateway."""

from __future__ import annotations

import pytest

from mooncake.base import (
    AbortTask,
    BlockEvents,
    ConfigError,
    Drain,
    LoadReport,
    PeerLost,
    PinBlocks,
    PinGranted,
    PutEnd,
    PutGranted,
    PutStart,
    Unpin,
    Welcome,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.cluster_mode import ClusterMode
from mooncake.base.messages import DoubtPeers, NextLife, Restart, WhoAreYou
from mooncake.base.pool_messages import BlocksFound, FindBlocks
from mooncake.kvstore.node.blocks import COUNTERS
from mooncake.kvstore.node.node import RESTART_S
from mooncake.kvstore.node.peers import MAX_REMEMBERED
from mooncake.transfer.grants import LOOK_AGAIN_S, Fence
from tests.support.kvstore.node_world import (
    BLOCK,
    GATEWAY,
    LAYOUT,
    STORE,
    NodeWorld,
    key,
    keys,
    worker,
)

WRITER, READER, OTHER = worker("prefill-0"), worker("decode-0"), worker("prefill-1")


# ---------------------------------------------------------------- puts


def test_a_put_block_is_readable_with_its_bytes() -> None:
    world = NodeWorld()
    assert world.put(WRITER, keys(1, 2, 3)) == keys(1, 2, 3)
    pinned = world.pin(READER, keys(1, 2, 3))
    assert pinned.num_blocks == 3
    assert pinned.places.layer_stride == LAYOUT.slice_bytes
    for block, offset in zip(keys(1, 2, 3), pinned.places.offsets, strict=True):
        assert world.holds(pinned.places, offset, block)


def test_a_chain_put_at_once_lies_together() -> None:
    grant = NodeWorld().start(WRITER, keys(1, 2, 3))
    assert grant.places.offsets == [0, BLOCK, 2 * BLOCK]
    assert grant.store == STORE


def test_a_block_is_invisible_until_its_writer_ends_the_put() -> None:
    world = NodeWorld()
    grant = world.start(WRITER, keys(1, 2))
    assert world.pin(READER, keys(1, 2)).num_blocks == 0
    assert world.inventory == set()
    world.end(WRITER, grant, written=keys(1))
    assert world.pin(READER, keys(1, 2)).num_blocks == 1
    assert world.inventory == {key(1)}
    world.end(WRITER, grant, written=keys(2))
    assert world.pin(READER, keys(1, 2)).num_blocks == 2


def test_stored_blocks_and_those_of_a_live_writer_are_not_granted_again() -> None:
    world = NodeWorld()
    world.put(WRITER, keys(1))
    world.start(OTHER, keys(1, 2))
    assert world.start(WRITER, keys(1, 2, 3, 3)).keys == keys(3)


def test_dropped_blocks_are_free_at_once_and_can_be_put_again() -> None:
    world = NodeWorld(num_blocks=2)
    grant = world.start(WRITER, keys(1, 2))
    world.end(WRITER, grant, written=keys(2), dropped=keys(1))
    assert world.inventory == {key(2)}
    assert world.start(OTHER, keys(1)).places.offsets == [grant.places.offsets[0]]
    assert world.node.counters["blocks_dropped"] == 1


def test_the_end_of_an_unknown_put_or_of_keys_never_granted_changes_nothing() -> None:
    world = NodeWorld()
    world.handle(PutEnd(writer=WRITER, ticket=99, written=keys(1), dropped=keys(2)))
    grant = world.start(WRITER, keys(1))
    world.handle(PutEnd(writer=OTHER, ticket=grant.ticket, written=keys(1)))
    world.end(WRITER, grant, written=keys(5), dropped=keys(6))
    assert world.inventory == set()
    world.end(WRITER, grant)
    assert world.inventory == {key(1)}
    assert world.node.counters["stray_messages"] == 2


def test_a_repeated_start_is_answered_with_the_same_places() -> None:
    world = NodeWorld()
    message = PutStart(writer=WRITER, ticket=7, keys=keys(1, 2, 3))
    first = world.answer(message, PutGranted)
    assert world.answer(message, PutGranted) == first
    world.handle(PutEnd(writer=WRITER, ticket=7, written=keys(1)))
    assert world.answer(message, PutGranted).keys == keys(2, 3)
    world.handle(PutEnd(writer=WRITER, ticket=7, dropped=keys(2, 3)))
    assert world.answer(message, PutGranted).keys == [], "an ended put never opens again"


# ---------------------------------------------------------------- room


def test_the_run_used_longest_ago_makes_room_tail_first() -> None:
    world = NodeWorld(num_blocks=6, high_watermark=1.0)
    world.put(WRITER, keys(1, 2, 3))
    world.put(WRITER, keys(11, 12, 13))
    world.unpin(READER, world.pin(READER, keys(1, 2, 3)))
    world.put(WRITER, keys(21, 22))
    assert world.inventory == {*keys(1, 2, 3), key(11), *keys(21, 22)}
    assert world.node.counters["blocks_evicted"] == 2


def test_a_run_put_on_top_of_a_stored_head_counts_as_one_use_of_all_of_it() -> None:
    world = NodeWorld(num_blocks=5, high_watermark=1.0)
    world.put(WRITER, keys(1, 2))
    world.put(WRITER, keys(11))
    assert world.put(WRITER, keys(1, 2, 3)) == keys(3)
    world.put(WRITER, keys(21, 22, 23))
    assert world.inventory == {*keys(1, 2), *keys(21, 22, 23)}


def test_a_put_in_several_ends_keeps_its_head_longest() -> None:
    world = NodeWorld(num_blocks=4, high_watermark=1.0)
    grant = world.start(WRITER, keys(1, 2, 3, 4))
    world.end(WRITER, grant, written=keys(1, 2))
    world.end(WRITER, grant, written=keys(3, 4))
    world.put(WRITER, keys(11, 12))
    assert world.inventory == {*keys(1, 2), *keys(11, 12)}


def test_a_put_of_what_is_all_here_is_a_use_of_it() -> None:
    world = NodeWorld(num_blocks=2, high_watermark=1.0)
    world.put(WRITER, keys(1))
    world.put(WRITER, keys(2))
    assert world.put(WRITER, keys(1)) == []
    world.put(WRITER, keys(3))
    assert world.inventory == {key(1), key(3)}


def test_policies_that_count_uses_count_a_put_of_what_is_all_here() -> None:
    world = NodeWorld(num_blocks=2, high_watermark=1.0, eviction="lfu")
    world.put(WRITER, keys(1))
    world.put(WRITER, keys(1))
    world.put(WRITER, keys(2))
    world.put(WRITER, keys(3))
    assert world.inventory == {key(1), key(3)}


def test_a_pinned_block_asked_for_again_stays_pinned() -> None:
    world = NodeWorld(num_blocks=2, high_watermark=1.0)
    world.put(WRITER, keys(1))
    world.pin(READER, keys(1))
    assert world.put(WRITER, keys(1, 2)) == keys(2)
    assert world.put(WRITER, keys(11, 12)) == keys(11)
    assert world.inventory == {key(1), key(11)}


def test_a_run_does_not_evict_its_own_head() -> None:
    world = NodeWorld(num_blocks=3, high_watermark=1.0)
    world.put(WRITER, keys(1, 2))
    assert world.put(WRITER, keys(1, 2, 3, 4, 5)) == keys(3)
    assert world.inventory == set(keys(1, 2, 3))
    assert world.node.counters["blocks_refused"] == 2


def test_pinned_and_half_written_blocks_are_never_evicted() -> None:
    world = NodeWorld(num_blocks=4, high_watermark=1.0)
    world.put(WRITER, keys(1, 2))
    pinned = world.pin(READER, keys(1))
    world.start(OTHER, keys(3))
    assert world.put(WRITER, keys(11, 12, 13)) == keys(11, 12)
    assert world.inventory == {key(1), *keys(11, 12)}
    world.unpin(READER, pinned)
    assert world.put(WRITER, keys(21, 22, 23, 24)) == keys(21, 22, 23)


def test_a_read_may_take_a_day_and_its_blocks_stay_where_they_are() -> None:
    world = NodeWorld(num_blocks=8)
    world.put(WRITER, keys(1, 2))
    pinned = world.pin(READER, keys(1, 2))
    places = world.node.region.buffer.tobytes()
    offsets = pinned.places.offsets
    for hour in range(24):
        world.put(WRITER, keys(*range(100 * hour + 10, 100 * hour + 30)))
        world.tick(world.now + 3600)
    for offset in offsets:
        end = offset + BLOCK
        assert world.node.region.buffer[offset:end].tobytes() == places[offset:end]
    world.unpin(READER, pinned)
    world.put(WRITER, keys(*range(5000, 5008)))
    assert not world.inventory & set(keys(1, 2)), "then they go like any other"


def test_frequent_lookups_of_all_blocks_refuse_no_put() -> None:
    world = NodeWorld(num_blocks=8)
    for number in range(40):
        question = FindBlocks(asker=READER, ticket=number, keys=keys(*range(40)))
        world.answer(question, BlocksFound)
        assert world.put(WRITER, keys(number)) == keys(number), "there is room, as ever"
        world.tick(world.now + 0.1)
    assert world.node.counters["blocks_refused"] == 0


def test_above_the_watermark_blocks_go_ahead_of_need() -> None:
    world = NodeWorld(num_blocks=20, high_watermark=0.8, evict_fraction=0.2)
    world.put(WRITER, keys(*range(16)))
    world.tick(0.0)
    assert len(world.inventory) == 16
    world.put(WRITER, keys(99))
    world.tick(0.1)
    assert world.inventory == {*keys(*range(11)), key(99)}


def test_the_watermark_evicts_no_more_than_it_may() -> None:
    world = NodeWorld(num_blocks=4, high_watermark=0.5, evict_fraction=0.5)
    world.put(WRITER, keys(1, 2, 3))
    world.pin(READER, keys(1, 2))
    world.tick(0.0)
    assert world.inventory == set(keys(1, 2))


def test_a_tenant_at_its_quota_evicts_its_own_blocks_only() -> None:
    world = NodeWorld(num_blocks=8, tenant_quota_bytes={"a": 2 * BLOCK}, high_watermark=1.0)
    world.put(WRITER, keys(1, 2, 3))
    world.put(WRITER, keys(11, 12), tenant="a")
    assert world.put(WRITER, keys(21), tenant="a") == keys(21)
    assert world.inventory == {*keys(1, 2, 3), key(11), key(21)}
    pinned = world.pin(READER, keys(11)), world.pin(READER, keys(21))
    assert world.start(WRITER, keys(31), tenant="a").keys == []
    assert world.start(WRITER, keys(32), tenant="b").keys == keys(32), "no quota, no limit"
    world.unpin(READER, pinned[0])
    assert world.start(WRITER, keys(31), tenant="a").keys == keys(31)


def test_a_byte_limit_that_holds_no_block_is_a_start_up_error() -> None:
    with pytest.raises(ConfigError, match="dram_bytes"):
        NodeWorld(num_blocks=0)


# ---------------------------------------------------------------- pins


def test_a_pin_covers_the_leading_blocks_that_are_there() -> None:
    world = NodeWorld()
    world.put(WRITER, keys(1, 2, 4))
    assert world.pin(READER, keys(1, 2, 3, 4)).num_blocks == 2
    assert world.pin(READER, keys(3, 1)).num_blocks == 0
    counters = world.node.counters
    assert (counters["pins"], counters["blocks_hit"], counters["blocks_missed"]) == (2, 2, 4)


def test_a_repeated_pin_pins_once() -> None:
    world = NodeWorld(num_blocks=1)
    world.put(WRITER, keys(1))
    message = PinBlocks(reader=READER, ticket=5, keys=keys(1))
    assert world.answer(message, PinGranted) == world.answer(message, PinGranted)
    world.handle(Unpin(reader=READER, ticket=5))
    world.handle(Unpin(reader=READER, ticket=5))
    assert world.answer(message, PinGranted).num_blocks == 0, "an ended pin never opens again"
    assert world.put(WRITER, keys(2)) == keys(2)


def test_a_block_stays_until_its_last_reader_is_done() -> None:
    world = NodeWorld(num_blocks=1)
    world.put(WRITER, keys(1))
    first, second = world.pin(READER, keys(1)), world.pin(OTHER, keys(1))
    world.unpin(READER, first)
    assert world.put(WRITER, keys(2)) == []
    world.unpin(READER, second)
    assert world.put(WRITER, keys(2)) == [], "another worker cannot end this reader's pin"
    world.unpin(OTHER, second)
    assert world.put(WRITER, keys(2)) == keys(2)


def test_one_worker_can_open_so_many_tickets_and_no_more() -> None:
    world = NodeWorld(max_tickets_per_worker=2)
    world.put(WRITER, keys(1, 2))
    pinned = world.pin(READER, keys(1))
    assert world.start(READER, keys(5)).keys == keys(5)
    assert world.pin(READER, keys(1)).num_blocks == 0
    assert world.start(READER, keys(6)).keys == []
    assert world.pin(OTHER, keys(1)).num_blocks == 1
    world.unpin(READER, pinned)
    assert world.pin(READER, keys(1)).num_blocks == 1


# ---------------------------------------------------------------- lost workers


def test_memory_of_a_lost_writer_rests_before_it_is_used_again() -> None:
    world = NodeWorld(num_blocks=2, quarantine_s=5.0)
    world.transfer.usual_fence = Fence.UNKNOWN
    grant = world.start(WRITER, keys(1, 2))
    world.handle(PeerLost(worker=WRITER))
    assert world.start(OTHER, keys(1, 2)).keys == []
    wake = world.tick(4.9)
    assert wake is not None
    assert wake <= 5.0
    assert world.start(OTHER, keys(1, 2)).keys == []
    world.tick(5.0)
    assert world.start(OTHER, keys(1, 2)).keys == keys(1, 2)
    world.end(WRITER, grant)
    assert world.inventory == set(), "what a lost writer says of its put counts no more"
    assert world.node.counters["blocks_quarantined"] == 2
    assert world.node.counters["grants_reclaimed"] == 1


def test_fenced_memory_of_a_lost_writer_is_used_again_at_once() -> None:
    world = NodeWorld(num_blocks=2, quarantine_s=1000.0)
    grant = world.start(WRITER, keys(1, 2))
    world.transfer.fences[grant.places.grant] = Fence.OPEN
    world.handle(PeerLost(worker=WRITER))
    world.tick(900.0)
    assert world.start(OTHER, keys(1, 2)).keys == [], "the writer has a copy in hand"
    world.transfer.fences[grant.places.grant] = Fence.CLOSED
    world.tick(900.0 + LOOK_AGAIN_S)
    again = world.start(OTHER, keys(1, 2))
    assert again.keys == keys(1, 2)
    assert again.places.grant != grant.places.grant


def test_a_grant_is_good_until_its_put_has_ended() -> None:
    world = NodeWorld()
    grant = world.start(WRITER, keys(1, 2))
    permit = world.transfer.grants.permit(grant.places.grant)
    world.end(WRITER, grant, written=keys(1), dropped=[])
    assert permit.withdrawn is None
    world.end(WRITER, grant, written=keys(2))
    assert permit.withdrawn is not None
    assert world.transfer.grants.num_open == 0


def test_what_a_lost_writer_had_finished_stays() -> None:
    world = NodeWorld()
    grant = world.start(WRITER, keys(1, 2))
    world.end(WRITER, grant, written=keys(1))
    world.handle(PeerLost(worker=WRITER))
    assert world.pin(READER, keys(1, 2)).num_blocks == 1


def test_pins_of_a_lost_reader_are_reclaimed() -> None:
    world = NodeWorld(num_blocks=1)
    world.put(WRITER, keys(1))
    world.pin(READER, keys(1))
    world.handle(PeerLost(worker=READER))
    assert world.put(WRITER, keys(2)) == keys(2)
    assert world.node.counters["pins_reclaimed"] == 1


def test_a_lost_epoch_gets_nothing_any_more_but_its_successor_does() -> None:
    world = NodeWorld()
    world.put(OTHER, keys(1))
    world.handle(PeerLost(worker=WRITER))
    assert world.start(WRITER, keys(5)).keys == []
    assert world.pin(WRITER, keys(1)).num_blocks == 0
    reborn = worker(WRITER.worker_id, "e2")
    assert world.start(reborn, keys(5)).keys == keys(5)
    assert world.pin(reborn, keys(1)).num_blocks == 1


def test_losing_one_epoch_leaves_the_other_alone() -> None:
    world = NodeWorld()
    reborn = worker(WRITER.worker_id, "e2")
    grant = world.start(reborn, keys(1))
    world.handle(PeerLost(worker=WRITER))
    world.end(reborn, grant)
    assert world.inventory == {key(1)}


def test_a_put_that_never_ends_is_counted_but_not_taken_away() -> None:
    world = NodeWorld(num_blocks=1, put_timeout_s=10.0)
    grant = world.start(WRITER, keys(1))
    world.tick(9.0)
    assert world.node.counters["puts_overdue"] == 0
    world.tick(1_000.0)
    assert world.node.counters["puts_overdue"] == 1
    assert world.start(OTHER, keys(1, 2)).keys == []
    world.end(WRITER, grant)
    world.tick(2_000.0)
    assert world.inventory == {key(1)}
    assert world.node.counters["puts_overdue"] == 1


def test_a_put_that_ended_in_time_is_not_overdue() -> None:
    world = NodeWorld(put_timeout_s=10.0)
    world.put(WRITER, keys(1))
    grant = world.start(WRITER, keys(2))
    world.handle(PeerLost(worker=WRITER))
    world.tick(1_000.0)
    world.end(WRITER, grant)
    assert world.node.counters["puts_overdue"] == 0


def test_what_is_remembered_of_the_past_is_bounded() -> None:
    world = NodeWorld()
    for number in range(MAX_REMEMBERED + 50):
        world.node.handle(Unpin(reader=READER, ticket=number), 0.0)
        world.node.handle(PeerLost(worker=worker("old", f"e{number}")), 0.0)
    world.put(WRITER, keys(1))
    newest = PinBlocks(reader=READER, ticket=MAX_REMEMBERED + 49, keys=keys(1))
    assert world.answer(newest, PinGranted).num_blocks == 0
    forgotten = PinBlocks(reader=READER, ticket=3, keys=keys(1))
    assert world.answer(forgotten, PinGranted).num_blocks == 1


# ---------------------------------------------------------------- the gateway


def test_it_says_hello_with_its_size_until_welcomed_then_tells_all_it_holds() -> None:
    world = NodeWorld(num_blocks=5, welcomed=False)
    world.put(WRITER, keys(1, 2))
    assert world.tick(0.0) == 0.5
    world.tick(0.5)
    hellos = [m for address, m in world.channel.sent if isinstance(m, WorkerHello)]
    assert [(hello.num_blocks, hello.block_bytes) for hello in hellos] == [(5, BLOCK)] * 2
    assert not any(isinstance(message, BlockEvents) for _, message in world.channel.sent)
    world.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
    assert world.inventory == set(keys(1, 2))


def test_a_snapshot_leaves_out_what_is_not_whole() -> None:
    world = NodeWorld()
    world.put(WRITER, keys(1))
    world.start(WRITER, keys(2))
    world.handle(Welcome(gateway=GATEWAY, kvstore=None, send_snapshot=True))
    assert world.inventory == {key(1)}


def test_the_load_report_adds_up() -> None:
    world = NodeWorld(num_blocks=8, quarantine_s=100.0)
    world.transfer.usual_fence = Fence.UNKNOWN
    world.put(WRITER, keys(1, 2, 3))
    world.pin(READER, keys(1, 2))
    world.start(WRITER, keys(4))
    world.start(OTHER, keys(5))
    world.handle(PeerLost(worker=OTHER))
    load = world.load()
    assert (load.num_total_blocks, load.num_free_blocks, load.num_cached_blocks) == (8, 3, 3)
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert load.counters == world.node.counters
    assert load.counters.keys() == COUNTERS.keys()
    assert load.counters["blocks_put"] == 3
    assert load.counters["bytes_put"] == 3 * BLOCK
    reports = [m for address, m in world.channel.sent if isinstance(m, LoadReport)]
    assert reports[-1].worker == STORE


def test_a_draining_node_takes_no_new_blocks_but_gives_those_it_has() -> None:
    world = NodeWorld()
    grant = world.start(WRITER, keys(1))
    world.handle(Drain())
    world.end(WRITER, grant)
    assert world.put(WRITER, keys(2)) == []
    assert world.pin(READER, keys(1)).num_blocks == 1


def test_messages_for_others_are_ignored() -> None:
    assert NodeWorld().handle(AbortTask(request_id="r", attempt=1)) == []


def test_the_gateway_is_asked_about_holders_of_old_pins_and_grants() -> None:
    world = NodeWorld(doubt_interval_s=5.0)
    world.put(WRITER, keys(1))

    def doubted() -> list[list[WorkerRef]]:
        return [m.peers for _, m in world.channel.sent if isinstance(m, DoubtPeers)]

    world.tick(0.0)
    world.pin(READER, keys(1))
    world.tick(4.9)
    quick = world.start(WRITER, keys(2))
    world.tick(5.0)
    assert doubted() == [[READER]]
    world.end(WRITER, quick)
    world.tick(10.0)
    assert doubted() == [[READER], [READER]]
    world.handle(PeerLost(worker=READER))
    world.tick(20.0)
    assert len(doubted()) == 2


def test_a_new_gateway_is_told_of_the_node_and_its_blocks() -> None:
    world = NodeWorld()
    world.put(WRITER, keys(1))
    newer = worker("gateway", "g2")
    world.handle(WhoAreYou(gateway=newer))
    world.put(WRITER, keys(2))
    world.tick(0.1)
    address, hello = world.channel.sent[-1]
    assert (address, type(hello)) == (newer.address, WorkerHello)


# ---------------------------------------------------------------- new weights


def test_a_node_that_is_to_come_back_waits_for_readers_but_not_for_ever() -> None:
    """A client that never unpins must not hold up a cluster that waits for new weights."""
    world = NodeWorld()
    world.put(WRITER, keys(1))
    pinned = world.pin(READER, keys(1))
    life = NextLife(mode=ClusterMode(1, "gateway"))
    world.handle(Restart(worker=WorkerRef("kv-0", "earlier", "a"), mode=ClusterMode(9, "gateway")))
    world.tick(world.now + 2 * RESTART_S)
    begin_s = world.now
    for second in range(int(RESTART_S)):
        world.tick(begin_s + second)
        world.handle(Restart(worker=world.store, mode=ClusterMode(1, "gateway")))
        assert world.node.next_life is None, "a reader reads"
    world.tick(begin_s + RESTART_S)
    assert world.node.next_life == life
    world.unpin(READER, pinned)
    assert world.node.next_life == life


def test_a_node_that_is_to_come_back_leaves_once_nothing_is_open() -> None:
    world = NodeWorld()
    world.put(WRITER, keys(1))
    pinned = world.pin(READER, keys(1))
    world.handle(Restart(worker=world.store, mode=ClusterMode(1, "gateway")))
    assert world.node.next_life is None
    world.unpin(READER, pinned)
    assert world.node.next_life == NextLife(mode=ClusterMode(1, "gateway"))
