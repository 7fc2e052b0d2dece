"""Keys with tenants and limits, over real sockets: who is refused, and what is given back."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.api.adapters import chat_call
from mooncake.api.adapters.completion_call import CompletionRenderer
from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig, ApiKey
from mooncake.api.http.access import Keyring
from mooncake.api.http.limits import LOGPROB_BYTES
from mooncake.api.http.server import serve
from mooncake.api.model import ServedModel
from mooncake.base import Failure, FinishReason, GenerateRequest, Priority
from mooncake.telemetry.audit import MOST_A_MINUTE, configure_audit
from mooncake.telemetry.events import EventList, Refused
from mooncake.telemetry.health import Vitals
from tests.support.api.server import (
    Script,
    ScriptedBackend,
    answer,
    refusal,
    says,
    tiny_model,
    tiny_tokenizer,
)
from tests.support.waiting import LONG_S

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
ANSWERS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, ASK),
    (CHAT, ASK | {"use_beam_search": True, "best_of": 2}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "use_beam_search": True, "best_of": 2}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", ASK | {"model": "tiny", "max_tokens": 5}),
]
"""Bodies for all routes that give answers."""
LONG_TOKEN = tiny_tokenizer().special_id("<|tool_calls_section_begin|>")


class Hand:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def now(self) -> float:
        return self.now_s


def key(name: str, **fields: Any) -> ApiKey:
    return ApiKey(digest=hashlib.sha256(name.encode()).digest(), name=name, **fields)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def hangs(request: GenerateRequest) -> list[Any]:
    return [*answer(request, [97, 98])[:2], None]


@asynccontextmanager
async def limited_api_server(
    backend: ScriptedBackend,
    *keys: ApiKey,
    limits: dict[str, int] | None = None,
    model: ServedModel | None = None,
    **served: Any,
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve with `keys`, and yield a client."""
    config = ApiConfig(port=0, keys=keys, drain_s=0.2, **limits or {})
    app = create_app(backend, model or tiny_model(), config, **served)
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(
            app,
            config,
            stop=stop,
            ready=lambda host, port: address.set_result(f"http://{host}:{port}"),
        )
    )
    try:
        async with httpx.AsyncClient(base_url=await address, timeout=LONG_S) as client:
            yield client
    finally:
        stop.set()
        await server


def test_requests_run_for_the_tenant_of_their_key() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        keys = (key("alice", tenant="red"), key("bob", tenant="blue"), key("carl"))
        async with limited_api_server(backend, *keys) as client:
            for name in ("bob", "alice", "carl"):
                for path, body in ((CHAT, ASK), ("/v1/completions", {"prompt": "x", "n": 2})):
                    reply = await client.post(path, json=body, headers=bearer(name))
                    assert reply.status_code == 200
            assert (await client.post(CHAT, json=ASK, headers=bearer("dan"))).status_code == 401
        tenants = [request.tenant for request in backend.requests]
        assert tenants == ["blue"] * 3 + ["red"] * 3 + ["carl"] * 3

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), ANSWERS)
def test_a_key_asks_for_its_own_classes_only(path: str, body: dict[str, Any]) -> None:
    premium, interactive, batch = Priority.PREMIUM, Priority.INTERACTIVE, Priority.BATCH
    named = {"premium": premium, "interactive": interactive, "batch": batch}

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        keys = (key("alice"), key("vip", priorities=(premium, batch)))
        async with limited_api_server(backend, *keys) as client:
            for name, fields, asked, is_allowed in (
                ("alice", {}, "interactive", True),
                ("alice", {"priority": 0}, "interactive", True),
                ("alice", {"priority": "premium"}, "premium", False),
                ("alice", {"priority": -1}, "premium", False),
                ("alice", {"priority": "batch", "stream": True}, "batch", False),
                ("vip", {"priority": "premium", "stream": True}, "premium", True),
                ("vip", {"priority": "batch"}, "batch", True),
                ("vip", {}, "interactive", False),
            ):
                num_before = len(backend.requests)
                reply = await client.post(path, json=body | fields, headers=bearer(name))
                if is_allowed:
                    assert reply.status_code == 200, reply.text
                    assert backend.requests[num_before].priority is named[asked]
                    continue
                assert reply.status_code == 403
                assert f"may not ask for {asked}" in reply.json()["error"]["message"]
                assert len(backend.requests) == num_before

    asyncio.run(main())


