"""Cases that schemathesis makes of our own OpenAPI document: no 5xx, and no answer that the
document does not describe. `make api-cases` sends 2,000 of them to a live k2-nano; here some of
them go to an API server with a scripted model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from mooncake.api.config import ApiConfig
from mooncake.api.http.access import OPERATOR_PATHS
from tests.support.api.server import ScriptedBackend, live_api_server, says
from tests.support.examples import examples
from tests.support.serve.server import serving
from tests.support.serve.server_process import nano_checkpoint
from tests.support.waiting import LONG_S

NUM_CASES = int(os.environ.get("API_CASES", "0"))
"""To a live model; 0 = a few to a scripted one."""

FEW = 150
CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
GENERATING = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
OF_BATCHES = (
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
)
PROBES = ("/health", "/health/startup", "/health/ready", "/health/live")
PLAIN = (
    "/v1/models",
    "/v1/models/{name}",
    "/v1/requests/{name}/receipt",
    "/v1/cluster/bundles/{name}",
    "/tokenizer_info",
    *PROBES,
    "/version",
    "/v1/cluster/status",
)


@contextlib.contextmanager
def scripted_api_server(batch_dir: Path) -> Iterator[str]:
    """Serve an API server over a scripted model from a thread of its own."""
    started, address = threading.Event(), [""]
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        config = ApiConfig(port=0, drain_s=0.2, batch_dir=str(batch_dir))
        backend = ScriptedBackend(says("<think>in</think>hello"))
        async with live_api_server(backend, config=config) as url:
            address[0] = url
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    try:
        assert started.wait(LONG_S)
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(LONG_S)
        loop.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home: Path = tmp_path_factory.mktemp("model")
    if not NUM_CASES:
        with scripted_api_server(home / "batches") as address:
            yield address
        return
    words = ["--colocated", "--dtype", "float32", "--max-model-len", "256"]
    words += ["--batch-dir", str(home / "batches")]
    with serving(str(nano_checkpoint(home)), *words, log=home / "log") as server:
        yield server.url


@pytest.fixture(scope="module")
def document(url: str) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{url}/openapi.json").json()
    of_batches = {path for _, path in OF_BATCHES}
    others = {"/ping", "/metrics", *OPERATOR_PATHS}
    assert set(body["paths"]) == {*GENERATING, *PLAIN, *of_batches, *others}
    return body


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", GENERATING)
def test_bodies(url: str, document: dict[str, Any], path: str, mode: GenerationMode) -> None:
    send(url, document, path, "POST", mode)


@pytest.mark.parametrize("path", PLAIN)
def test_questions(url: str, document: dict[str, Any], path: str) -> None:
    send(url, document, path, "GET", GenerationMode.POSITIVE)


@pytest.mark.parametrize(("method", "path"), OF_BATCHES)
def test_files_and_batches(url: str, document: dict[str, Any], method: str, path: str) -> None:
    send(url, document, path, method, GenerationMode.POSITIVE)


def send(url: str, document: dict[str, Any], path: str, method: str, mode: GenerationMode) -> None:
    """Send this operation's share of the cases and check what comes back."""
    shares = 2 * len(GENERATING) + len(PLAIN) + len(OF_BATCHES)
    operation = schemathesis.openapi.from_dict(document)[path][method]

    @settings(
        max_examples=-(-(NUM_CASES or examples(FEW)) // shares),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        reply = case.call(base_url=url, timeout=LONG_S)
        case.validate_response(reply, checks=CHECKS)

    each()
