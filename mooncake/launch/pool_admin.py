"""What operators ask a pool node over HTTP: is it well, its figures, let it drain.

Owns a listening socket and its threads; the node is only ever looked at between two events of its
driver. Standard library only: the node's process has no web framework to carry.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from mooncake.base import ConfigError, Drain
from mooncake.base.pool_messages import PoolState
from mooncake.launch import pool_metrics
from mooncake.launch.driver import Driver
from mooncake.transfer.link_stats import LinkSnapshot

ANSWER_S = 5.0
"""A node that does not come to answer within this time is not well."""
IDLE_S = 10.0
"""A connection on which nothing comes for so long is closed."""
MAX_BODY_BYTES = 65_536

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"

Answer = tuple[HTTPStatus, str, bytes]


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen, and who may do more than look."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one."""
    keys: list[str] = []
    """Accepted as `Authorization: Bearer KEY`; health and metrics need none."""


class PoolAdmin:
    """The door of one node. `close` it before its driver's memory goes."""

    def __init__(
        self,
        settings: AdminSettings,
        driver: Driver,
        about: dict[str, Any],
        drain: Callable[[], None],
        links: Callable[[], Sequence[LinkSnapshot]],
    ) -> None:
        """Listen. `about` stands in every `stats`; `drain` is called when somebody asks for it,
        `links` (what went over each transfer link) by every look at the metrics.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._settings = settings
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
        """Answer nobody any more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, path: str, bearer: str) -> Answer:
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
        if guarded and not self._may_pass(bearer):
            return _error(
                HTTPStatus.UNAUTHORIZED,
                "send 'Authorization: Bearer KEY' with an API key or the cluster secret",
            )
        try:
            return act()
        except (CancelledError, TimeoutError):
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, "the node does not answer")

    def _state(self) -> PoolState:
        """Raises TimeoutError or CancelledError when the node is stuck or has ended."""
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

    def _may_pass(self, bearer: str) -> bool:
        given = bearer.encode("latin-1")  # as it came on the wire
        # All are compared, each in constant time: the time tells nothing about any of them.
        matches = [hmac.compare_digest(given, key.encode()) for key in self._settings.keys]
        return any(matches)


def begin_drain(driver: Driver) -> None:
    """Have the node that `driver` drives take nothing more; returns once it has heard."""
    driver.call(lambda node, now: node.handle(Drain(), now)).result(ANSWER_S)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's error."""


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
            if not length.isdigit() or int(length) > MAX_BODY_BYTES:
                self.close_connection = True
            else:
                self.rfile.read(int(length))
            scheme, _, bearer = self.headers.get("Authorization", "").partition(" ")
            path = self.path.partition("?")[0]
            known = bearer.strip() if scheme.lower() == "bearer" else ""
            status, kind, body = admin.answer(method, path, known)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Probes and scrapers would fill the log."""

    return Handler


def _document(status: HTTPStatus, content: dict[str, Any]) -> Answer:
    return status, _JSON, json.dumps(content, indent=2).encode() + b"\n"


def _error(status: HTTPStatus, message: str) -> Answer:
    return _document(status, {"error": {"message": message, "code": status.value}})
