"""Receipts of calls through the shipped machines on simulated wires."""

from __future__ import annotations

import dataclasses

import msgspec

from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.choice_replay import replay
from mooncake.sim.files import ReplayFile
from mooncake.sim.world.clock import EventHeap
from mooncake.telemetry.events import FirstToken
from mooncake.telemetry.receipt import SequenceReceipt
from mooncake.telemetry.receipts import Receipts, bundle
from tests.support.sim.cluster import Cluster, request, specs

PROMPT = list(range(1, 60))
EAGER = SchedulerConfig(fetch_latency_s=0.0, local_bytes_per_s=1e12, remote_bytes_per_s=1e12)


@dataclasses.dataclass
class HeapClock:
    """The simulated time."""

    heap: EventHeap

    def now(self) -> float:
        return self.heap.now()


class Asked:
    """A simulated cluster that keeps receipts."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        *,
        ssd_blocks: int = 0,
        restart_s: float | None = None,
    ) -> None:
        self.cluster = Cluster(
            specs(num_prefill, num_decode), scheduler=EAGER, ssd_blocks=ssd_blocks,
            restart_s=restart_s,
        )  # fmt: skip
        for host in self.cluster.world.gateway_hosts.values():
            host.conductor.keeps_facts = True
        self.receipts = Receipts(8, HeapClock(self.cluster.world.heap))
        self._num_told = 0

    def submit(self, name: str, prompt: list[int], max_tokens: int = 8) -> None:
        self.receipts.open(name, name, "", [name], 0)
        asked = msgspec.structs.replace(request(name, prompt, max_tokens), traced=True)
        self.cluster.world.submit(asked)

    def run(self, seconds: float) -> None:
        self.cluster.run(seconds)
        for event in self.cluster.events.events[self._num_told :]:
            self.receipts.record(event)
        self._num_told = len(self.cluster.events.events)
        self.receipts.check_integrity()

    def told(self, name: str) -> SequenceReceipt:
        """Return the receipt of a request, and check that its choices are made again."""
        kept = self.receipts.find(name, None)
        assert kept is not None
        while self.receipts.weigh(kept):
            pass
        [sequence] = self.receipts.receipt(kept).sequences
        read = msgspec.json.decode(msgspec.json.encode(bundle(kept)), type=ReplayFile)
        assert [(e.request_id, e.attempt) for e in read.placements] == [
            (name, attempt.number) for attempt in sequence.attempts
        ]
        for entry, attempt in zip(read.placements, sequence.attempts, strict=True):
            assert replay(entry.placement) == (attempt.prefill, attempt.decode)
        return sequence


def test_the_receipt_of_a_call_with_a_prefix_in_a_pool() -> None:
    asked = Asked(3, 2)
    asked.submit("first", PROMPT)
    asked.run(5)
    computed_by = next(
        e.worker_id for e in asked.cluster.events.events if isinstance(e, FirstToken)
    )
    asked.cluster.world.kill(computed_by)
    asked.run(1)
    asked.submit("second", [*PROMPT, 5, 6, 7])
    asked.run(5)
    sequence = asked.told("second")
    assert (sequence.state, sequence.num_output_tokens) == ("length", 8)
    [attempt] = sequence.attempts
    assert attempt.choice is not None
    assert [each.worker for each in attempt.choice.prefill if each.taken] == [attempt.prefill]
    assert {each.worker for each in attempt.choice.prefill} == {
        f"prefill-{number}" for number in range(3)
    } - {computed_by}
    assert {each.worker for each in attempt.choice.decode} == {"decode-0", "decode-1"}
    assert sequence.cache is not None
    assert sequence.cache.hits.peer == attempt.num_predicted_cached_tokens == 56
    assert sequence.ttft_s is not None
    assert attempt.ttft_s is not None
    assert 0 < attempt.ttft_s <= sequence.ttft_s
    steps = {step.name: step for step in sequence.steps}
    assert {"fetch", "prefill", "transfer", "decode"} <= set(steps)
    assert steps["fetch"].facts["from"] == f"kvstore-{computed_by}"
    assert int(steps["fetch"].facts["bytes"]) > 0
    assert steps["decode"].worker == attempt.decode
    asked.cluster.check_quiet()


def test_a_receipt_names_the_tier_of_what_is_fetched_and_is_replayed_with_it() -> None:
    asked = Asked(1, 1, ssd_blocks=100, restart_s=1.0)
    asked.submit("first", PROMPT)
    asked.run(5)
    for name in ("prefill-0", "kvstore-prefill-0"):
        asked.cluster.world.kill(name)
    asked.run(5)
    asked.submit("second", [*PROMPT, 5, 6, 7])
    asked.run(5)
    sequence = asked.told("second")
    [attempt] = sequence.attempts
    assert attempt.choice is not None
    [estimate] = attempt.choice.prefill
    assert estimate.fetch_blocks == {"ssd": attempt.num_fetch_blocks}
    assert estimate.fetch_s > 0
    assert sequence.cache is not None
    assert sequence.cache.hits.ssd == attempt.num_predicted_cached_tokens > 0
    asked.cluster.check_quiet()


def test_the_receipt_of_a_call_whose_worker_is_lost_has_both_attempts() -> None:
    asked = Asked(2, 2)
    asked.submit("r", PROMPT, 40)
    asked.run(0.1)
    lost = asked.told("r").attempts[0].decode
    asked.cluster.world.kill(lost)
    asked.run(20)
    sequence = asked.told("r")
    assert (sequence.state, sequence.num_output_tokens) == ("length", 40)
    first, *_, last = sequence.attempts
    assert len(sequence.attempts) > 1
    assert first.lost is not None
    assert lost in first.lost
    assert last.lost is None
    assert last.decode != lost
    assert sequence.longest_gap_s is not None
    asked.cluster.check_quiet()


def test_a_call_that_a_decode_worker_does_alone() -> None:
    asked = Asked(0, 2)
    asked.submit("r", PROMPT)
    asked.run(5)
    [attempt] = asked.told("r").attempts
    assert attempt.prefill is None
    assert attempt.choice is not None
    assert [each.worker for each in attempt.choice.prefill if each.taken] == [attempt.decode]
    assert all(each.push_s == 0.0 for each in attempt.choice.decode)
