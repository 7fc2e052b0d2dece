"""Traces of a real cluster: gateway, prefill and decode are processes, and a collector gets one
tree of each call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.api.http_server import Reply, TableServer
from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.traces import NOT_SAMPLED, SAMPLED, SPAN_ID, TRACE_ID
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--max-model-len", "1024")
PROMPT = list(range(1, 301))


@pytest.fixture
def collector() -> Iterator[TableServer]:
    with TableServer({"POST /v1/traces": Reply()}) as collector:
        yield collector


def test_one_tree_has_what_gateway_prefill_and_decode_did(
    collector: TableServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # ms
    words = (
        "--prefill", "1", "--decode", "1", "--port", "0", "--max-num-batched-tokens", "128",
        "--otlp-traces-endpoint", collector.url, "--otlp-traces-sampling-ratio", "0",
    )  # fmt: skip
    with ServerProcess(str(nano_checkpoint(tmp_path)), *SMALL, *words) as server:
        server.wait_until_serving()
        for headers in ({"traceparent": SAMPLED}, {"traceparent": NOT_SAMPLED}, {}):
            reply = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True},
                headers=headers,
                timeout=300,
            )
            assert reply.status_code == 200, reply.text
        wait_until(
            lambda: any(b"delivery" in asked.body for asked in collector.asked),
            "the last span has come",
        )
        code, _ = server.stop()
        assert code in (0, 130)
    spans = [
        span
        for asked in collector.asked
        for told in ExportTraceServiceRequest.FromString(asked.body).resource_spans
        for scope in told.scope_spans
        for span in scope.spans
    ]
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}, "of the call that asked for it"
    names = {span.span_id: span.name for span in spans}
    names[bytes.fromhex(SPAN_ID)] = "client"
    parts = sorted((names[span.parent_span_id], span.name) for span in spans)
    assert parts == sorted(
        [("client", "api"), ("api", "request"), ("api", "delivery"), ("request", "queue"),
         ("request", "placement")]
        + [("placement", name) for name in ("queue", "prefill", "reserve", "transfer", "decode")]
    )  # fmt: skip
    by_name = {span.name: span for span in spans}
    for span in spans:
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    facts = {
        name: {
            each.key: each.value.int_value or each.value.string_value for each in span.attributes
        }
        for name, span in by_name.items()
    }
    assert facts["prefill"]["mooncake.worker"] == "prefill-0"
    assert facts["decode"]["mooncake.worker"] == "decode-0"
    assert facts["transfer"]["mooncake.path"] == "shm"
    assert "mooncake.nic" not in facts["transfer"], "no NIC carries shared memory"
    assert int(facts["transfer"]["mooncake.bytes"]) > 0
    assert [event.name for event in by_name["prefill"].events] == ["chunk"] * 3
    assert facts["api"]["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert facts["api"]["gen_ai.usage.output_tokens"] == 8
