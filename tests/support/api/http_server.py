"""A tiny HTTP server in a thread that answers from a table, for tests of clients."""

from __future__ import annotations

import dataclasses
import http.server
import threading
from types import TracebackType


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer; `chunks` are written one after the other, then the connection is closed."""

    status: int = 200
    chunks: tuple[bytes, ...] = ()
    content_type: str = "application/json"
    promised_bytes: int | None = None
    """Content-Length, when it shall differ from what comes."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    authorization: str | None
    body: bytes


class TableServer:
    """Answers "METHOD /path" from `replies`; what is not in the table is a 404."""

    def __init__(self, replies: dict[str, Reply]) -> None:
        self.asked: list[Asked] = []
        asked = self.asked

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append(Asked(method, self.path, self.headers.get("Authorization"), body))
                reply = replies.get(f"{method} {self.path}", Reply(404, (b"no such page",)))
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.content_type)
                if reply.promised_bytes is not None:
                    self.send_header("Content-Length", str(reply.promised_bytes))
                self.end_headers()
                for chunk in reply.chunks:
                    self.wfile.write(chunk)

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> TableServer:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
