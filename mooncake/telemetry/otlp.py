"""Sends finished traces to a collector by OTLP over HTTP. This is the only module that imports
OpenTelemetry. It is imported only when `--otlp-traces-endpoint` is given.

The SDK's batch processor owns a bounded queue and a thread, so exporting a trace never waits. When
the queue is full, its oldest spans are dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from mooncake import __version__
from mooncake.telemetry.traces import Caller, Span

PATH = "/v1/traces"
"""The path at which collectors take traces, for a URL that names no path."""
CLOSE_S = 2.0
"""The time to send what is still queued at the end. If the collector does not answer, it
is lost.
"""


def collector_url(endpoint: str) -> str:
    """Return where to send traces: `endpoint`, with the usual path when it has none."""
    parts = urlsplit(endpoint)
    return urlunsplit(parts._replace(path=PATH)) if parts.path in ("", "/") else endpoint


class OtlpTraces:
    """Makes OpenTelemetry spans of finished trees and sends them away."""

    def __init__(
        self,
        endpoint: str,
        instance: str,
        now: Callable[[], float],
        *,
        exporter: SpanExporter | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """instance: names this process among those of the service. now: the clock of the trees.

        Headers, certificates, compression, the queue's size and the service's name come from the
        SDK's own variables (`OTEL_…`).
        """
        resource = Resource.create(
            {
                "service.name": "mooncake",
                "service.version": __version__,
                "service.instance.id": instance,
            }
        ).merge(OTELResourceDetector().detect())
        self._now = now
        self._wall_ns = wall_ns
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False
        )
        exporter = exporter or OTLPSpanExporter(endpoint=collector_url(endpoint))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mooncake", __version__)

    def export(self, root: Span, caller: Caller | None) -> None:
        """Queue a tree. Its times are converted to the wall clock's present time."""
        parent = None
        if caller is not None:
            flags = TraceFlags(TraceFlags.SAMPLED)
            state = TraceState.from_header([caller.state]) if caller.state else None
            context = SpanContext(caller.trace_id, caller.span_id, True, flags, state)
            parent = set_span_in_context(NonRecordingSpan(context))
        self._add(root, parent, self._wall_ns() - _ns(self._now()), SpanKind.SERVER)

    def _add(self, span: Span, parent: Context | None, offset_ns: int, kind: SpanKind) -> None:
        made = self._tracer.start_span(
            span.name,
            context=parent or Context(),
            kind=kind,
            attributes=span.attributes,
            start_time=_ns(span.start_s) + offset_ns,
        )
        for event in span.events:
            made.add_event(event.name, event.attributes, _ns(event.at_s) + offset_ns)
        if span.error is not None:
            made.set_status(Status(StatusCode.ERROR, span.error))
        inside = set_span_in_context(made, Context())
        for child in span.children:
            self._add(child, inside, offset_ns, SpanKind.INTERNAL)
        made.end(_ns(span.end_s) + offset_ns)

    def close(self) -> None:
        """Send what is queued, as far as the collector takes it in `CLOSE_S`."""
        # Another thread does it, because the SDK waits longer than that for a collector that does
        # not answer.
        sending = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        sending.start()
        sending.join(CLOSE_S)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
