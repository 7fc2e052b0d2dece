"""Timelines of the latest requests, bounded, as JSON."""

import msgspec
import pytest

from mooncake.base import FinishReason, Role
from mooncake.telemetry.events import Accepted, Finished, Requeued, Tokens, WorkerLeft
from mooncake.telemetry.trace import TraceLog


def accepted(name: str, at_s: float = 0.0) -> Accepted:
    return Accepted(request_id=name, at_s=at_s, num_prompt_tokens=5, max_tokens=8)


def test_a_timeline_tells_a_request_from_begin_to_end() -> None:
    log = TraceLog()
    log.record(accepted("r"))
    for index in range(100):
        log.record(
            Tokens(request_id="r", at_s=1.0 + index, start=index, num_tokens=1, worker_id="d0")
        )
    log.record(
        Finished(
            request_id="r",
            at_s=200.0,
            reason=FinishReason.LENGTH,
            num_prompt_tokens=5,
            num_output_tokens=100,
        )
    )
    text = log.dump("r")
    assert text is not None
    trace = msgspec.json.decode(text)
    assert [event["event"] for event in trace["events"]] == ["accepted", "finished"]
    assert (trace["num_tokens"], trace["last_token_s"]) == (100, 100.0)


def test_only_the_latest_requests_are_kept() -> None:
    log = TraceLog(num_requests=2)
    for name in ("a", "b", "c"):
        log.record(accepted(name))
    assert log.request_ids() == ["b", "c"]
    assert log.dump("a") is None


def test_a_restless_request_is_bounded() -> None:
    log = TraceLog(events_per_request=3)
    for attempt in range(50):
        log.record(
            Requeued(request_id="r", at_s=0.0, attempt=attempt, reason="x", num_output_tokens=0)
        )
    text = log.dump("r")
    assert text is not None
    assert len(msgspec.json.decode(text)["events"]) == 3


def test_workers_have_no_timeline() -> None:
    log = TraceLog()
    log.record(WorkerLeft(worker_id="d0", at_s=0.0, role=Role.DECODE, reason="x"))
    assert log.request_ids() == []


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one"):
        TraceLog(num_requests=0)
