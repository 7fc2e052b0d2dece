"""Targets: HTTP of the API server (connections, bodies), of pool nodes, of the bench client."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from uvicorn.server import ServerState

from mooncake.api.app import create_app
from mooncake.api.config import ApiConfig
from mooncake.api.http.client_wire import EventSplitter, ResponseReader, WireError
from mooncake.api.http.connection import limited_protocol
from mooncake.api.http.request_body import FormSplitter, Head
from mooncake.base import InvalidRequest, SeededIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import cluster_keys
from mooncake.launch.host.http_server import Answer, HttpServer, Route, _handler, document
from mooncake.launch.host.secrets.credentials import RequestVerifier
from mooncake.launch.pool_node.admin import Guard
from tests.support.api.server import ScriptedBackend, says, tiny_model
from tests.support.fuzz.target import Shape, Target, pieces_of

ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    "/v1/messages/count_tokens", "/tokenize", "/detokenize",
)  # fmt: skip
_HTTP_TOKENS = (
    b"\r\n", b"\r\n\r\n", b"GET / HTTP/1.1\r\n", b"Host: localhost\r\n", b"Content-Length: 5\r\n",
    b"\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\n", b"0\r\n\r\n", b"Connection: Upgrade\r\n", b"5\r\nhello\r\n",
    b"ffffffffffffffff\r\n", b";a=b", b"\0", b"\xff", b" ", b":",
    b"Content-Type: application/json\r\n", b"HTTP/1.0", b"x: y\r\n", b"Trailer: x\r\n",
    b"http://localhost/", b"%", b"Authorization: Bearer x\r\n", b"OPTIONS * HTTP/1.1\r\n",
    b"CONNECT a:1 HTTP/1.1\r\n",
)  # fmt: skip


def _answers() -> Any:
    return ScriptedBackend(says("hello"))


class _Transport(asyncio.Transport):
    """Takes what a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 1), "peername": ("127.0.0.1", 2)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.closing, "written to a connection that was closed"
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class HttpConnection(Target):
    """The bytes of a connection to the API server. The first byte says how they are cut."""

    name = "http"
    modules = ("mooncake.api.http.connection", "uvicorn.protocols.http.httptools_impl")
    max_bytes = 262_144
    cpu_s_per_mb = 20.0
    base_memory = 64 * 2**20
    memory_per_byte = 512
    tokens = _HTTP_TOKENS

    def __init__(self) -> None:
        config = ApiConfig(max_header_bytes=8192, max_headers=32)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        app = create_app(_answers(), tiny_model(), config, ids=SeededIds(1))
        self._config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off")
        self._config.load()
        self._protocol = limited_protocol(config)

    def run(self, data: bytes) -> str:
        return self._loop.run_until_complete(self._connection(data))

    def close(self) -> None:
        asyncio.set_event_loop(None)
        self._loop.close()

    async def _connection(self, data: bytes) -> str:
        state = ServerState()
        protocol = self._protocol(self._config, state, {}, self._loop)
        transport = _Transport()
        errors: list[Any] = []
        self._loop.set_exception_handler(lambda _, context: errors.append(context))
        protocol.connection_made(transport)
        for number, piece in enumerate(pieces_of(data[1:], data[0] if data else 0)):
            if transport.closing:
                break
            protocol.data_received(piece)
            if number % 16 == 0:
                await asyncio.sleep(0)
        for _ in range(100):
            if not state.tasks:
                break
            await asyncio.sleep(0)
        protocol.connection_lost(None)
        for number in range(2000):  # some work is done in threads, and a busy machine is slow
            if not state.tasks:
                break
            await asyncio.sleep(0 if number < 100 else 0.01)
        assert not state.tasks, "a request that never ends"
        assert not errors, errors[0]
        answer = bytes(transport.written[:12])
        assert not answer.startswith(b"HTTP/1.1 5"), transport.written[:500]
        return f"{answer!r} {transport.closing}"


class HttpBodies(Target):
    """Bodies of the API's routes. The first byte says which route."""

    name = "bodies"
    modules = (
        "mooncake.api.http.request_body", "mooncake.api.http.request_body", "mooncake.api.errors",
        "mooncake.api.adapters.chat_call", "mooncake.api.adapters.completion_call",
        "mooncake.api.adapters.anthropic_messages", "mooncake.api.adapters.openai_responses",
        "mooncake.api.adapters.chat_call", "mooncake.api.constrained.constraints",
        "mooncake.api.constrained.grammar", "mooncake.api.generation.sampling",
        "mooncake.api.text.conversation", "mooncake.api.text.conversation",
    )  # fmt: skip
    shape = Shape.JSON
    skip = 1
    max_bytes = 262_144
    base_cpu_s = 2.0
    cpu_s_per_mb = 40.0
    base_memory = 128 * 2**20
    memory_per_byte = 2048
    tokens: ClassVar = (
        b'"messages"', b'"role"', b'"user"', b'"tool"', b'"content"', b'"text"', b'"tools"',
        b'"parameters"', b'"guided_json"', b'"logit_bias"', b'"stop"', b'"n"', b"128", b'"best_of"',
        b'"stream": true', b'"echo"', b'"prompt"', b'"input"', b'"tokens"', b"[", b'{"a":',
        b"1e999", b"9" * 400, b'"\\ud800"', b"null", b"<", b"<|im_end|>", b'"tool_choice"',
        b'"required"', b'"chat_template_kwargs"', b'"logprobs": true', b'"temperature"',
        b'"max_tokens"', b'"guided_regex"', b'"guided_grammar"', b'"structured_outputs"',
        b"\\u0000", b'"\xff"', b'"tool_calls"', b'"arguments"', b'"use_beam_search"',
        b'"truncate_prompt_tokens"', b'"seed"',
    )  # fmt: skip

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self._loop = asyncio.new_event_loop()
        self._app = create_app(
            _answers(), tiny_model(max_model_len=4096), ApiConfig(), ids=SeededIds(1)
        )

    def run(self, data: bytes) -> str:
        route = ROUTES[(data[0] if data else 0) % len(ROUTES)]
        return f"{route} {self._loop.run_until_complete(self._call(route, data[1:]))}"

    def close(self) -> None:
        self._loop.close()

    async def _call(self, route: str, body: bytes) -> str:
        parts = list(pieces_of(body, 130 if len(body) > 4096 else 0))
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
            "scheme": "http", "path": route, "raw_path": route.encode(), "query_string": b"",
            "headers": headers, "client": ("127.0.0.1", 2), "server": ("127.0.0.1", 1),
        }  # fmt: skip
        await asyncio.wait_for(self._app(scope, receive, send), 60)
        status = sent[0]["status"]
        answer = b"".join(message.get("body", b"") for message in sent)
        assert status < 500, (status, answer[:1000])
        if status >= 400:
            assert len(answer) < 16_384, f"an error of {len(answer)} bytes"
        assert not sent[-1].get("more_body"), "an answer without an end"
        return f"{status} {answer[:60] if status >= 400 else b''!r}"