def test_openai_s_names_of_classes_count_too() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with limited_api_server(backend, key("alice")) as client:
            for tier, refused in (("default", None), ("priority", "premium"), ("flex", "batch")):
                fields = {"service_tier": tier, "n": 2}
                reply = await client.post(CHAT, json=ASK | fields, headers=bearer("alice"))
                assert reply.status_code == (200 if refused is None else 403)
                if refused is not None:
                    assert reply.json()["error"]["param"] == "priority"
                    assert f"may not ask for {refused}" in reply.json()["error"]["message"]

    asyncio.run(main())


def test_requests_without_a_valid_key_are_recorded() -> None:
    async def main() -> None:
        events = EventList()
        backend = ScriptedBackend(says("hello"))
        async with limited_api_server(backend, key("alice"), recorder=events) as client:
            for name in ("bob", "alice", "x"):
                await client.get("/v1/models", headers=bearer(name))
        refused = [event for event in events.events if isinstance(event, Refused)]
        assert [(each.status, each.reason) for each in refused] == [(401, "no_valid_key")] * 2

    asyncio.run(main())


def test_bodies_of_running_requests_have_a_bound_and_no_key_takes_all() -> None:
    async def main() -> None:
        events = EventList()
        backend = ScriptedBackend(hangs)
        keys = (key("alice"), key("bob"))
        long = ASK | {"user": "x" * 30_000}
        limits = {"max_inflight_body_bytes": 100_000}
        async with (
            limited_api_server(backend, *keys, limits=limits, recorder=events) as client,
            streams(client, backend, long | {"stream": True}, "alice"),
        ):
            reply = await client.post(CHAT, json=long, headers=bearer("alice"))
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
            assert "`max-inflight-body-bytes`" in reply.json()["error"]["message"]
            async with streams(client, backend, long | {"stream": True}, "bob"):
                pass
            reply = await client.post(CHAT, json={}, headers=bearer("alice"))
            assert reply.status_code == 400
        (refused,) = [event for event in events.events if isinstance(event, Refused)]
        assert (refused.status, refused.reason) == (429, "body_bytes_in_flight")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "xy" * 250}),
        ("/detokenize", {"tokens": [LONG_TOKEN] * 200}),
    ],
)
def test_replies_that_are_longer_than_their_bodies_count_among_these(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise one key could have the server hold gigabytes by reading replies slowly."""
    monkeypatch.setattr("mooncake.api.http.access.LEAST_BODY_BYTES", 1)

    async def main() -> None:
        backend = ScriptedBackend(hangs)
        statuses: list[int] = []
        for num_bytes in (3_000, 30_000):
            limits = {"max_inflight_body_bytes": num_bytes}
            async with limited_api_server(backend, key("alice"), limits=limits) as client:
                reply = await client.post(path, json=body, headers=bearer("alice"))
                assert len(json.dumps(body)) < 1_500
                statuses.append(reply.status_code)
        assert statuses == [429, 200]

    asyncio.run(main())


def test_log_probabilities_of_running_requests_have_a_bound_and_no_key_takes_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mooncake.api.http.access.LEAST_LOGPROB_BYTES", 1)

    async def main() -> None:
        events = EventList()
        backend = ScriptedBackend(hangs)
        keys = (key("alice"), key("bob"))
        most = 100 * 3 * LOGPROB_BYTES
        limits = {"max_inflight_logprob_bytes": 2 * most}
        long = ASK | {"max_tokens": 100, "logprobs": True, "top_logprobs": 2, "stream": True}
        short = ASK | {"max_tokens": 1, "logprobs": True}
        async with limited_api_server(backend, *keys, limits=limits, recorder=events) as client:
            async with streams(client, backend, long, "alice"):
                for stream in (True, False):
                    body = short | {"stream": stream}
                    reply = await client.post(CHAT, json=body, headers=bearer("alice"))
                    assert reply.status_code == 429
                    assert reply.headers["retry-after"] == "1"
                    assert "`max-inflight-logprob-bytes`" in reply.json()["error"]["message"]
                for name, body in (("alice", ASK | {"stream": True}), ("bob", short)):
                    async with streams(client, backend, body | {"stream": True}, name):
                        pass
            async with streams(client, backend, long, "alice"):
                pass
        (refused, _) = [event for event in events.events if isinstance(event, Refused)]
        assert (refused.status, refused.reason) == (429, "logprob_bytes_in_flight")

    asyncio.run(main())


@asynccontextmanager
async def streams(
    client: httpx.AsyncClient, backend: ScriptedBackend, body: dict[str, Any], name: str
) -> AsyncIterator[None]:
    """Keep a request running."""
    num_before = backend.num_running
    async with client.stream("POST", CHAT, json=body, headers=bearer(name)) as reply:
        assert reply.status_code == 200
        yield
    async with asyncio.timeout(LONG_S):
        while backend.num_running > num_before:
            await asyncio.sleep(0)


def test_requests_at_a_time_have_a_bound() -> None:
    async def main() -> None:
        backend = ScriptedBackend(hangs)
        stream = ASK | {"stream": True}
        async with limited_api_server(backend, limits={"max_concurrent": 2}) as client:
            async with streams(client, backend, stream, "x"), streams(client, backend, stream, "x"):
                reply = await client.post(CHAT, json=ASK)
                assert reply.status_code == 429
                assert (await client.get("/v1/models")).is_success
            assert (await client.post(CHAT, json={})).status_code == 400

    asyncio.run(main())


class SlowTokenizer:
    """A tokenizer that says when it begins, and goes on when it is told to."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.num_begun = 0
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def encode(self, text: str, **how: Any) -> list[int]:
        self.num_begun += 1
        self.go_on.wait(LONG_S)
        found: list[int] = self._of.encode(text, **how)
        return found


BEFORE_ANY_TOKEN = [
    (CHAT, ASK),
    ("/v1/completions", {"prompt": "x" * 21_000, "truncate_prompt_tokens": 5}),
    ("/v1/messages", ASK | {"model": "tiny", "max_tokens": 5}),
    ("/v1/messages/count_tokens", ASK | {"model": "tiny"}),
    ("/v1/responses", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), BEFORE_ANY_TOKEN)
def test_a_client_that_leaves_during_tokenizing_frees_its_place_at_once(
    path: str, body: dict[str, Any]
) -> None:
    """Its permit and its bytes are free while the tokenizer is still busy with its text."""

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        model = tiny_model()
        slow = SlowTokenizer(model.tokenizer)
        model = dataclasses.replace(model, tokenizer=slow)  # type: ignore[arg-type]
        limits = {"max_inflight_body_bytes": 100_000}
        alice = key("alice", max_concurrent=1)
        async with limited_api_server(backend, alice, limits=limits, model=model) as client:
            asking = asyncio.ensure_future(client.post(path, json=body, headers=bearer("alice")))
            async with asyncio.timeout(LONG_S):
                while not slow.num_begun:
                    await asyncio.sleep(0.01)
                assert (
                    await client.post(CHAT, json={}, headers=bearer("alice"))
                ).status_code == 429
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                while (
                    reply := await client.post(CHAT, json={}, headers=bearer("alice"))
                ).status_code == 429:
                    await asyncio.sleep(0.01)
            assert reply.status_code == 400
            assert not slow.go_on.is_set()
            slow.go_on.set()
            last = await client.post(CHAT, json=ASK, headers=bearer("alice"))
            assert last.status_code == 200
        assert len(backend.requests) == 1, "what was left was never submitted"

    asyncio.run(main())


@pytest.fixture
def slow_writing(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Semaphore, threading.Event]:
    """Have every completion written in the lane, where it waits for the event; the semaphore
    counts those that were begun.
    """
    begun, go_on = threading.Semaphore(0), threading.Event()
    whole = CompletionRenderer.whole

    def slow(self: CompletionRenderer, *of: Any) -> bytes:
        begun.release()
        assert go_on.wait(LONG_S)
        return whole(self, *of)

    monkeypatch.setattr(CompletionRenderer, "whole", slow)
    monkeypatch.setattr("mooncake.api.http.response.MAX_SIZE_HERE", 0)
    return begun, go_on


def asking(client: httpx.AsyncClient, who: str, count: int) -> list[asyncio.Task[httpx.Response]]:
    """Ask for `count` completions at once."""
    body = {"prompt": "x", "max_tokens": 2}
    return [
        asyncio.create_task(client.post("/v1/completions", json=body, headers=bearer(who)))
        for _ in range(count)
    ]


def test_answers_that_are_written_for_one_tenant_hold_up_neither_probes_nor_texts(
    slow_writing: tuple[threading.Semaphore, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = slow_writing
    # No answer that was computed is refused, however many wait.
    monkeypatch.setattr("mooncake.api.api_server.LANE_PLACES", 2)

    async def main() -> None:
        keys = key("alice"), key("bob")
        async with limited_api_server(ScriptedBackend(says("hello")), *keys) as client:
            flood = asking(client, "alice", 50)
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=LONG_S)
            # A probe asks in a thread, too.
            assert (await client.get("/health/live")).status_code == 200
            text = {"prompt": "some text"}
            reply = await client.post("/tokenize", json=text, headers=bearer("bob"))
            assert reply.status_code == 200
            assert not go_on.is_set()
            assert not begun.acquire(blocking=False), "more were begun than there are threads"
            go_on.set()
            assert {each.status_code for each in await asyncio.gather(*flood)} == {200}

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/health/live", "/metrics"])
def test_a_flood_of_what_needs_no_key_asks_once_at_a_time(path: str) -> None:
    """The loop goes on meanwhile: the metrics of many workers take seconds."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    def vitals() -> list[Vitals]:
        begun.release()
        assert go_on.wait(LONG_S)
        return []

    class Slow(ScriptedBackend):
        def metrics(self, for_operator: bool) -> bytes:
            vitals()
            return super().metrics(for_operator)

    async def main() -> None:
        backend = Slow(says("hello"))
        async with limited_api_server(backend, key("alice"), vitals=vitals) as client:
            flood = [asyncio.create_task(client.get(path)) for _ in range(50)]
            assert await asyncio.to_thread(begun.acquire, timeout=LONG_S)
            assert (await client.get("/ping")).status_code == 200
            assert not begun.acquire(blocking=False)
            go_on.set()
            assert {each.status_code for each in await asyncio.gather(*flood)} == {200}

    asyncio.run(main())


def test_a_client_that_leaves_while_its_answer_waits_to_be_written_frees_its_place_at_once(
    slow_writing: tuple[threading.Semaphore, threading.Event],
) -> None:
    begun, go_on = slow_writing

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        keys = key("alice"), key("bob", max_concurrent=1)
        async with limited_api_server(backend, *keys) as client:
            busy = asking(client, "alice", 2)
            for _ in range(2):
                assert await asyncio.to_thread(begun.acquire, timeout=LONG_S)
            (leaving,) = asking(client, "bob", 1)
            async with asyncio.timeout(LONG_S):
                while len(backend.requests) < 3 or backend.num_running:
                    await asyncio.sleep(0.01)
                assert (await client.post(CHAT, json={}, headers=bearer("bob"))).status_code == 429
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                while (
                    reply := await client.post(CHAT, json={}, headers=bearer("bob"))
                ).status_code == 429:
                    await asyncio.sleep(0.01)
            assert reply.status_code == 400
            assert not go_on.is_set()
            go_on.set()
            assert {each.status_code for each in await asyncio.gather(*busy)} == {200}

    asyncio.run(main())
    assert not begun.acquire(blocking=False), "what nobody waits for is not written"


def test_the_cluster_is_shown_to_operators_only() -> None:
    async def main() -> None:
        keys = (key("alice", priorities=tuple(Priority)), key("root", operator=True))
        async with limited_api_server(ScriptedBackend(says("hello")), *keys) as client:
            for path in ("/v1/cluster/status", "/v1/cluster/events"):
                reply = await client.get(path, headers=bearer("alice"))
                assert reply.status_code == 403
                assert "use an operator's key" in reply.json()["error"]["message"]
                assert (await client.get(path)).status_code == 401
                async with client.stream("GET", path, headers=bearer("root")) as shown:
                    assert shown.status_code == 200
            assert (await client.get("/v1/models", headers=bearer("alice"))).is_success

    asyncio.run(main())


def test_every_route_needs_a_key_but_those_that_the_documents_name() -> None:
    open_paths = {
        "/", "/health", "/health/startup", "/health/ready", "/health/live", "/ping", "/metrics",
        "/version", "/docs", "/openapi.json", "/page/x",
    }  # fmt: skip
    operators = {
        "/v1/cluster/status", "/v1/cluster/events", "/v1/cluster/bundles/x", "/pause", "/resume",
        "/sleep", "/wake_up", "/is_paused", "/is_sleeping", "/update_weights",
    }  # fmt: skip

    async def main() -> None:
        app = create_app(ScriptedBackend(says("hello")), tiny_model(), ApiConfig(keys=(key("a"),)))
        seen: set[str] = set()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for route in app.routes:
                path = re.sub(r"{[^}]*}", "x", route.path)
                seen.add(path)
                for method in sorted(route.methods):
                    for name in ("", "nobody"):
                        reply = await client.request(method, path, headers=bearer(name))
                        needs_one = path not in open_paths or (path, name) == ("/metrics", "nobody")
                        assert (reply.status_code == 401) == needs_one, (method, path, name)
                    reply = await client.request(method, path, headers=bearer("a"))
                    refused = "use an operator's key" in reply.text
                    assert refused == (path in operators), (method, path)
                    assert reply.status_code != 401
        assert open_paths | operators <= seen

    asyncio.run(main())


def test_metrics_show_tenants_to_operators_only() -> None:
    async def main() -> None:
        async def shows_tenants(client: httpx.AsyncClient, **headers: str) -> bool:
            reply = await client.get("/metrics", headers=headers)
            assert reply.status_code == 200
            assert "mooncake_up 1" in reply.text
            return "mooncake_of_tenants" in reply.text

        keys = (key("alice", priorities=tuple(Priority)), key("root", operator=True))
        async with limited_api_server(ScriptedBackend(says("hello")), *keys) as client:
            assert not await shows_tenants(client)
            assert not await shows_tenants(client, **bearer("alice"))
            reply = await client.get("/metrics", headers=bearer("nobody"))
            assert reply.status_code == 401, "nobody tries keys unseen"
            assert await shows_tenants(client, **bearer("root"))
        async with limited_api_server(ScriptedBackend(says("hello"))) as client:
            assert await shows_tenants(client), "who needs no key is an operator"

    asyncio.run(main())


def test_open_routes_look_no_key_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe costs the same however many keys there are."""
    asked: list[bytes] = []
    monkeypatch.setattr(Keyring, "find", lambda _, key: asked.append(key))

    async def main() -> None:
        async with limited_api_server(ScriptedBackend(says("hello")), key("alice")) as client:
            for path in ("/health", "/ping", "/metrics", "/version"):
                assert (await client.get(path)).status_code == 200
            assert not asked
            assert (await client.get("/ping", headers=bearer("alice"))).status_code == 200
            assert not asked
            assert (await client.get("/v1/models", headers=bearer("alice"))).status_code == 401
            assert asked

    asyncio.run(main())


def test_who_uses_operators_routes_and_who_fails_is_written_down(tmp_path: Path) -> None:
    """By the names of keys: no line has a key, also none of those that do not count."""
    place = tmp_path / "audit.jsonl"

    async def main() -> None:
        keys = (key("alice"), key("root", operator=True))
        async with limited_api_server(ScriptedBackend(says("hello")), *keys) as client:
            for name in ("nobody", "alice", "root", "root"):
                async with client.stream("GET", "/v1/cluster/status", headers=bearer(name)):
                    pass

    configure_audit("gw", str(place))
    try:
        asyncio.run(main())
    finally:
        configure_audit("", None)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert [(each["event"], each.get("who")) for each in lines] == [
        ("proof_failed", None), ("operator_route_refused", "alice"), ("operator_route", "root"),
    ]  # fmt: skip
    assert {each["path"] for each in lines} == {"/v1/cluster/status"}
    assert {each["whence"] for each in lines} == {"127.0.0.1"}
    assert "nobody" not in place.read_text()


def test_a_key_that_asks_for_many_paths_of_operators_takes_nobody_s_lines(tmp_path: Path) -> None:
    place = tmp_path / "audit.jsonl"

    async def main() -> None:
        async with limited_api_server(ScriptedBackend(says("hello")), key("alice")) as client:
            for number in range(MOST_A_MINUTE + 5):
                path = f"/v1/cluster/{number}"
                async with client.stream("GET", path, headers=bearer("alice")):
                    pass

    configure_audit("gw", str(place))
    try:
        asyncio.run(main())
    finally:
        configure_audit("", None)
    assert len(place.read_text().splitlines()) == MOST_A_MINUTE


def test_a_client_that_leaves_while_its_schema_is_compiled_frees_its_place_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    whole = chat_call.chat_constraint

    def slow(*args: Any) -> Any:
        begun.set()
        go_on.wait(LONG_S)
        return whole(*args)

    monkeypatch.setattr(chat_call, "chat_constraint", slow)

    async def main() -> None:
        backend = ScriptedBackend(says("{}"))
        body = ASK | {"response_format": {"type": "json_object"}}
        async with limited_api_server(backend, key("alice", max_concurrent=1)) as client:
            asking = asyncio.ensure_future(client.post(CHAT, json=body, headers=bearer("alice")))
            assert await asyncio.to_thread(begun.wait, LONG_S)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(LONG_S):
                while (
                    reply := await client.post(CHAT, json=ASK, headers=bearer("alice"))
                ).status_code == 429:
                    await asyncio.sleep(0.01)
            assert reply.status_code == 200, "texts do not wait behind schemas either"
            go_on.set()
        assert len(backend.requests) == 1

    asyncio.run(main())


def test_too_many_requests_are_429_with_advice_and_are_recorded() -> None:
    async def main() -> None:
        clock, events = Hand(), EventList()
        backend = ScriptedBackend(says("hello"))
        keys = (key("alice", requests_per_min=2), key("bob"))
        async with limited_api_server(backend, *keys, clock=clock, recorder=events) as client:
            for _ in range(2):
                assert (await client.post(CHAT, json=ASK, headers=bearer("alice"))).is_success
            reply = await client.post(CHAT, json=ASK, headers=bearer("alice"))
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "30"
            assert reply.json()["error"] == {
                "message": "Rate limit of key 'alice': 2 requests a minute.",
                "type": "RateLimitError", "param": None, "code": 429,
            }  # fmt: skip
            assert (await client.post(CHAT, json=ASK, headers=bearer("bob"))).is_success
            assert (await client.get("/v1/models", headers=bearer("alice"))).is_success
            clock.now_s += 30
            assert (await client.post(CHAT, json=ASK, headers=bearer("alice"))).is_success
        (refused,) = [event for event in events.events if isinstance(event, Refused)]
        assert (refused.status, refused.reason) == (429, "key_requests_per_min")
        assert refused.request_id == reply.headers["x-request-id"]

    asyncio.run(main())


def test_prompt_and_answer_are_charged_streamed_or_not() -> None:
    async def main() -> None:
        clock = Hand()
        async with limited_api_server(
            ScriptedBackend(says("hello world")), key("alice", tokens_per_min=10), clock=clock
        ) as client:
            whole = await client.post(CHAT, json=ASK, headers=bearer("alice"))
            used = whole.json()["usage"]["total_tokens"]
            assert used > 10
            streamed = ASK | {"stream": True}
            for owed in (used - 10, used - 1):  # ten tokens were there, then just one
                reply = await client.post(CHAT, json=streamed, headers=bearer("alice"))
                assert reply.status_code == 429
                wait_s = (owed + 1) * 6
                assert reply.headers["retry-after"] == str(wait_s)
                clock.now_s += wait_s
                reply = await client.post(CHAT, json=streamed, headers=bearer("alice"))
                assert reply.status_code == 200

    asyncio.run(main())


def shed(request: GenerateRequest) -> list[Any]:
    """Its prompt was computed, and then it would have missed its limits."""
    (refused,) = refusal(request, Failure.unavailable("late"))
    return [msgspec.structs.replace(refused, reason=FinishReason.ERROR)]


def breaks(request: GenerateRequest) -> list[Any]:
    return [answer(request, [97, 98])[0], *shed(request)]


def refuses(status: int) -> Script:
    failure = Failure(status=status, error_type="RefusedError", message="not now")
    return lambda request: refusal(request, failure)


ENDS: dict[str, tuple[Script, int]] = {
    "answered": (lambda request: answer(request, [97, 98, 99], reason=FinishReason.STOP), 3),
    "busy": (refuses(429), 0),
    "no worker": (refuses(503), 0),
    "too large": (refuses(400), 0),
    "computed and shed": (shed, 0),
    "broken off": (breaks, 1),
}
"""How a call may end, and how many tokens each of its answers has had by then."""


@given(
    st.lists(st.tuples(st.sampled_from(sorted(ENDS)), st.booleans(), st.integers(1, 3)), max_size=8)
)
@settings(max_examples=25, deadline=None)
def test_prompts_of_refused_calls_are_given_back_once(calls: list[tuple[str, bool, int]]) -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        config = ApiConfig(keys=(key("alice", tokens_per_min=1 << 20),))
        app = create_app(backend, tiny_model(), config, clock=Hand())
        account = app.state.keyring.find(b"alice")
        spent = 0
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for name, streams, n in calls:
                backend.script, num_tokens = ENDS[name]
                body = ASK | {"n": n, "stream": streams}
                reply = await client.post(CHAT, json=body, headers=bearer("alice"))
                if name == "answered":
                    assert reply.status_code == 200
                if reply.status_code == 200:  # a stream that breaks off has been an answer
                    spent += len(backend.requests[-1].prompt_tokens) + n * num_tokens
                assert account._tokens.level(1000.0) == (1 << 20) - spent

    asyncio.run(main())


def test_a_call_that_is_left_gives_its_permit_back() -> None:
    async def main() -> None:
        backend = ScriptedBackend(hangs)
        async with limited_api_server(backend, key("alice", max_concurrent=1)) as client:
            for _ in range(3):
                async with client.stream(
                    "POST", CHAT, json=ASK | {"stream": True}, headers=bearer("alice")
                ) as reply:
                    assert reply.status_code == 200
                    refused = await client.post(CHAT, json=ASK, headers=bearer("alice"))
                    assert refused.status_code == 429
                    assert "1 requests at a time" in refused.json()["error"]["message"]
                async with asyncio.timeout(LONG_S):
                    while backend.num_running:
                        await asyncio.sleep(0)
                    while await is_refused(client):
                        await asyncio.sleep(0)
        assert backend.num_running == 0

    async def is_refused(client: httpx.AsyncClient) -> bool:
        """Whether the key is at its limit; a body that is not valid costs no tokens."""
        reply = await client.post(CHAT, json={}, headers=bearer("alice"))
        assert reply.status_code in (400, 429)
        return reply.status_code == 429

    asyncio.run(main())


def test_calls_that_fail_give_their_permits_back() -> None:
    class Broken(ScriptedBackend):
        def submit(self, request: GenerateRequest, sink: Any) -> None:
            raise ValueError("broken")

    async def main() -> None:
        async with limited_api_server(Broken(says("x")), key("alice", max_concurrent=1)) as client:
            for body, status in (({}, 400), (ASK, 500), (ASK | {"model": "no"}, 404), (ASK, 500)):
                reply = await client.post(CHAT, json=body, headers=bearer("alice"))
                assert reply.status_code == status

    asyncio.run(main())


def pauses(request: GenerateRequest) -> list[Any]:
    first, *rest = answer(request, [97, 98])
    return [first, None, *rest]


def test_keys_may_change_while_calls_run() -> None:
    async def main() -> None:
        clock = Hand()
        backend = ScriptedBackend(pauses)
        alice, bob = key("alice", max_concurrent=1, requests_per_min=3), key("bob")
        config = ApiConfig(keys=(alice, bob), api_keys=("fixed",))
        app = create_app(backend, tiny_model(), config, clock=clock)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

            async def ask(name: str) -> int:
                return (await client.post(CHAT, json=ASK, headers=bearer(name))).status_code

            running = [asyncio.create_task(ask(name)) for name in ("alice", "bob")]
            while backend.num_hanging < 2:
                await asyncio.sleep(0)
            app.state.keyring.replace([alice, key("carl")])
            assert await ask("alice") == 429, "her running call still counts"
            assert await ask("bob") == 401
            changed = key("alice", max_concurrent=1, requests_per_min=3, tenant="red")
            app.state.keyring.replace([changed, key("carl")])
            backend.script = says("hello")
            for name in ("carl", "fixed"):
                assert await ask(name) == 200
            backend.resume()
            assert await asyncio.gather(*running) == [200, 200], "also that of a key taken out"
            assert [await ask("alice") for _ in range(3)] == [200, 200, 429]
            assert backend.requests[-1].tenant == "red"
            app.state.keyring.replace([key("alice")])
            assert await ask("alice") == 200

    asyncio.run(main())


def test_without_keys_only_names_of_this_machine_are_answered() -> None:
    """A page of another site may have its name resolve to 127.0.0.1; it cannot choose `Host`."""

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with limited_api_server(backend) as client:
            for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1"):
                reply = await client.post(CHAT, json=ASK, headers={"Host": host})
                assert reply.status_code == 403, host
                assert "Host" in reply.json()["error"]["message"]
            for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"):
                assert (await client.post(CHAT, json=ASK, headers={"Host": host})).is_success, host
        async with limited_api_server(backend, key("alice")) as client:
            headers = {"Host": "llm.example", **bearer("alice")}
            assert (await client.post(CHAT, json=ASK, headers=headers)).is_success

    asyncio.run(main())


def test_without_keys_no_page_of_another_site_sends_what_its_browser_does_not_ask_for() -> None:
    """Neither a form nor an empty body, to any route. The server's own page and allowed ones do."""
    own, allowed = "http://localhost:8000", "https://app.example"
    form = {"files": {"file": ("x.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    sent: list[dict[str, Any]] = [{}, form, {"content": b"{}", "headers": {"Content-Type": ""}}]

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        app = create_app(backend, tiny_model(), ApiConfig(port=0, cors_origins=(allowed,)))
        paths = [route.path for route in app.routes if "POST" in route.methods]
        assert {"/v1/files", "/v1/batches/{batch_id}/cancel", "/sleep", CHAT} <= {*paths}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=own) as client:
            for path in paths:
                for origin, refused in (
                    ("https://evil.example", True), ("http://localhost:3000", True),
                    ("null", True), (own, False), (allowed, False), (None, False),
                ):  # fmt: skip
                    for body in sent:
                        named = {
                            **body.get("headers", {}),
                            **({"Origin": origin} if origin else {}),
                        }
                        reply = await client.post(path, **{**body, "headers": named})
                        assert ("no page of another site" in reply.text) == refused, (path, origin)
                        assert reply.status_code == 403 or not refused
            foreign = {"Origin": "https://evil.example"}
            assert (await client.post(CHAT, json=ASK, headers=foreign)).is_success, "it was asked"
        async with limited_api_server(backend, key("alice")) as client:
            reply = await client.post("/v1/files", headers=foreign | bearer("alice"), **form)
            assert "batch-dir" in reply.text, "no page has the key of others"

    asyncio.run(main())
