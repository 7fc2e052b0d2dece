"""Finished trees as OpenTelemetry's spans, and collectors that are slow, deaf or gone."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from mooncake.telemetry import otlp
from mooncake.telemetry.otlp import OtlpTraces, collector_url
from mooncake.telemetry.traces import Caller, Span, SpanEvent
from tests.support.traces import wait_until_closed

WALL_S = 1_700_000_000
"""The wall clock; the clock of the trees shows 100 s then."""
CALLER = Caller(trace_id=7, span_id=9, sampled=True, state="vendor=1")


def tree() -> Span:
    root = Span("api", 90.0, 99.0, {"gen_ai.request.model": "k2", "http.response.status_code": 503})
    root.error = "status 503"
    placement = root.child("placement", 91.0, 98.5, attempt=1)
    placement.events.append(SpanEvent("first_token", 95.25, {"mooncake.tokens": 1}))
    root.child("delivery", 98.5, 99.0)
    return root


def sent(monkeypatch: pytest.MonkeyPatch, *callers: Caller | None) -> list[ReadableSpan]:
    """Return the spans of one tree for each caller, as they reach an exporter."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    exporter = InMemorySpanExporter()
    traces = OtlpTraces(
        "http://unused", "gateway-1", lambda: 100.0, exporter=exporter,
        wall_ns=lambda: WALL_S * 10**9,
    )  # fmt: skip
    for caller in callers:
        traces.export(tree(), caller)
    traces.close()
    return list(exporter.get_finished_spans())


def test_a_tree_becomes_spans_with_parents_times_and_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans = {span.name: span for span in sent(monkeypatch, None)}
    api, placement = spans["api"], spans["placement"]
    assert spans.keys() == {"api", "placement", "delivery"}
    assert api.parent is None
    assert api.context is not None
    for name in ("placement", "delivery"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == api.context.span_id
        assert parent.trace_id == api.context.trace_id
    assert (api.kind, placement.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert (api.start_time, api.end_time) == ((WALL_S - 10) * 10**9, (WALL_S - 1) * 10**9)
    assert (api.status.status_code, api.status.description) == (StatusCode.ERROR, "status 503")
    assert placement.status.status_code is StatusCode.UNSET
    assert dict(placement.attributes or {}) == {"mooncake.attempt": 1}
    [event] = placement.events
    assert (event.name, event.timestamp) == ("first_token", WALL_S * 10**9 - 4_750_000_000)
    named = dict(api.resource.attributes)
    assert named["service.instance.id"] == "gateway-1"
    assert named["service.name"] == "mine", "OpenTelemetry's own variables count"


def test_a_call_belongs_to_the_span_of_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    for span in sent(monkeypatch, CALLER):
        assert span.context is not None
        assert span.context.trace_id == CALLER.trace_id
        assert span.context.trace_state.to_header() == "vendor=1"
        if span.name == "api":
            assert span.parent is not None
            assert span.parent.is_remote
            assert span.parent.span_id == CALLER.span_id


def test_calls_without_one_are_traces_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = sent(monkeypatch, None, None)
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 2


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.free.wait()
        self.num_taken += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.free.set()


def test_a_collector_that_hangs_is_waited_for_by_nobody_and_costs_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "30")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setattr(otlp, "CLOSE_S", 0.01)
    exporter = Stuck()
    traces = OtlpTraces("http://unused", "g", lambda: 0.0, exporter=exporter)
    for _ in range(100):
        traces.export(tree(), None)  # of three spans
    traces.close()  # returns although it hangs
    exporter.free.set()
    wait_until_closed()
    assert exporter.num_taken <= 50, "one batch in hand, and what the queue holds"


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://host/api/otlp", "https://host/api/otlp"),
    ],
)
def test_a_url_without_a_path_gets_the_usual_one(given: str, url: str) -> None:
    assert collector_url(given) == url