class Forms(Target):
    """A form with a file, as it is uploaded. The first byte says how it is cut."""

    name = "forms"
    modules = ("mooncake.api.http.request_body",)
    allowed = (InvalidRequest,)
    max_bytes = 262_144
    seeds = (
        b'\0--X\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--X\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        b"Content-Type: application/jsonl\r\n\r\n{}\r\n{}\n\r\n--X--\r\n",
        b'\3--X\r\nContent-Disposition: form-data; name="a\\"b"\r\n\r\n\r\n--X--',
    )
    tokens = (
        b"\r\n--X\r\n", b"\r\n--X--", b"--X", b"\r\n\r\n", b"\r\n", b"\r\n--", b"-", b"\0", b"\xff",
        b'Content-Disposition: form-data; name="file"\r\n\r\n', b"; filename=", b'"', b"\\",
        b"content-disposition:", b" \t", b"; name=a", b'; name="' + b"x" * 300,
    )  # fmt: skip

    def run(self, data: bytes) -> str:
        cut = self._fields(pieces_of(data[1:], data[0] if data else 0))
        whole = self._fields([data[1:]])
        assert cut == whole, "fields depend on how bytes are cut"
        return f"{len(whole)} {[head.filename is None for head, _ in whole]}"

    def _fields(self, pieces: Iterable[bytes]) -> list[tuple[Head, bytearray]]:
        splitter, found = FormSplitter("X"), list[tuple[Head, bytearray]]()
        for piece in pieces:
            for part in splitter.feed(piece):
                if isinstance(part, Head):
                    found.append((part, bytearray()))
                else:
                    found[-1][1].extend(part)
        return found


class PoolAdminHttp(Target):
    """What comes to a pool node's admin port."""

    name = "pool-admin"
    modules = (
        "mooncake.launch.host.http_server", "mooncake.launch.pool_node.admin",
        "mooncake.launch.host.secrets.credentials",
    )  # fmt: skip
    max_bytes = 131_072
    tokens = (
        *_HTTP_TOKENS,
        b"/v1/pool/stats",
        b"/v1/pool/drain",
        b"/health",
        b"Mooncake ",
    )

    def __init__(self) -> None:
        guard = Guard(cluster_keys("a secret"))
        guard.verifier = RequestVerifier(cluster_keys("a secret"), lambda: 1.0)
        self._opened: list[str] = []

        def guarded(name: str) -> Route:
            def act(_: object) -> Answer:
                self._opened.append(name)
                return document(HTTPStatus.OK, {})

            return guard.route("GET" if name == "stats" else "POST", act, CredentialRole.OPERATOR)

        server = HttpServer.__new__(HttpServer)
        server._routes = {
            "/health/live": Route("GET", lambda _: document(HTTPStatus.OK, {})),
            **{f"/v1/pool/{name}": guarded(name) for name in ("stats", "drain")},
        }
        self._handler = _handler(server._answer)

    def run(self, data: bytes) -> str:
        connection: Any = _AdminSocket(data)
        self._handler(connection, ("127.0.0.1", 2), connection)
        assert not self._opened, f"{self._opened} without a credential"
        return f"{bytes(connection.sent[:12])!r}"


class _AdminSocket:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sent = bytearray()

    def makefile(self, *_: Any) -> io.BytesIO:
        return io.BytesIO(self._data)

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def settimeout(self, _: float) -> None:
        pass

    def setsockopt(self, *_: Any) -> None:
        pass

    def shutdown(self, _: int = socket.SHUT_WR) -> None:
        pass


class BenchAnswers(Target):
    """What a server answers to the bench client. The first byte says how it is cut."""

    name = "bench-answers"
    modules = ("mooncake.api.http.client_wire",)
    allowed = (WireError,)
    max_bytes = 262_144
    tokens = (
        *_HTTP_TOKENS, b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"data: {}\n\n",
        b"data:", b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", b"event: x\n",
        b"data: [DONE]\r\n\r\n",
    )  # fmt: skip

    def run(self, data: bytes) -> str:
        reader, splitter = ResponseReader(), EventSplitter()
        whole = bytearray()
        events: list[bytes] = []
        for piece in pieces_of(data[1:], data[0] if data else 0):
            body = reader.feed(piece)
            whole += body
            events += splitter.feed(body)
            if reader.done:
                break
        assert events == EventSplitter().feed(bytes(whole)), "events depend on how bytes are cut"
        reader.end()
        return f"{reader.status} {reader.done} {len(events).bit_length()}"
