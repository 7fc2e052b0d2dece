"""Bookings, own and of other gateways: what is booked is given back once, whoever placed it."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base import BlockSource, KeyChain, Role, Tier, WorkerRef
from mooncake.base.messages import Booking, BookingOver
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.booking_table import BookingTable
from mooncake.scheduler.placement.pools import FetchCosts
from mooncake.scheduler.placement.views import InstanceView
from tests.support.scheduler.scheduling import hello, keys_of, ref, request

KEYS = KeyChain.of(keys_of(request("prompt")))


class Bench:
    """A prefill, a decode and a pool worker, and the table of their bookings."""

    def __init__(self) -> None:
        workers = [hello("p0", Role.PREFILL), hello("d0", Role.DECODE)]
        self.views = {w.worker.worker_id: InstanceView.of(w) for w in workers}
        self.fetch = FetchCosts(SchedulerConfig())
        self.table = BookingTable(self.views, self.fetch)

    def check(self, *own: str) -> None:
        self.table.check_integrity(set(own))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def booking(name: str, computing: WorkerRef | None = None, **changes: Any) -> Booking:
    fields: dict[str, Any] = {
        "request_id": name,
        "computing": computing or ref("p0"),
        "decode": ref("d0"),
        "keys": KEYS.packed,
        "sources": (BlockSource(store=ref("k0"), first=0, stop=2),),
        "num_tokens": 16,
        "num_new_tokens": 8,
        "prefill_s": 0.5,
        "ttft_s": 0.6,
        "num_blocks": 5,
    }
    return Booking(**(fields | changes))


def test_a_booking_loads_its_workers_until_it_is_released(bench: Bench) -> None:
    prefill, decode = bench.views["p0"], bench.views["d0"]
    bench.table.add(booking("r"), 0.0)
    assert (prefill.queued_s(), prefill.num_queued_tokens()) == (0.5, 8)
    assert (decode.num_sequences(), decode.num_free_blocks()) == (1, 995)
    assert bench.table.inflight.match(KEYS) == {"p0": len(KEYS)}
    assert bench.fetch.blocks_asked(ref("k0")) == {Tier.DRAM: 2}
    bench.check("r")
    assert bench.table.release("r")
    assert (prefill.queued_s(), decode.num_sequences(), decode.num_free_blocks()) == (0, 0, 1000)
    assert bench.table.inflight.empty
    assert not bench.fetch.blocks_asked(ref("k0"))
    assert not bench.table.release("r"), "released before"
    bench.check()


def test_the_first_token_frees_prefill_and_keeps_decode(bench: Bench) -> None:
    bench.table.add(booking("r"), 0.0)
    for _ in range(2):
        bench.table.on_prefilled("r", 1.0)
        assert bench.views["p0"].num_assigned == 0
        assert bench.views["d0"].num_assigned == 1
        assert bench.table.inflight.empty
    bench.check("r")


def test_a_fetch_counts_until_its_worker_says_that_it_has_ended(bench: Bench) -> None:
    bench.table.add(booking("r"), 0.0)
    bench.table.apply("g1", booking("other"), 0.0)
    assert bench.fetch.blocks_asked(ref("k0")) == {Tier.DRAM: 4}
    bench.table.on_fetched(["r", "unknown"], ref("d0"))
    assert bench.fetch.blocks_asked(ref("k0")) == {Tier.DRAM: 4}, "another worker"
    for _ in range(2):
        bench.table.on_fetched(["r"], ref("p0"))
        assert bench.fetch.blocks_asked(ref("k0")) == {Tier.DRAM: 2}
    assert bench.views["p0"].queued_s() == 1.0, "both prompts still wait for their turn"
    bench.table.on_fetched(["other"], ref("p0"))
    bench.fetch.check_idle()
    bench.table.on_prefilled("r", 1.0)
    assert bench.table.release("r")
    bench.check()


def test_a_whole_request_has_one_share(bench: Bench) -> None:
    bench.table.add(booking("r", computing=ref("d0")), 0.0)
    assert bench.views["d0"].num_queued_tokens() == 8
    bench.table.on_prefilled("r", 1.0)
    assert bench.views["d0"].num_queued_tokens() == 0
    assert bench.views["d0"].num_assigned == 1
    assert bench.table.release("r")
    bench.check()


def test_updates_are_kept_only_while_there_are_other_gateways(bench: Bench) -> None:
    bench.table.add(booking("alone"), 0.0)
    assert bench.table.updates is None
    bench.table.updates = []
    bench.table.add(booking("r"), 0.0)
    bench.table.on_prefilled("r", 1.0)
    bench.table.release("r")
    over = BookingOver(request_id="r", prefill_only=True)
    assert bench.table.updates == [booking("r"), over, BookingOver(request_id="r")]


def test_another_table_fed_with_all_own_updates_has_the_same_loads(bench: Bench) -> None:
    bench.table.add(booking("a"), 0.0)
    bench.table.add(booking("b"), 0.0)
    bench.table.on_prefilled("b", 1.0)
    other = Bench()
    for update in bench.table.own_updates():
        other.table.apply("g1", update, 1.0)
    other.check()
    assert other.table.own_ids() == []
    assert (other.table.owners, other.table.num_bookings("g1")) == ({"g1"}, 2)
    for name in ("p0", "d0"):
        assert other.views[name].num_assigned == bench.views[name].num_assigned


def test_bookings_of_others_have_names_of_their_own(bench: Bench) -> None:
    bench.table.add(booking("r"), 0.0)
    for gateway in ("g1", "g2"):
        bench.table.apply(gateway, booking("r"), 0.0)
        bench.table.apply(gateway, booking("r"), 0.0)  # a repeat replaces
    assert bench.views["d0"].num_assigned == 3
    bench.table.apply("g1", BookingOver(request_id="r"), 1.0)
    assert bench.table.owners == {"g2"}
    assert bench.table.get("r") is not None
    bench.check("r")


def test_unknown_workers_and_ends_are_ignored(bench: Bench) -> None:
    bench.table.apply("g1", booking("r", computing=ref("p0", "former")), 0.0)
    bench.table.apply("g1", BookingOver(request_id="never", prefill_only=True), 0.0)
    bench.table.apply("g1", BookingOver(request_id="never"), 0.0)
    assert bench.table.owners == set()
    bench.check()


def test_what_another_gateway_has_no_more_is_removed(bench: Bench) -> None:
    for name in ("a", "b"):
        bench.table.apply("g1", booking(name), 0.0)
    bench.table.retain("g1", ["b", "unknown"])
    assert bench.table.num_bookings("g1") == 1
    bench.table.retain("g1", [])
    assert bench.table.owners == set()
    bench.check()


def test_a_lost_worker_ends_the_bookings_of_others_only(bench: Bench) -> None:
    bench.table.add(booking("own"), 0.0)
    bench.table.apply("g1", booking("r"), 0.0)
    del bench.views["d0"]
    bench.table.on_worker_lost("d0")
    assert bench.table.owners == set()
    assert bench.table.own_ids() == ["own"]
    assert bench.table.release("own")
    bench.check()


def test_a_share_without_a_booking_is_found_out(bench: Bench) -> None:
    bench.table.add(booking("r"), 0.0)
    bench.views["d0"].release("r")
    bench.check("r")
    with pytest.raises(AssertionError):
        bench.check()
