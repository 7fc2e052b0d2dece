"""The tree of a traced call, made of lifetime events and of what workers tell."""

from __future__ import annotations

import pytest

from mooncake.base import FinishReason, Role, WorkerLoad
from mooncake.base.request import WorkEvent, WorkSpan
from mooncake.telemetry.events import (
    Accepted,
    AnyEvent,
    Finished,
    FirstToken,
    Placed,
    Refused,
    Requeued,
    Worked,
    WorkerJoined,
    WorkerReported,
)
from mooncake.telemetry.traces import (
    MAX_PLACEMENTS,
    MAX_SEQUENCES,
    MAX_WORK_SPANS,
    Trace,
    read_caller,
)
from tests.support.traces import (
    NOT_SAMPLED,
    SAMPLED,
    SPAN_ID,
    TRACE_ID,
    Exported,
    is_whole,
    named,
    outline,
)


def accepted(at_s: float) -> Accepted:
    return Accepted(request_id="r", at_s=at_s, num_prompt_tokens=100, max_tokens=8)


def placed(at_s: float, attempt: int, decode: str = "d0", prefill: str | None = "p0") -> Placed:
    return Placed(
        request_id="r", at_s=at_s, attempt=attempt, prefill=prefill, decode=decode,
        predicted_ttft_s=0.5, predicted_tbt_s=0.02, num_cached_tokens=64,
    )  # fmt: skip


def finished(at_s: float, reason: FinishReason = FinishReason.STOP, status: int = 200) -> Finished:
    return Finished(
        request_id="r", at_s=at_s, reason=reason, num_prompt_tokens=100, num_output_tokens=8,
        num_cached_tokens=64, status=status,
    )  # fmt: skip


def worked(at_s: float, attempt: int, *spans: WorkSpan) -> Worked:
    return Worked(request_id="r", at_s=at_s, attempt=attempt, spans=spans)


def reported(worker_id: str, clock_s: float, at_s: float) -> WorkerReported:
    return WorkerReported(
        worker_id=worker_id, at_s=at_s, role=Role.PREFILL, load=WorkerLoad(), clock_s=clock_s
    )


def traced(exported: Exported, *events: AnyEvent, end_s: float, headers: str = "") -> Trace:
    """Have a call begin at 10 s, with one request."""
    trace = exported.tracer.begin(headers, "", 10.0)
    assert trace is not None
    assert trace.follow(["r"])
    for event in events:
        exported.tracer.record(event)
    exported.tracer.end(trace, end_s)
    return trace


def test_a_tree_has_what_every_process_did() -> None:
    exported = Exported()
    traced(
        exported,
        reported("p0", 1000.0, 5.0),
        accepted(11.0),
        placed(13.0, 7),
        worked(
            16.0, 7,
            WorkSpan("queue", "p0", 1008.5, 1009.0),
            WorkSpan(
                "prefill", "p0", 1009.0, 1010.5, {"mooncake.tokens": 36},
                [WorkEvent("chunk", 1010.0, {"mooncake.tokens": 20})],
            ),
        ),
        FirstToken(request_id="r", at_s=16.0, worker_id="p0", num_cached_tokens=64),
        worked(20.0, 7, WorkSpan("decode", "d0", 3.0, 6.5)),
        finished(20.0),
        end_s=21.0,
    )  # fmt: skip
    root = exported.root
    assert outline(root) == [
        "api", ". request", ". . queue", ". . placement", ". . . queue", ". . . prefill",
        ". . . decode",
    ]  # fmt: skip
    assert is_whole(root)
    [request], [placement] = named(root, "request"), named(root, "placement")
    assert (root.start_s, root.end_s) == (10.0, 21.0)
    assert (request.start_s, request.end_s) == (11.0, 20.0)
    assert (placement.start_s, placement.end_s) == (13.0, 20.0)
    assert placement.attributes == {
        "mooncake.attempt": 1, "mooncake.prefill_worker": "p0", "mooncake.decode_worker": "d0",
        "mooncake.predicted_ttft_s": 0.5, "mooncake.predicted_tbt_s": 0.02,
        "mooncake.predicted_cached_tokens": 64,
    }  # fmt: skip
    [prefill] = named(root, "prefill")
    assert (prefill.start_s, prefill.end_s) == (14.0, 15.5), "by the clock of the gateway"
    assert [event.at_s for event in prefill.events] == [15.0]
    assert prefill.attributes == {"mooncake.worker": "p0", "mooncake.tokens": 36}
    assert request.attributes["mooncake.output_tokens"] == 8
    latencies = {
        "e2e": 11.0, "time_to_first_token": 6.0, "time_in_queue": 2.0,
        "time_in_model_prefill": 1.5, "time_in_model_decode": 3.5,
    }  # fmt: skip
    assert root.attributes == {f"gen_ai.latency.{name}": each for name, each in latencies.items()}


