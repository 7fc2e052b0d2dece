"""The HTTP API of a pool node for operators: health, figures, metrics, drain.

It owns a listening socket and threads, and reads the node only between two events of its driver.
Standard library only, so that the node's process carries no web framework.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from mooncake.base import ConfigError, Drain
from mooncake.base.pool_messages import PoolState
from mooncake.launch.host.credentials import SCHEME, RequestVerifier
from mooncake.launch.host.driver import Driver
from mooncake.launch.pool_node import metrics as pool_metrics
from mooncake.transfer.link_stats import LinkSnapshot

ANSWER_S = 5.0
"""A node whose driver does not answer within this time is not well."""
IDLE_S = 10.0
"""Time after which an idle connection is closed."""
MAX_BODY_BYTES = 65_536
MAX_CONNECTIONS = 64
"""Each with a thread. Of more the oldest are told to end; twice as many are refused."""

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API listens, and the tokens it accepts besides requests signed with the cluster
    secret. It travels to the node's process, so it holds no secret.
    """

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    token_digests: list[bytes] = []
    """SHA-256 of each token accepted as `Authorization: Bearer TOKEN`."""


class PoolAdmin:
    """The API server of one node. It must be closed before the driver's memory is freed."""

    def __init__(
        self,
        settings: AdminSettings,
        secret: str,
        driver: Driver,
        about: dict[str, Any],
        drain: Callable[[], None],
        links: Callable[[], Sequence[LinkSnapshot]],
    ) -> None:
        """Start to listen. `secret` is the cluster's; `about` is part of every answer to `stats`;
        `drain` starts a drain; `links` returns what went over each transfer link, for the metrics.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._token_digests = settings.token_digests
        self._verifier = RequestVerifier(secret, time.monotonic)
        self._driver = driver
        self._about = about
        self._drain = drain
        self._links = links
        try:
            self._server = _Server(settings.host, settings.port, _handler(self))
        except OSError as error:
            raise ConfigError(
                f"admin-port: cannot listen on {settings.host}:{settings.port} ({error.strerror}); "
                "stop what uses it or take another with --admin-port"
            ) from error
        host, port = self._server.server_address[:2]
        self.url = f"http://[{host!s}]:{port}" if ":" in str(host) else f"http://{host!s}:{port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="pool-admin", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and answering."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, authorization: str) -> Answer:
        """Return (status, content type, body) for one request."""
        routes: dict[str, tuple[str, bool, Callable[[], Answer]]] = {
            "/health": ("GET", False, self._health),
            "/metrics": ("GET", False, self._metrics),
            "/v1/pool/stats": ("GET", True, self._stats),
            "/v1/pool/drain": ("POST", True, self._begin_drain),
        }
        if path not in routes:
            return _error(HTTPStatus.NOT_FOUND, f"no such path; there are {', '.join(routes)}")
        allowed, guarded, act = routes[path]
        if method != allowed:
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, f"{path} takes {allowed}")
        if guarded and not self._may_pass(authorization, method, path):
            return _error(
                HTTPStatus.UNAUTHORIZED,
                "send 'Authorization: Bearer TOKEN' with an --admin-token of the node, or sign "
                "with its cluster secret, as `mooncake pool` does",
            )
        try:
            return act()
        except (CancelledError, TimeoutError):
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the node does not answer")

    def challenge(self) -> str:
        """Return the challenge that a signed request must answer."""
        return self._verifier.challenge()

    def _state(self) -> PoolState:
        """Return the node's figures. Raises TimeoutError or CancelledError when its driver is stuck
        or has ended.
        """
        asked = self._driver.call(lambda node, _: node.state())
        state: PoolState = asked.result(ANSWER_S)
        return state

    def _health(self) -> Answer:
        joined = self._driver.call(lambda node, _: bool(node.joined)).result(ANSWER_S)
        status = "draining" if self._state().draining else "ok" if joined else "joining"
        code = HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE
        return _document(code, {"status": status})

    def _metrics(self) -> Answer:
        return HTTPStatus.OK, _PROMETHEUS, pool_metrics.render(self._state(), self._links())

    def _stats(self) -> Answer:
        return _document(HTTPStatus.OK, {**pool_metrics.document(self._state()), **self._about})

    def _begin_drain(self) -> Answer:
        self._drain()
        return _document(HTTPStatus.ACCEPTED, pool_metrics.document(self._state()))

    def _may_pass(self, authorization: str, method: str, path: str) -> bool:
        scheme, _, bearer = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return self._verifier.is_valid(authorization, method, path)
        given = hashlib.sha256(bearer.strip().encode("latin-1")).digest()  # as it came on the wire
        # All tokens are compared, each in constant time, so that the time reveals nothing of any.
        matches = [hmac.compare_digest(given, digest) for digest in self._token_digests]
        return any(matches)


def begin_drain(driver: Driver) -> None:
    """Have the node that `driver` drives take nothing more; return once it does."""
    driver.call(lambda node, now: node.handle(Drain(), now)).result(ANSWER_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[Any, None] = {}
        """Connections, oldest first."""
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; strangers who hold connections do not keep probes out."""
        with self._lock:
            self._open[request] = None
            excess = len(self._open) - MAX_CONNECTIONS
            oldest = list(self._open)[:excess] if excess > 0 else []
        for connection in oldest:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if excess <= MAX_CONNECTIONS:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, in the thread that answered it."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that went away."""


def _handler(admin: PoolAdmin) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S
        protocol_version = "HTTP/1.1"
        server_version = "mooncake"
        sys_version = ""

        def do_GET(self) -> None:
            self._reply("GET")

        def do_POST(self) -> None:
            self._reply("POST")

        def _reply(self, method: str) -> None:
            length = self.headers.get("Content-Length", "0")
            is_plain = length.isascii() and length.isdigit() and len(length) < 10
            if "Transfer-Encoding" in self.headers or not is_plain or int(length) > MAX_BODY_BYTES:
                self.close_connection = True  # where the body ends is not known
            else:
                self.rfile.read(int(length))
            path = self.path.partition("?")[0]
            given = self.headers.get("Authorization", "")
            status, kind, body = admin.answer(method, path, given)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if status == HTTPStatus.UNAUTHORIZED:
                self.send_header("WWW-Authenticate", f"{SCHEME} {admin.challenge()}")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: probes and scrapers would fill the log."""

    return Handler


def _document(status: HTTPStatus, content: dict[str, Any]) -> Answer:
    return status, _JSON, json.dumps(content, indent=2).encode() + b"\n"


def _error(status: HTTPStatus, message: str) -> Answer:
    return _document(status, {"error": {"message": message, "code": status.value}})
