"""Connections: who may come in, what a disconnect and a shutdown do, what operators see."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import msgspec
import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.http.server import bind
from mooncake.base import ConfigError, Failure, FinalEvent, FinishReason, GenerateRequest
from mooncake.telemetry.health import Probe
from tests.support.api.server import ScriptedBackend, answer, live_api_server, refusal, says
from tests.support.waiting import LONG_S

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def hangs(request: GenerateRequest) -> list[Any]:
    """Two tokens, then nothing."""
    return [*answer(request, [97, 98])[:2], None]


def hangs_at_once(request: GenerateRequest) -> list[Any]:
    return [None]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [hangs, hangs_at_once])
def test_client_that_goes_away_has_all_its_requests_aborted(stream: bool, script: Any) -> None:
    async def main() -> None:
        backend = ScriptedBackend(script)
        async with live_api_server(backend) as url:
            host, port = url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            body = json.dumps(ASK | {"stream": stream, "n": 2}).encode()
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            await writer.drain()
            while backend.num_running < 2:
                await asyncio.sleep(0)
            if stream and script is hangs:
                await reader.readuntil(b"\n\n")
            writer.close()
            async with asyncio.timeout(LONG_S):
                while backend.num_running:
                    await backend.abort_seen.wait()
                    await asyncio.sleep(0)
        assert len(backend.aborted) == 2

    asyncio.run(main())


def test_shutdown_takes_nothing_new_and_lets_calls_finish() -> None:
    async def main() -> None:
        def script(request: GenerateRequest) -> list[Any]:
            first, *rest = answer(request, [97, 98])
            return [first, None, *rest]

        backend = ScriptedBackend(script)
        stop = asyncio.Event()
        config = ApiConfig(port=0, drain_s=LONG_S)
        async with (
            live_api_server(backend, config=config, stop=stop) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
            client.stream("POST", url + CHAT, json=ASK | {"stream": True}) as reply,
        ):
            stop.set()
            while not backend.drained:
                await asyncio.sleep(0)
            async with httpx.AsyncClient(
                base_url=url, timeout=LONG_S
            ) as other:  # a connection of its own
                late = await other.post(CHAT, json=ASK)
                assert (late.status_code, late.headers["retry-after"]) == (503, f"{LONG_S:g}")
                assert late.json()["error"]["message"] == "the server is shutting down"
                assert (await other.get("/ping")).status_code == 200
                health = await other.get("/health")
                assert (health.status_code, health.json()) == (503, late.json())
            backend.resume()
            text = "".join([part async for part in reply.aiter_text()])
        host, port = url.removeprefix("http://").split(":")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, int(port))
        assert len(backend.requests) == 1
        assert text.endswith("data: [DONE]\n\n")
        assert '"finish_reason":"stop"' in text
        assert backend.aborted == []

    asyncio.run(main())


def test_shutdown_ends_what_does_not_finish_with_an_error_event() -> None:
    async def main() -> None:
        backend = ScriptedBackend(hangs)
        stop = asyncio.Event()
        config = ApiConfig(port=0, drain_s=0.05)
        async with (
            live_api_server(backend, config=config, stop=stop) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
            client.stream("POST", url + CHAT, json=ASK | {"stream": True}) as reply,
        ):
            stop.set()
            text = "".join([part async for part in reply.aiter_text()])
        *_, event, done, rest = text.split("\n\n")
        error = json.loads(event.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert (done, rest) == ("data: [DONE]", "")
        assert len(backend.aborted) == 1

    asyncio.run(main())


def test_refusals_have_their_status_and_retry_after_even_for_streams() -> None:
    failure = Failure(
        status=429, error_type="RateLimitError", message="TTFT limit", retry_after_s=2.3
    )

    async def main() -> None:
        backend = ScriptedBackend(lambda request: refusal(request, failure))
        async with live_api_server(backend) as url, httpx.AsyncClient(timeout=LONG_S) as client:
            for stream in (True, False):
                reply = await client.post(url + CHAT, json=ASK | {"stream": stream})
                assert reply.status_code == 429
                assert reply.headers["retry-after"] == "3"
                assert reply.json()["error"] == {
                    "message": "TTFT limit", "type": "RateLimitError", "param": None, "code": 429,
                }  # fmt: skip

    asyncio.run(main())


def test_failure_in_mid_stream_is_an_error_event() -> None:
    def script(request: GenerateRequest) -> list[Any]:
        return [
            answer(request, [97])[0],
            FinalEvent(
                request_id=request.request_id,
                reason=FinishReason.ERROR,
                num_prompt_tokens=1,
                num_output_tokens=1,
                failure=Failure(status=500, error_type="InternalServerError", message="lost"),
            ),
        ]

    async def main() -> None:
        backend = ScriptedBackend(script)
        async with live_api_server(backend) as url, httpx.AsyncClient(timeout=LONG_S) as client:
            reply = await client.post(url + CHAT, json=ASK | {"stream": True, "n": 2})
            assert reply.status_code == 200
            *_, event, done, _ = reply.text.split("\n\n")
            assert json.loads(event.removeprefix("data: "))["error"]["message"] == "lost"
            assert done == "data: [DONE]"
            assert reply.text.count('"error"') == 1
            whole = await client.post(url + CHAT, json=ASK)
            assert (whole.status_code, whole.json()["error"]["message"]) == (500, "lost")

    asyncio.run(main())


def test_failing_backend_is_a_500_in_our_shape() -> None:
    class Broken(ScriptedBackend):
        def submit(self, request: GenerateRequest, sink: Any) -> None:
            raise ValueError("secret detail")

    async def main() -> None:
        async with (
            live_api_server(Broken(says("x"))) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            for stream in (True, False):
                reply = await client.post(url + CHAT, json=ASK | {"stream": stream})
                assert reply.status_code == 500
                assert reply.json()["error"]["type"] == "InternalServerError"
                assert "secret" not in reply.text

    asyncio.run(main())


def test_keys_open_all_but_probes() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, api_keys=("first", "zweiter-schlüssel"))
        backend = ScriptedBackend(says("hello"))
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            probes = (f"/health/{probe.value}" for probe in Probe)
            for path in (*probes, "/health", "/ping", "/metrics", "/version", "/openapi.json"):
                assert (await client.get(url + path)).status_code == 200, path
            for path in ("/v1/models", "/v1/cluster/status", "/nowhere"):
                reply = await client.get(url + path)
                assert reply.status_code == 401, path
                assert reply.json()["error"]["code"] == 401
                assert reply.headers["www-authenticate"] == "Bearer"
            for path in (CHAT, "/v1/completions", "/tokenize", "/detokenize"):
                assert (await client.post(url + path, json={})).status_code == 401, path
            for key in ("first", "zweiter-schlüssel"):
                headers = {"Authorization": f"Bearer {key}".encode()}
                assert (await client.get(url + "/v1/models", headers=headers)).status_code == 200
                assert (
                    await client.get(url + "/v1/models", headers={"X-Api-Key": key.encode()})
                ).status_code == 200
            for value in ("Bearer", "Bearer firs", "Basic first", "first", "Bearer first2"):
                reply = await client.get(url + "/v1/models", headers={"Authorization": value})
                assert reply.status_code == 401, value

    asyncio.run(main())


def test_browsers_are_let_in_from_named_origins_only() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, api_keys=("k",), cors_origins=("http://good.example",))
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            preflight = {"Access-Control-Request-Method": "POST"}
            good = await client.options(
                url + CHAT, headers=preflight | {"Origin": "http://good.example"}
            )
            assert good.status_code == 200
            assert good.headers["access-control-allow-origin"] == "http://good.example"
            bad = await client.options(
                url + CHAT, headers=preflight | {"Origin": "http://bad.example"}
            )
            assert "access-control-allow-origin" not in bad.headers

    asyncio.run(main())


def test_operators_routes() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            assert (await client.get("/health")).content == b""
            backend.is_ready = False
            sick = await client.get("/health")
            assert (sick.status_code, sick.headers["retry-after"]) == (503, "1")
            assert sick.json()["error"]["message"] == (
                "not ready: no prefill worker and no decode worker takes requests"
            )
            assert (await client.get("/ping")).status_code == 200
            assert (await client.get("/version")).json()["version"]
            assert "mooncake_up 1" in (await client.get("/metrics")).text
            assert (await client.get("/v1/cluster/status")).json() == {
                "workers": [], "ready": False,
            }  # fmt: skip

    asyncio.run(main())


def test_models_and_tokens_routes() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, served_model_names=("a/b", "c"))
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            cards = (await client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in cards] == ["a/b", "c"]
            assert cards[0]["max_model_len"] == 256
            assert (await client.get("/v1/models/a/b")).json() == cards[0]
            assert (await client.get("/v1/models/tiny")).status_code == 404
            ids = (await client.post("/tokenize", json={"prompt": "hello"})).json()
            assert ids["count"] == len(ids["tokens"]) == 1
            text = (await client.post("/detokenize", json={"tokens": ids["tokens"]})).json()
            assert text == {"prompt": "hello"}
            info = (await client.get("/tokenizer_info")).json()
            assert info["eos_token"] == "[EOS]"
            assert "<|im_middle|>" in info["chat_template"]
            assert info["model_max_length"] == 256
            chat = (await client.post("/tokenize", json=ASK | {"return_token_strs": True})).json()
            assert chat["token_strs"][-1] == "<|im_middle|>"

    asyncio.run(main())


def test_openapi_document_refers_to_schemas_that_are_there() -> None:
    async def main() -> None:
        async with (
            live_api_server(ScriptedBackend(says("x"))) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            text = (await client.get(url + "/openapi.json")).text
        document = json.loads(text)
        schemas = document["components"]["schemas"]
        body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
        assert "top_k" in schemas["ChatRequest"]["properties"]
        use = {"$ref": "#/components/schemas/CacheUse"}
        for name in ("CachedTokens", "InputDetails", "MessageUsage"):
            assert use.items() <= schemas[name]["properties"]["mooncake"].items(), name
        for part in text.split('"$ref":"')[1:]:
            name = part.split('"', 1)[0].removeprefix("#/components/schemas/")
            assert name in schemas

    asyncio.run(main())


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.mark.parametrize(
    ("route", "ask"),
    [
        (CHAT, {"messages": PARTS, "tools": [{"type": "function", "function": FUNCTION}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}),
        ("/v1/messages", {
            "messages": PARTS, "max_tokens": 5, "system": [{"type": "text", "text": "be brief"}],
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
        }),
    ],
)  # fmt: skip
def test_fields_about_caches_change_no_token_of_the_prompt(route: str, ask: dict[str, Any]) -> None:
    """They say what the pool keeps, and `cache_salt` who shares it, as docs/sessions.md says."""
    plain = {"seed": 1} | ask
    marked = json.loads(json.dumps(plain))
    places = [marked, *marked.get("tools", []), *marked.get("system", [])]
    places += [each["function"] for each in marked.get("tools", []) if "function" in each]
    for turn in marked.get("messages", []):
        places += [turn, *turn["content"]]
    for place in places:
        place["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    marked |= {"prompt_cache_key": "user-7", "prompt_cache_retention": "24h"}

    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            for body in (plain, marked, plain | {"cache_salt": "s"}):
                reply = await client.post(route, json=body)
                assert reply.status_code == 200, reply.text
            reply = await client.post(route, json=plain, headers={"X-Session-Id": "s" * 5000})
            assert reply.status_code == 200, reply.text
        one, other, salted, in_session = (
            msgspec.structs.replace(each, request_id="") for each in backend.requests
        )
        num_kept = len(one.prompt_tokens)
        kept = {"num_kept_tokens": num_kept, "keep_s": 3600.0, "keeps_answer": True}
        assert other == msgspec.structs.replace(one, **kept)
        assert salted == msgspec.structs.replace(one, cache_salt="s")
        assert in_session == msgspec.structs.replace(one, **kept | {"keep_s": 300.0})

    asyncio.run(main())


def test_taken_port_is_a_clear_error() -> None:
    with bind(ApiConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(ApiConfig(port=port))


def test_sixty_four_streams_with_random_aborts_leave_nothing() -> None:
    async def main() -> None:
        tokens = [97 + number % 26 for number in range(60)]
        backend = ScriptedBackend(lambda request: answer(request, tokens))
        async with live_api_server(backend) as url, httpx.AsyncClient(timeout=LONG_S) as client:

            async def one(number: int) -> str:
                seen = ""
                body = ASK | {"stream": True, "max_tokens": 50}
                async with client.stream("POST", url + CHAT, json=body) as reply:
                    async for part in reply.aiter_text():
                        seen += part
                        if number % 3 == 0:
                            return "left"
                return "done" if seen.endswith("data: [DONE]\n\n") else seen

            ends = await asyncio.gather(*(one(number) for number in range(64)))
            assert set(ends) == {"left", "done"}
            assert ends.count("done") == 42
        assert backend.num_running == 0
        assert len(backend.requests) == 64

    asyncio.run(main())


def test_connections_send_small_writes_at_once() -> None:
    """An answer's head and its first event are two writes: the second must not wait for the ACK."""
    with (
        bind(ApiConfig(host="127.0.0.1", port=0)) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