def test_a_retry_on_another_worker_is_in_the_same_tree() -> None:
    exported = Exported()
    traced(
        exported,
        accepted(10.0),
        placed(10.0, 3),
        worked(12.0, 3, WorkSpan("prefill", "p0", 1.0, 2.0)),
        Requeued(
            request_id="r", at_s=14.0, attempt=3, reason="worker d0 was lost", num_output_tokens=1
        ),
        worked(14.5, 3, WorkSpan("decode", "d0", 1.0, 2.0)),  # on its way when that was found
        placed(15.0, 9, decode="d1"),
        worked(17.0, 9, WorkSpan("decode", "d1", 5.0, 6.0)),
        finished(17.0),
        end_s=18.0,
    )
    assert outline(exported.root) == [
        "api", ". request", ". . queue", ". . placement!", ". . . prefill", ". . queue",
        ". . placement", ". . . decode",
    ]  # fmt: skip
    first, second = named(exported.root, "placement")
    assert first.error == "worker d0 was lost"
    assert (first.end_s, second.start_s) == (14.0, 15.0)
    assert [each.attributes["mooncake.attempt"] for each in (first, second)] == [1, 2]
    assert exported.root.error is None, "the client got its answer"
    assert exported.root.attributes["gen_ai.latency.time_in_queue"] == 1.0


def test_an_aborted_request_ends_all_that_is_open() -> None:
    exported = Exported()
    traced(
        exported, accepted(10.0), placed(11.0, 1), finished(12.0, FinishReason.ABORT), end_s=13.0
    )
    assert outline(exported.root) == ["api", ". request", ". . queue", ". . placement"]
    assert is_whole(exported.root)
    [request] = named(exported.root, "request")
    assert request.attributes["mooncake.end"] == "abort"


def test_a_call_that_ends_before_its_requests_ends_them() -> None:
    exported = Exported()
    traced(exported, accepted(10.0), end_s=13.0)
    assert outline(exported.root) == ["api", ". request", ". . queue"]
    assert is_whole(exported.root)
    exported.tracer.record(finished(14.0))
    assert len(exported.trees) == 1


@pytest.mark.parametrize(("status", "fails"), [(503, True), (500, True), (408, False)])
def test_a_failure_has_its_status(status: int, fails: bool) -> None:
    exported = Exported()
    traced(
        exported, accepted(10.0), placed(10.0, 1), finished(11.0, FinishReason.ERROR, status),
        end_s=12.0,
    )  # fmt: skip
    [request] = named(exported.root, "request")
    assert request.error
    assert request.attributes["error.type"] == str(status)
    assert (exported.root.error is not None) == fails, "of the server's, not of the client's"


def test_a_refusal_says_why() -> None:
    exported = Exported()
    refused = Refused(request_id="r", at_s=11.0, status=429, reason="ttft_limit")
    traced(exported, refused, end_s=12.0)
    assert outline(exported.root) == ["api", ". request!"]
    [request] = named(exported.root, "request")
    assert request.error == "it was refused: ttft_limit"
    assert exported.root.error is None


def test_a_worker_that_has_not_reported_is_taken_to_have_told_at_once() -> None:
    exported = Exported()
    spans = WorkSpan("queue", "p0", 500.0, 501.0), WorkSpan("prefill", "p0", 501.0, 502.0)
    traced(exported, accepted(10.0), placed(10.0, 1), worked(15.0, 1, *spans), end_s=16.0)
    [prefill] = named(exported.root, "prefill")
    assert (prefill.start_s, prefill.end_s) == (14.0, 15.0)
    assert named(exported.root, "queue")[1].end_s == 14.0


def test_a_clock_that_is_known_wrongly_moves_nothing_out_of_its_placement() -> None:
    exported = Exported()
    late, early = WorkSpan("late", "p0", 90.0, 95.0), WorkSpan("early", "p0", 1.0, 2.0)
    traced(
        exported, reported("p0", 0.0, 0.0), accepted(10.0), placed(11.0, 1),
        worked(15.0, 1, late, early), end_s=16.0,
    )  # fmt: skip
    assert is_whole(exported.root)


