"""The facts of a placement, written and read again, give the same workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mooncake.base import ConfigError, LoadReport, Priority, Role, Tier, WorkerLoad
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import Placement, Rejection
from mooncake.scheduler.placement.choice_replay import (
    MAX_SHOWN,
    NOT_REPLAYED,
    BundledPlacement,
    estimates,
    replay,
)
from mooncake.scheduler.placement.conductor import Conductor
from tests.support.scheduler.scheduling import (
    conductor,
    hello,
    keys_of,
    request,
    snapshot,
)
from tests.unit.scheduler.placement.test_fleet_choice import Twins


def read_again(placement: Placement) -> BundledPlacement:
    """Return the facts of a placement as a file has them."""
    assert placement.facts is not None
    written = msgspec.json.encode(placement.facts.bundled())
    return msgspec.json.decode(written, type=BundledPlacement)


def chosen(placement: Placement) -> tuple[str | None, str]:
    prefill = placement.prefill
    return None if prefill is None else prefill.worker_id, placement.decode.worker_id


class Recorded(Twins):
    """A Conductor that is asked at random, and whose every placement is replayed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.both = [self.both[seed % 2]]  # by columns, or worker by worker
        self.both[0].keeps_facts = True
        self.num_replayed = self.num_whole = 0

    def prefilled(self) -> None:
        if self.running:
            self.both[0].on_prefilled(self.random.choice(self.running), self.now)

    def place(self) -> None:
        self.num_placed += 1
        asked = request(
            f"r{self.num_placed}",
            prompt_tokens=self.random.choice(self.prompts),
            max_tokens=self.random.choice([1, 20, 400]),
        )
        names = list(self.workers)
        exclude = self.random.choice([None, None, self.random.sample(names, len(names) // 2)])
        so_far = self.random.choice([0, 0, 3])
        placement = self.both[0].place(asked, keys_of(asked), so_far, self.now, exclude)
        if not isinstance(placement, Placement):
            return
        self.running.append(asked)
        self.num_fetched += bool(placement.sources)
        self.fetched_from.update(source.tier for source in placement.sources)
        again = read_again(placement)
        assert replay(again) == chosen(placement)
        self.num_replayed += 1
        self.num_whole += placement.prefill is None
        choice = estimates(again)
        [prefill] = [each for each in choice.prefill if each.taken]
        [decode] = [each for each in choice.decode if each.taken]
        assert prefill.num_cached_tokens == placement.num_cached_tokens
        assert prefill.num_fetch_blocks == placement.num_fetch_blocks
        assert sum(prefill.fetch_blocks.values()) == placement.num_fetch_blocks
        assert set(prefill.fetch_blocks) == {source.tier.value for source in placement.sources}
        assert decode.tbt_s == placement.predicted_tbt_s


@pytest.mark.parametrize("first", range(0, 16, 8))
def test_what_was_chosen_is_chosen_again(first: int) -> None:
    num_replayed = num_fetched = num_whole = 0
    fetched_from: set[Tier] = set()
    for seed in range(first, first + 8):
        world = Recorded(seed)
        for _ in range(world.random.choice([6, 12, 24])):
            world.join()
        for _ in range(120):
            world.step()
        world.check()
        num_replayed += world.num_replayed
        num_fetched += world.num_fetched
        fetched_from |= world.fetched_from
        num_whole += world.num_whole
    assert num_replayed > 40
    assert num_fetched > 4, "nothing was ever fetched: the worlds are too poor"
    assert num_whole < num_replayed
    assert fetched_from & {Tier.SSD, Tier.OBJECT}, "nothing below DRAM"


P0, P1, D0 = hello("p0", Role.PREFILL), hello("p1", Role.PREFILL), hello("d0", Role.DECODE)


def place(made: Conductor, asked: Any, exclude: list[str] | None = None) -> Placement:
    made.keeps_facts = True
    result = made.place(asked, keys_of(asked), 0, 0.0, exclude)
    assert isinstance(result, Placement)
    return result


def test_estimates_say_in_which_tiers_blocks_lie_and_what_each_costs() -> None:
    pool = hello("kv0", Role.KVSTORE, node_id="node-p0")
    made = conductor([P0, D0, pool], ssd_bytes_per_s=1e6, object_bytes_per_s=1e5)
    keys = keys_of(request("long", 401))
    for tier, first, stop in ((Tier.DRAM, 0, 50), (Tier.SSD, 40, 80), (Tier.OBJECT, 0, 100)):
        made.on_blocks(snapshot(pool.worker, keys[first:stop], tier))
    placement = place(made, request("long", 401))
    again = read_again(placement)
    assert dict(again.holders) == {
        40: {Tier.DRAM: ["kv0"]}, 50: {Tier.DRAM: ["kv0"]},
        80: {Tier.SSD: ["kv0"]}, 100: {Tier.OBJECT: ["kv0"]},
    }  # fmt: skip
    [estimate] = estimates(again).prefill
    assert estimate.fetch_blocks == {"dram": 50, "ssd": 30}, "a bucket takes longer than computing"
    assert estimate.fetch_s == pytest.approx(0.002 * 2 + 30 * 1000 / 1e6, rel=0.01)
    assert (estimate.num_cached_tokens, estimate.num_fetch_blocks) == (320, 80)
    made.on_load(LoadReport(worker=pool.worker, load=WorkerLoad(counters={
        "object_blocks_read": 1e6, "object_read_seconds": 10.0,
    })), 1.0)  # fmt: skip
    later = read_again(place(made, request("second", prompt_tokens=[*range(400)])))
    assert later.config.object_bytes_per_s == pytest.approx(1e8, rel=0.01), "it was learned"
    assert {w.id: w.blocks_asked for w in later.workers}["kv0"] == {Tier.DRAM: 50, Tier.SSD: 30}


def test_without_receipts_nothing_is_kept() -> None:
    made = conductor([P0, D0])
    asked = request()
    result = made.place(asked, keys_of(asked), 0, 0.0)
    assert isinstance(result, Placement)
    assert result.facts is None


def test_facts_are_those_of_the_moment_of_the_choice() -> None:
    """Not of later, when more was placed there or the worker has left."""
    made = conductor([P0, P1, D0])
    first = place(made, request("first", 400))
    for number in range(5):
        place(made, request(f"later-{number}", 400 + number))
    made.on_lost("p1")
    [best, other] = estimates(read_again(first)).prefill
    assert best.taken
    assert best.queue_s == other.queue_s == 0.0
    assert best.ttft_s == first.predicted_ttft_s


def test_estimates_say_why_another_worker_was_not_taken() -> None:
    made = conductor([P0, P1, D0])
    long = request("long", 400)
    made.on_blocks(snapshot(P1.worker, keys_of(long)))
    taken, other = estimates(read_again(place(made, long))).prefill
    assert (taken.worker, taken.taken, taken.num_cached_tokens) == ("p1", True, 396)
    assert (other.worker, other.taken, other.num_cached_tokens) == ("p0", False, 0)
    assert taken.compute_s < other.compute_s
    assert taken.ttft_s == pytest.approx(taken.queue_s + taken.fetch_s + taken.compute_s)


def test_workers_that_were_not_compared_are_named_with_the_reason() -> None:
    small = hello("p-small", Role.PREFILL, num_blocks=10)
    made = conductor([P0, P1, hello("p2", Role.PREFILL), small, D0])
    made.on_draining("p1")
    choice = estimates(read_again(place(made, request("r", 400), ["p2"])))
    assert [each.worker for each in choice.prefill] == ["p0"]
    assert choice.unusable == {
        "p1": "it leaves",
        "p2": "the request failed there, or was turned away",
        "p-small": "it has fewer than 100 blocks",
    }


def test_of_many_workers_the_best_are_shown_with_the_one_that_was_taken() -> None:
    workers = [hello(f"p{number:02}", Role.PREFILL) for number in range(20)]
    made = conductor([*workers, D0], policy="round-robin")
    busy = WorkerLoad(num_queued_tokens=9000, num_free_blocks=1000, num_total_blocks=1000)
    made.on_load(LoadReport(worker=workers[0].worker, load=busy), 0.0)
    choice = estimates(read_again(place(made, request())))
    assert choice.num_prefill == 20
    assert len(choice.prefill) == MAX_SHOWN
    assert [each.worker for each in choice.prefill if each.taken] == ["p00"]
    assert choice.prefill[-1].taken, "it was the worst"


def test_a_request_that_would_miss_a_limit_has_facts_too() -> None:
    made = conductor([P0, P1, D0], ttft_slo_s=0.001)
    made.keeps_facts = True
    asked = request("long", 400)
    refused = made.place(asked, keys_of(asked), 0, 0.0)
    assert isinstance(refused, Rejection)
    assert refused.reason == "ttft_limit"
    assert refused.facts is not None
    assert all(each.ttft_s > 0.001 for each in refused.facts.choice().prefill)
    assert replay(refused.facts.bundled()) == ("p0", "d0")


def test_batch_work_that_waits_keeps_no_facts() -> None:
    made = conductor([P0, D0])
    made.keeps_facts = True
    busy = WorkerLoad(num_queued_tokens=90_000, num_free_blocks=1000, num_total_blocks=1000)
    made.on_load(LoadReport(worker=P0.worker, load=busy), 0.0)
    asked = request("batch", 40, priority=Priority.BATCH)
    refused = made.place(asked, keys_of(asked), 0, 0.0)
    assert isinstance(refused, Rejection)
    assert refused.facts is None, "it is tried again and again"


def test_a_request_that_runs_whole_on_decode_is_replayed() -> None:
    placement = place(conductor([D0, hello("d1", Role.DECODE)]), request())
    again = read_again(placement)
    assert replay(again) == chosen(placement)
    assert chosen(placement)[0] is None
    assert [each.worker for each in estimates(again).prefill if each.taken] == ["d0"]


@pytest.mark.parametrize("policy", NOT_REPLAYED)
def test_policies_that_choose_by_more_than_facts_are_refused(policy: str) -> None:
    again = read_again(place(conductor([P0, D0], policy=policy), request()))
    with pytest.raises(ConfigError, match=policy):
        replay(again)
    assert estimates(again).num_prefill == 1


def test_no_token_and_no_key_is_in_a_bundle() -> None:
    made = conductor([P0, D0, hello("kv0", Role.KVSTORE)])
    asked = request("r", prompt_tokens=[987_654_321] * 400)
    made.on_blocks(snapshot(P0.worker, keys_of(asked)[:50], Tier.HBM))
    facts = place(made, asked).facts
    assert facts is not None
    text = msgspec.json.encode(facts.bundled()).decode()
    assert "987654321" not in text
    for key in keys_of(asked):
        assert key.hex() not in text


def test_what_facts_hold_of_many_workers_is_counted() -> None:
    """Workers that compute the prompt or lend blocks are named; each that holds one has a bit."""
    facts = place(conductor([P0, D0]), request()).facts
    assert facts is not None
    named = {f"worker-{number}": 1 for number in range(1000)}
    for larger, least in (
        (replace(facts, inflight=named), 60_000),
        (replace(facts, blocks_asked={name: {Tier.DRAM: 1} for name in named}), 60_000),
        (replace(facts, holders=((1, 1 << 80_000),)), 10_000),
    ):
        assert larger.num_bytes >= facts.num_bytes + least


def test_a_number_that_no_call_can_have_is_refused() -> None:
    document = msgspec.to_builtins(read_again(place(conductor([P0, D0]), request())))
    for name in ("block_tokens", "num_tokens"):
        wanted = {**document["wanted"], name: 0}
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.convert({**document, "wanted": wanted}, BundledPlacement)


def test_a_bundle_of_another_form_is_refused() -> None:
    text = msgspec.json.encode(read_again(place(conductor([P0, D0]), request())))
    document = msgspec.json.decode(text)
    with pytest.raises(msgspec.ValidationError, match="unknown field `tokens`"):
        msgspec.convert({**document, "tokens": [1]}, BundledPlacement)
    document["workers"][0]["load"]["coefficients"] = [1.0]
    with pytest.raises(ConfigError, match="coefficients: must be 5"):
        replay(msgspec.convert(document, BundledPlacement))
    with pytest.raises(ConfigError, match="policy"):
        msgspec.convert({**document, "config": {"policy": "new"}}, BundledPlacement)


def test_bandwidths_are_those_that_were_learned() -> None:
    made = conductor([P0, D0, hello("kv0", Role.KVSTORE)], remote_bytes_per_s=1e9)
    bundled = read_again(place(made, request()))
    assert isinstance(bundled.config, SchedulerConfig)
    assert bundled.config.remote_bytes_per_s == 1e9
