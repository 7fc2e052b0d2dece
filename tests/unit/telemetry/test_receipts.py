"""Receipts: what is kept of the last calls, for whom, within which bounds, and what it says."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from mooncake.base import FinishReason, Role, WorkerLoad
from mooncake.base.request import CacheHits, CacheMisses, CacheUse, WorkSpan
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    FirstToken,
    Placed,
    Refused,
    Requeued,
    Tokens,
    Worked,
    WorkerJoined,
    WorkerReported,
)
from mooncake.telemetry.receipt import Choice, PrefillEstimate, Receipt, SequenceReceipt
from mooncake.telemetry.receipts import (
    CALL_BYTES,
    CHOICE_BYTES,
    EVENT_BYTES,
    MAX_CHOICES,
    MAX_EVENTS,
    MAX_SEQUENCES,
    Kept,
    Receipts,
    bundle,
)

USE = CacheUse(hits=CacheHits(dram=64), misses=CacheMisses(evicted=36))


class Now:
    """A clock that is set."""

    def __init__(self) -> None:
        self.at_s = 10.0

    def now(self) -> float:
        return self.at_s


@dataclass
class Facts:
    """Facts of a placement on "p0" that count how often they are weighed."""

    num_bytes: int = 100
    weighed: list[int] = field(default_factory=list)

    def choice(self) -> Choice:
        self.weighed.append(1)
        taken = PrefillEstimate(
            worker="p0", taken=True, ttft_s=0.5, queue_s=0.1, fetch_s=0.0, compute_s=0.4,
            num_cached_tokens=64, num_fetch_blocks=1, fetch_blocks={"dram": 1},
        )  # fmt: skip
        return Choice(prefill=[taken], decode=[], num_prefill=1, num_decode=0, unusable={})

    def bundled(self) -> dict[str, int]:
        return {"facts": len(self.weighed)}


def made(max_receipts: int = 8, **bounds: int) -> Receipts:
    return Receipts(max_receipts, Now(), "gateway", **bounds)


def weigh_all(receipts: Receipts, kept: Kept) -> None:
    while receipts.weigh(kept):
        pass


def accepted(at_s: float, name: str = "r") -> Accepted:
    return Accepted(request_id=name, at_s=at_s, num_prompt_tokens=100, max_tokens=8, ttft_slo_s=2.0)


def placed(at_s: float, attempt: int, prefill: str | None = "p0", **more: Any) -> Placed:
    return Placed(
        request_id="r", at_s=at_s, attempt=attempt, prefill=prefill, decode="d0",
        predicted_ttft_s=0.5, predicted_tbt_s=0.02, num_cached_tokens=64, num_fetch_blocks=1,
        **more,
    )  # fmt: skip


def first(at_s: float) -> FirstToken:
    return FirstToken(request_id="r", at_s=at_s, worker_id="p0", num_cached_tokens=64, cache=USE)


def tokens(at_s: float, start: int, number: int = 1) -> Tokens:
    return Tokens(request_id="r", at_s=at_s, start=start, num_tokens=number, worker_id="d0")


def finished(at_s: float, reason: FinishReason = FinishReason.STOP, status: int = 200) -> Finished:
    return Finished(
        request_id="r", at_s=at_s, reason=reason, num_prompt_tokens=100, num_output_tokens=4,
        status=status,
    )  # fmt: skip


def told(*events: AnyEvent) -> Receipt:
    """Return the receipt of a call with one sequence "r" that began at 10 s."""
    receipts = made()
    assert receipts.open("gateway-1", "chatcmpl-1", "", ["r"], 77)
    for event in events:
        receipts.record(event)
    receipts.check_integrity()
    kept = receipts.find("gateway-1", None)
    assert kept is not None
    weigh_all(receipts, kept)
    return receipts.receipt(kept)


def told_one(*events: AnyEvent) -> SequenceReceipt:
    [sequence] = told(*events).sequences
    return sequence


def test_a_receipt_says_who_did_what_and_how_long_it_took() -> None:
    receipt = told(
        WorkerReported(
            worker_id="p0", at_s=5.0, role=Role.PREFILL, load=WorkerLoad(), clock_s=1000.0
        ),
        accepted(11.0),
        placed(12.0, 7, facts=Facts()),
        Worked(
            request_id="r", at_s=12.6, attempt=7,
            spans=(
                WorkSpan("queue", "p0", 1007.0, 1007.25),
                WorkSpan("transfer", "p0", 1007.25, 1007.5, {"mooncake.path": "shm"}),
            ),
        ),
        first(12.75), tokens(12.75, 0), tokens(13.0, 1), tokens(13.75, 2, 2), finished(14.0),
    )  # fmt: skip
    assert (receipt.id, receipt.call_id, receipt.gateway) == ("gateway-1", "chatcmpl-1", "gateway")
    assert (receipt.begun_at, receipt.num_sequences) == (77, 1)
    [sequence] = receipt.sequences
    assert (sequence.state, sequence.status, sequence.refused) == ("stop", 200, None)
    assert (sequence.num_prompt_tokens, sequence.num_output_tokens) == (100, 4)
    assert sequence.cache == USE
    assert (sequence.ttft_s, sequence.ttft_slo_s) == (1.75, 2.0)
    assert sequence.tbt_s == pytest.approx(1.0 / 3), "three tokens in the second after the first"
    assert sequence.longest_gap_s == 0.75
    [attempt] = sequence.attempts
    assert (attempt.prefill, attempt.decode, attempt.lost) == ("p0", "d0", None)
    assert (attempt.start_s, attempt.end_s) == (2.0, 4.0), "since the call began"
    assert (attempt.predicted_ttft_s, attempt.ttft_s) == (0.5, 0.75)
    assert attempt.choice is not None
    assert [each.worker for each in attempt.choice.prefill] == ["p0"]
    steps = [(step.name, step.worker, step.start_s, step.end_s) for step in sequence.steps]
    assert steps == [
        ("queue", None, 1.0, 2.0),
        ("queue", "p0", 2.0, 2.25),
        ("transfer", "p0", 2.25, 2.5),
    ]
    assert [step.facts for step in sequence.steps] == [{}, {}, {"path": "shm"}]
    assert [step.attempt for step in sequence.steps] == [None, 1, 1]


def test_a_lost_attempt_says_why_and_the_next_has_the_first_token() -> None:
    sequence = told_one(
        accepted(10.0),
        placed(10.0, 3),
        Requeued(
            request_id="r", at_s=12.0, attempt=3, reason="worker p0 was lost", num_output_tokens=0
        ),
        placed(13.0, 4, prefill=None),
        first(13.5), tokens(13.5, 0), finished(14.0),
    )  # fmt: skip
    lost, done = sequence.attempts
    assert (lost.number, lost.lost, lost.ttft_s) == (1, "worker p0 was lost", None)
    assert (done.number, done.prefill, done.lost, done.ttft_s) == (2, None, None, 0.5)
    assert lost.choice is None, "its facts were not kept"
    waits = [(step.start_s, step.end_s) for step in sequence.steps if step.name == "queue"]
    assert waits == [(0.0, 0.0), (2.0, 3.0)]
    assert sequence.tbt_s is None
    assert sequence.longest_gap_s is None


def test_a_refused_call_says_why() -> None:
    sequence = told_one(Refused(request_id="r", at_s=10.5, status=429, reason="ttft_limit"))
    assert (sequence.state, sequence.status) == ("rejected", 429)
    assert sequence.refused == "ttft_limit"
    assert sequence.attempts == []
    assert sequence.choice is None, "it was not placed at all"


def test_a_call_that_would_miss_a_limit_has_the_estimates() -> None:
    refused = Refused(
        request_id="r", at_s=10.5, status=429, reason="request_ttft_limit", facts=Facts(),
        ttft_slo_s=0.2, tbt_slo_s=0.05,
    )  # fmt: skip
    sequence = told_one(refused)
    assert (sequence.ttft_slo_s, sequence.tbt_slo_s) == (0.2, 0.05)
    assert sequence.choice is not None
    assert [each.ttft_s for each in sequence.choice.prefill] == [0.5]


def test_a_call_that_fails_has_its_status() -> None:
    sequence = told_one(
        accepted(10.0), placed(10.0, 1), finished(11.0, FinishReason.ERROR, status=503)
    )
    assert (sequence.state, sequence.status) == ("error", 503)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ((), "waiting"),
        ((accepted(10.0),), "waiting"),
        ((accepted(10.0), placed(11.0, 1)), "placed"),
        ((accepted(10.0), placed(11.0, 1), first(12.0), tokens(12.0, 0)), "answering"),
    ],
)
def test_a_call_that_runs_is_shown_as_far_as_it_has_come(
    events: tuple[AnyEvent, ...], state: str
) -> None:
    sequence = told_one(*events)
    assert sequence.state == state
    assert all(attempt.end_s is None for attempt in sequence.attempts)


def test_a_call_is_found_by_its_receipt_its_answer_and_its_sequences() -> None:
    receipts = made()
    receipts.open("g-1", "chatcmpl-a", "", ["chatcmpl-a-g-1-0", "chatcmpl-a-g-1-1"], 0)
    receipts.open("g-2", "chatcmpl-b", "", ["chatcmpl-b-g-2-0"], 0)
    for name in ("g-1", "chatcmpl-a", "chatcmpl-a-g-1-1"):
        kept = receipts.find(name, None)
        assert kept is not None
        assert kept.id == "g-1"
    assert receipts.find("chatcmpl", None) is None


def test_of_two_calls_with_one_id_the_last_is_found() -> None:
    clock = Now()
    receipts = Receipts(8, clock)
    receipts.open("g-1", "chatcmpl-same", "a", ["x"], 0)
    clock.at_s += 1
    receipts.open("g-2", "chatcmpl-same", "b", ["y"], 0)
    found = receipts.find("chatcmpl-same", None)
    assert found is not None
    assert found.id == "g-2"


def test_an_id_that_a_client_chose_hides_no_receipt_and_no_sequence() -> None:
    clock = Now()
    receipts = Receipts(8, clock)
    receipts.open("g-1", "chatcmpl-a", "one", ["chatcmpl-a-g-1-0"], 0)
    for name in ("g-1", "chatcmpl-a-g-1-0"):
        clock.at_s += 1
        receipts.open(f"later-{name}", name, "two", [f"{name}-later"], 0)
        found = receipts.find(name, None)
        assert found is not None
        assert found.id == "g-1"
        own = receipts.find(name, "two")
        assert own is not None
        assert own.id == f"later-{name}"


def test_a_tenant_finds_its_own_calls_only() -> None:
    receipts = made()
    receipts.open("g-1", "chatcmpl-a", "one", ["r"], 0)
    assert receipts.find("g-1", "one") is not None
    assert receipts.find("g-1", "another") is None
    assert receipts.find("g-1", "") is None
    assert receipts.find("g-1", None) is not None, "an operator"


def test_beyond_their_number_the_tenant_that_has_most_loses_its_oldest() -> None:
    receipts = made(4)
    receipts.open("quiet-1", "c", "quiet", ["q"], 0)
    for number in range(20):
        receipts.open(f"loud-{number}", "c", "loud", [f"l{number}"], 0)
        receipts.check_integrity()
    assert len(receipts) == 4
    assert receipts.find("quiet-1", "quiet") is not None
    assert [receipts.find(f"loud-{n}", None) is not None for n in (15, 16, 17, 18, 19)] == [
        False, False, True, True, True,
    ]  # fmt: skip


def test_the_oldest_receipt_is_not_looked_for_among_those_that_were_dropped() -> None:
    receipts = made(4)
    for number in range(8):
        receipts.open(f"g-{number}", "c", f"t{number % 2}", [f"r{number}"], 0)
    kept = receipts._calls
    assert {tenant: list(own) for tenant, own in kept.items()} == {
        "t0": ["g-4", "g-6"], "t1": ["g-5", "g-7"],
    }  # fmt: skip
    assert all(isinstance(own, OrderedDict) for own in kept.values()), "a dict does"


def test_beyond_their_bytes_the_oldest_go_too() -> None:
    receipts = made(100, max_bytes=10 * CALL_BYTES)
    for number in range(4):
        receipts.open(f"g-{number}", "c", "", [f"r{number}"], 0)
    receipts.record(accepted(10.0, "r3"))
    for number in range(4):
        for _ in range(20):
            receipts.record(accepted(10.0, f"r{number}"))
            receipts.check_integrity()
    assert len(receipts) < 4


def test_what_one_sequence_holds_has_a_bound() -> None:
    receipts = made()
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.record(accepted(10.0))
    for number in range(1000):
        receipts.record(placed(11.0 + number, number))
    receipts.record(first(2000.0))
    receipts.record(finished(2001.0))
    kept = receipts.find("g-1", None)
    assert kept is not None
    assert kept.num_bytes <= 2 * CALL_BYTES + (MAX_EVENTS + 2) * EVENT_BYTES
    [sequence] = receipts.receipt(kept).sequences
    assert sequence.num_left_out == 1001 - MAX_EVENTS
    assert sequence.state == "stop"


def test_tokens_are_counted_and_not_kept() -> None:
    receipts = made()
    receipts.open("g-1", "c", "", ["r"], 0)
    kept = receipts.find("g-1", None)
    assert kept is not None
    before = kept.num_bytes
    for number in range(1000):
        receipts.record(tokens(11.0 + number, number))
    assert kept.num_bytes == before
    assert receipts.receipt(kept).sequences[0].num_output_tokens == 1000


def test_of_many_sequences_the_first_are_kept_and_the_others_counted() -> None:
    receipts = made()
    ids = [f"r{number}" for number in range(MAX_SEQUENCES + 5)]
    assert not receipts.open("g-1", "c", "", ids, 0)
    for name in ids:
        receipts.record(accepted(10.0, name))
    receipts.check_integrity()
    kept = receipts.find("g-1", None)
    assert kept is not None
    receipt = receipts.receipt(kept)
    assert receipt.num_sequences == MAX_SEQUENCES + 5
    assert [each.request_id for each in receipt.sequences] == ids[:MAX_SEQUENCES]


def test_events_of_calls_that_were_dropped_or_never_opened_are_ignored() -> None:
    receipts = made(1)
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.open("g-2", "c", "", ["other"], 0)
    receipts.record(accepted(10.0))
    receipts.record(tokens(11.0, 0))
    receipts.record(finished(12.0))
    receipts.check_integrity()
    assert len(receipts) == 1


def test_a_name_that_comes_again_replaces_the_older_call() -> None:
    receipts = made()
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.open("g-1", "c", "", ["r"], 1)
    receipts.check_integrity()
    receipts.record(finished(12.0))
    receipts.check_integrity()
    assert len(receipts) == 1


def test_estimates_are_computed_once_and_of_few_placements() -> None:
    receipts = made()
    facts = Facts()
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.record(accepted(10.0))
    for number in range(MAX_CHOICES + 3):
        receipts.record(placed(11.0, number, facts=facts))
    assert facts.weighed == [], "nothing is computed before somebody asks"
    kept = receipts.find("g-1", None)
    assert kept is not None
    for number in range(MAX_CHOICES):
        assert len(facts.weighed) == number, "one at a time, so that others have their turn"
        assert receipts.weigh(kept)
    assert not receipts.weigh(kept)
    assert len(facts.weighed) == MAX_CHOICES


def test_estimates_that_somebody_asked_for_count_as_held() -> None:
    receipts = made(100, max_bytes=3 * CHOICE_BYTES)
    for name in ("old", "r"):
        receipts.open(f"g-{name}", "c", "", [name], 0)
    receipts.record(accepted(10.0))
    receipts.record(placed(11.0, 1, facts=Facts()))
    kept = receipts.find("g-r", None)
    assert kept is not None
    before = kept.num_bytes
    for _ in range(2):
        weigh_all(receipts, kept)
        receipts.receipt(kept)
        receipts.check_integrity()
        assert kept.num_bytes == before + CHOICE_BYTES, "once"
    for number in range(2, 5):
        receipts.record(placed(11.0, number, facts=Facts()))
    weigh_all(receipts, kept)
    [sequence] = receipts.receipt(kept).sequences
    receipts.check_integrity()
    assert len(receipts) == 0, "it alone holds too much"
    assert sequence.attempts[3].choice is not None, "and is told once more"
    receipts.receipt(kept)
    receipts.check_integrity()


def test_a_bundle_has_the_facts_of_all_placements() -> None:
    receipts = made()
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.record(accepted(10.0))
    for number in (4, 9):
        receipts.record(placed(11.0, number, facts=Facts()))
    kept = receipts.find("g-1", None)
    assert kept is not None
    written = msgspec.to_builtins(bundle(kept))
    assert written == {
        "receipt": "g-1",
        "placements": [
            {"request_id": "r", "attempt": 1, "placement": {"facts": 0}},
            {"request_id": "r", "attempt": 2, "placement": {"facts": 0}},
        ],
        "version": 2,
    }


def test_a_worker_that_joins_again_has_a_clock_of_its_own() -> None:
    """Its spans are taken to have been told at once until it has reported."""
    receipts = made()
    receipts.open("g-1", "c", "", ["r"], 0)
    receipts.record(
        WorkerReported(worker_id="p0", at_s=5.0, role=Role.PREFILL, load=WorkerLoad(), clock_s=9.0)
    )
    receipts.record(WorkerJoined(worker_id="p0", at_s=6.0, role=Role.PREFILL, num_blocks=1))
    receipts.record(accepted(10.0))
    receipts.record(placed(10.0, 1))
    span = WorkSpan("prefill", "p0", 500.0, 501.0)
    receipts.record(Worked(request_id="r", at_s=12.0, attempt=1, spans=(span,)))
    kept = receipts.find("g-1", None)
    assert kept is not None
    [prefill] = [s for s in receipts.receipt(kept).sequences[0].steps if s.name == "prefill"]
    assert (prefill.start_s, prefill.end_s) == (1.0, 2.0)