def test_a_worker_that_begins_anew_is_not_translated_by_its_former_clock() -> None:
    exported = Exported()
    joined = WorkerJoined(worker_id="p0", at_s=5.0, role=Role.PREFILL, num_blocks=1)
    traced(
        exported, reported("p0", 1000.0, 4.0), joined, reported("p0", 0.0, 6.0), accepted(10.0),
        placed(10.0, 1), worked(15.0, 1, WorkSpan("prefill", "p0", 5.0, 8.0)), end_s=16.0,
    )  # fmt: skip
    [prefill] = named(exported.root, "prefill")
    assert (prefill.start_s, prefill.end_s) == (11.0, 14.0)


def test_what_a_worker_tells_has_a_bound() -> None:
    exported = Exported()
    spans = [WorkSpan("odd", "p0", 1.0, 2.0)] * (MAX_WORK_SPANS + 5)
    traced(
        exported, accepted(10.0), placed(10.0, 1), worked(11.0, 1, *spans),
        worked(11.0, 1, *spans), end_s=16.0,
    )  # fmt: skip
    assert len(named(exported.root, "odd")) == MAX_WORK_SPANS


def test_placements_have_a_bound() -> None:
    exported = Exported()
    events: list[AnyEvent] = [accepted(10.0)]
    for attempt in range(1, 5 * MAX_PLACEMENTS):
        lost = Requeued(
            request_id="r", at_s=11.0, attempt=attempt, reason="lost", num_output_tokens=0
        )
        work = worked(10.5, attempt, WorkSpan("prefill", "p0", 1.0, 2.0))
        events += [placed(10.0, attempt), work, lost]
    traced(exported, *events, finished(17.0), end_s=18.0)
    for name in ("placement", "queue", "prefill"):
        assert len(named(exported.root, name)) == MAX_PLACEMENTS
    [request] = named(exported.root, "request")
    assert request.attributes["mooncake.placements"] == 5 * MAX_PLACEMENTS - 1


def test_a_call_of_many_sequences_shows_none_of_them() -> None:
    exported = Exported()
    trace = exported.tracer.begin("", "", 0.0)
    assert trace is not None
    assert trace.follow(str(number) for number in range(MAX_SEQUENCES))
    many = exported.tracer.begin("", "", 0.0)
    assert many is not None
    assert not many.follow(str(number) for number in range(MAX_SEQUENCES + 1))
    assert many.root.children == []


@pytest.mark.parametrize(
    ("draw", "headers", "is_traced"),
    [
        (0.09, "", True), (0.1, "", False), (0.99, SAMPLED, True), (0.0, NOT_SAMPLED, False),
        (0.99, "no such thing", False), (0.0, "no such thing", True),
    ],
)  # fmt: skip
def test_a_client_decides_or_else_the_ratio(draw: float, headers: str, is_traced: bool) -> None:
    exported = Exported(ratio=0.1, draw=draw)
    assert (exported.tracer.begin(headers, "", 0.0) is not None) == is_traced


def test_events_of_requests_that_are_not_traced_leave_nothing() -> None:
    exported = Exported()
    for event in (accepted(1.0), placed(1.0, 1), finished(2.0)):
        exported.tracer.record(event)
    assert exported.trees == []


def test_the_span_of_a_caller_is_read() -> None:
    caller = read_caller(SAMPLED, "vendor=1")
    assert caller is not None
    assert (f"{caller.trace_id:032x}", f"{caller.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert caller.sampled
    assert caller.state == "vendor=1"
    later = read_caller(f"cc-{TRACE_ID}-{SPAN_ID}-01-what-comes")
    assert later is not None, "versions to come may say more"
    assert read_caller(SAMPLED, "v=" + "x" * 1000) == read_caller(SAMPLED)
    assert read_caller(SAMPLED, "no member\n") == read_caller(SAMPLED)
    several = read_caller(SAMPLED, "a=1, b@c=2")
    assert several is not None
    assert several.state == "a=1, b@c=2"


@pytest.mark.parametrize(
    "wrong",
    [
        "", "00", SAMPLED[:-1], SAMPLED + "-more", SAMPLED.upper(), "ff" + SAMPLED[2:],
        f"00-{'0' * 32}-{SPAN_ID}-01", f"00-{TRACE_ID}-{'0' * 16}-01", SAMPLED.replace("-", "_"),
    ],
)  # fmt: skip
def test_what_is_no_traceparent_is_none(wrong: str) -> None:
    assert read_caller(wrong) is None
