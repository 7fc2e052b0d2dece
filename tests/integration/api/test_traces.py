"""Traces of calls as the API server makes them: which calls, what of them, and no text."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from mooncake.api.config import ApiConfig
from mooncake.base import Failure, GenerateRequest
from mooncake.telemetry import otlp
from mooncake.telemetry.otlp import OtlpTraces
from mooncake.telemetry.traces import Span, Tracer
from tests.support.api.http_server import Reply, TableServer
from tests.support.api.server import ScriptedBackend, answer, live_api_server, refusal, says
from tests.support.traces import (
    NOT_SAMPLED,
    SAMPLED,
    SPAN_ID,
    Exported,
    is_whole,
    outline,
    wait_until_closed,
)
from tests.support.waiting import LONG_S

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
CHAT = "/v1/chat/completions"
CONFIG = ApiConfig(port=0, drain_s=0.2)
KEY = "a-key"


def post(
    backend: ScriptedBackend,
    exported: Exported | Tracer,
    body: dict[str, Any],
    *,
    path: str = CHAT,
    headers: dict[str, str] | None = None,
    config: ApiConfig = CONFIG,
) -> httpx.Response:
    tracer = exported if isinstance(exported, Tracer) else exported.tracer

    async def main() -> httpx.Response:
        async with (
            live_api_server(backend, config=config, tracer=tracer) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(main())


def texts_of(span: Span) -> list[str]:
    own = [str(value) for value in (span.name, span.error, *span.attributes.values())]
    return own + [text for child in span.children for text in texts_of(child)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_has_one_root_with_its_figures(stream: bool) -> None:
    exported, backend = Exported(), ScriptedBackend(says("hello", cached=2))
    reply = post(backend, exported, {**ASK, "stream": stream, "temperature": 0.5})
    assert reply.status_code == 200
    root = exported.root
    assert outline(root) == ["api", ". request", ". delivery"]
    assert is_whole(root)
    [request] = backend.requests
    assert request.traced, "its workers tell what they do for it"
    attributes = dict(root.attributes)
    assert attributes.pop("gen_ai.latency.e2e") == root.end_s - root.start_s
    assert str(attributes.pop("gen_ai.response.id")).startswith("chatcmpl-")
    assert attributes == {
        "http.request.method": "POST", "http.route": CHAT, "http.response.status_code": 200,
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "mooncake",
        "gen_ai.request.model": "tiny", "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 9, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0, "gen_ai.usage.input_tokens": len(request.prompt_tokens),
        "gen_ai.usage.output_tokens": 2, "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
    }  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses"])
def test_no_text_is_in_a_trace(path: str) -> None:
    exported = Exported()
    secret = "the hidden word"
    body = {
        CHAT: {"messages": [{"role": "user", "content": secret}]},
        "/v1/completions": {"prompt": secret},
        "/v1/messages": {"messages": [{"role": "user", "content": secret}], "max_tokens": 9,
                         "model": "tiny"},
        "/v1/responses": {"input": secret},
    }[path]  # fmt: skip
    assert post(ScriptedBackend(says("hello")), exported, body, path=path).status_code == 200
    texts = texts_of(exported.root)
    assert path in texts
    assert not any("hidden" in text or "hello" in text for text in texts)


def test_each_sequence_of_a_call_is_a_part() -> None:
    exported = Exported()
    backend = ScriptedBackend(says("hello"))
    post(backend, exported, {**ASK, "n": 3})
    assert outline(exported.root) == ["api", *[". request"] * 3, ". delivery"]
    assert exported.root.attributes["gen_ai.response.finish_reasons"] == ["stop"] * 3
    many = Exported()
    backend = ScriptedBackend(says("hello"))
    post(backend, many, {**ASK, "n": 20})
    assert outline(many.root) == ["api", ". delivery"]
    assert not any(request.traced for request in backend.requests)


def test_a_call_belongs_to_the_trace_of_its_client() -> None:
    exported = Exported(ratio=0.0)
    post(ScriptedBackend(says("hello")), exported, ASK, headers={"traceparent": SAMPLED})
    [(_, caller)] = exported.trees
    assert caller is not None
    assert f"{caller.span_id:016x}" == SPAN_ID


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT, ASK, {"traceparent": NOT_SAMPLED}),
        ("/tokenize", {"prompt": "hi"}, {}),
    ],
)
def test_others_are_not_traced(path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
    exported, backend = Exported(), ScriptedBackend(says("hello"))
    assert post(backend, exported, body, path=path, headers=headers).status_code == 200
    assert exported.trees == []
    assert not any(request.traced for request in backend.requests)


def test_who_has_no_key_is_not_traced() -> None:
    exported = Exported()
    config = ApiConfig(port=0, drain_s=0.2, api_keys=(KEY,))
    reply = post(ScriptedBackend(says("hello")), exported, ASK, config=config)
    assert reply.status_code == 401
    assert exported.trees == []


@pytest.mark.parametrize(("status", "fails"), [(503, True), (429, False)])
def test_a_refusal_has_its_status(status: int, fails: bool) -> None:
    failure = Failure(status=status, error_type="Any", message="no room for the hidden word")
    exported = Exported()
    backend = ScriptedBackend(lambda request: refusal(request, failure))
    assert post(backend, exported, ASK).status_code == status
    assert exported.root.attributes["http.response.status_code"] == status
    assert (exported.root.error == f"status {status}") == fails
    assert not any("hidden" in text for text in texts_of(exported.root))


def test_a_call_that_is_refused_before_it_begins_has_its_root() -> None:
    exported = Exported()
    assert post(ScriptedBackend(says("hello")), exported, {"messages": []}).status_code == 400
    assert outline(exported.root) == ["api", ". delivery"]
    assert exported.root.attributes["http.response.status_code"] == 400


def test_a_client_that_left_is_seen() -> None:
    exported = Exported()

    def hangs(request: GenerateRequest) -> Any:
        return [*answer(request, [97, 98])[:1], None]

    async def main() -> None:
        backend = ScriptedBackend(hangs)
        async with live_api_server(backend, config=CONFIG, tracer=exported.tracer) as url:
            async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as client:
                asked = asyncio.create_task(client.post(CHAT, json=ASK))
                while not backend.num_hanging:
                    await asyncio.sleep(0)
                asked.cancel()
            await backend.abort_seen.wait()

    asyncio.run(main())
    assert exported.root.attributes["http.response.status_code"] == 499
    assert exported.root.attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert exported.root.error is None


def test_a_beam_search_shows_its_root() -> None:
    exported = Exported()
    backend = ScriptedBackend(lambda request: answer(request, [97]))
    body = {"prompt": "hi", "max_tokens": 2, "n": 2, "use_beam_search": True, "temperature": 0}
    reply = post(backend, exported, body, path="/v1/completions")
    assert reply.status_code == 200, reply.text
    assert not any(request.traced for request in backend.requests)
    assert outline(exported.root) == ["api", ". delivery"]


def test_a_call_that_reads_the_answer_of_another_is_not_traced() -> None:
    exported, backend = Exported(), ScriptedBackend(says("hello"))

    async def main() -> None:
        async with (
            live_api_server(backend, config=CONFIG, tracer=exported.tracer) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            for _ in range(3):
                reply = await client.post(CHAT, json=ASK, headers={"Idempotency-Key": "one"})
                assert reply.status_code == 200

    asyncio.run(main())
    assert len(backend.requests) == 1
    assert outline(exported.root) == ["api", ". request", ". delivery"]
    assert exported.root.error is None


def ask_with_collector(url: str) -> int:
    """Ask a server whose traces go to this collector, end it, and return the answer's status."""
    traces = OtlpTraces(url, "gateway", lambda: 0.0)
    tracer = Tracer(traces.export, 1.0, lambda: 0.0)
    try:
        return post(ScriptedBackend(says("hello")), tracer, ASK).status_code
    finally:
        traces.close()
        wait_until_closed()


def test_a_collector_gets_the_spans() -> None:
    with TableServer({"POST /v1/traces": Reply()}) as collector:
        assert ask_with_collector(collector.url) == 200
    [sent] = collector.asked
    [told] = ExportTraceServiceRequest.FromString(sent.body).resource_spans
    assert sorted(each.name for each in told.scope_spans[0].spans) == ["api", "delivery", "request"]


@pytest.mark.parametrize("listens", [False, True])
def test_without_an_answer_of_the_collector_calls_are_answered(
    listens: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setattr(otlp, "CLOSE_S", 0.01)
    monkeypatch.setattr(logging.getLogger("opentelemetry"), "propagate", True)
    caplog.set_level(logging.WARNING, "opentelemetry")
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        if listens:  # and never accepts
            deaf.listen()
        assert ask_with_collector(f"http://127.0.0.1:{deaf.getsockname()[1]}") == 200
    assert "Failed to export spans batch" in caplog.text
