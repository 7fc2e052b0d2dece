"""A small HTTP server of a worker's process: a table of routes, a bounded number of connections.

Owns a listening socket and threads. Standard library only, so that workers carry no web framework.
The routes decide what is answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mooncake.base import ConfigError
from mooncake.base.threads import VitalThread
from mooncake.base.tls_files import TlsFiles

IDLE_S = 10.0
"""Time after which an idle connection is closed."""
MAX_BODY_BYTES = 65_536
MAX_CONNECTIONS = 64
"""Connections, each with a thread. When there are more, the oldest are told to end; more than twice
as many are refused.
"""

JSON = "application/json"
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Request:
    """The parts of a request that a route sees."""

    method: str
    path: str
    """The path without the query."""
    authorization: str
    client: str = ""
    """The address from which it came."""
    body: bytes = b""


@dataclasses.dataclass(frozen=True)
class Answer:
    status: HTTPStatus
    content_type: str
    body: bytes
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Route:
    """A path's method and the function that answers it."""

    method: str
    act: Callable[[Request], Answer]


class HttpServer:
    """Answers `routes` on one port until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Mapping[str, Route],
        flag: str,
        tls: TlsFiles | None = None,
    ) -> None:
        """Start to listen; port 0 means any free port. `flag` is the setting that names the port.
        The server speaks only HTTPS if `tls` is given.

        Raises:
            ConfigError: the address cannot be bound, or a file of `tls` is wrong.
        """
        self._routes = routes
        context = None if tls is None else tls.context()
        self.scheme = "http" if tls is None else "https"
        try:
            self._server = _Server(host, port, _handler(self._answer), context)
        except OSError as error:
            raise ConfigError(
                f"{flag}: cannot listen on {host}:{port} ({error.strerror}); "
                f"stop what uses it or take another with --{flag}"
            ) from error
        self.host, self.port = str(self._server.server_address[0]), self._server.server_address[1]
        self._thread = VitalThread(self._server.serve_forever, flag, 0.1)
        self._thread.start()

    @property
    def url(self) -> str:
        return url_of(self.host, self.port, self.scheme)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request: Request) -> Answer:
        route = self._routes.get(request.path)
        if route is None:
            return error(HTTPStatus.NOT_FOUND, f"no such path; there are {', '.join(self._routes)}")
        if request.method != route.method:
            return error(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} takes {route.method}")
        return route.act(request)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server at `host`, a name or an address of either kind."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def document(status: HTTPStatus, content: dict[str, Any]) -> Answer:
    return Answer(status, JSON, json.dumps(content, indent=2).encode() + b"\n")


def error(status: HTTPStatus, message: str, **headers: str) -> Answer:
    body = {"error": {"message": message, "code": status.value}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return dataclasses.replace(document(status, body), headers=named)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        host: str,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tls = tls
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open: dict[Any, None] = {}
        """Connections, oldest first."""
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        """Bind without looking up a name of this machine, which the standard library's server
        does.
        """
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection. The thread that answers makes the handshake, so that no client
        delays the others.
        """
        accepted, address = super().get_request()
        if self._tls is None:
            return accepted, address
        wrapped = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        return wrapped, address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Strangers that hold connections do not keep probes out."""
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


def _handler(answer: Callable[[Request], Answer]) -> type[BaseHTTPRequestHandler]:
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
            body = b""
            if "Transfer-Encoding" in self.headers or not is_plain or int(length) > MAX_BODY_BYTES:
                self.close_connection = True  # where the body ends is not known
            else:
                body = self.rfile.read(int(length))
            path = self.path.partition("?")[0]
            given = self.headers.get("Authorization", "")
            reply = answer(Request(method, path, given, str(self.client_address[0]), body))
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Content-Length", str(len(reply.body)))
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: Any) -> None:
            """Log nothing: probes and scrapers would fill the log."""

    return Handler
