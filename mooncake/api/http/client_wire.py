"""One HTTP/1.1 response (parsed by httptools) and its server-sent events, from bytes. Pure.

This uses only the parser of a library. A whole client costs more per event than a small server
needs to make one, and on a machine that runs both, the benchmark would measure the client too.
"""

from __future__ import annotations

from collections.abc import Mapping

import httptools

MAX_HEAD_BYTES = 64 * 1024


class WireError(Exception):
    """The peer does not speak HTTP/1.1."""


def request_head(
    method: str, target: str, host: str, headers: Mapping[str, str], length: int
) -> bytes:
    """Return the head of a request with a body of `length` bytes."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class ResponseReader:
    """Reads one response from pieces of any size. `feed` returns the body bytes as they come."""

    def __init__(self) -> None:
        self.status = 0
        self.reason = ""
        self.headers: dict[str, str] = {}
        """The headers by their names in lower case. The last of several with one name counts."""
        self.done = False
        self._parser = httptools.HttpResponseParser(self)
        self._keep_alive = True
        self._num_head_bytes = 0
        self._has_length = False
        self._body: list[bytes] = []

    @property
    def started(self) -> bool:
        """Whether any byte of the response has come."""
        return self._num_head_bytes > 0

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request after this response."""
        return self._keep_alive and self.done

    def feed(self, data: bytes) -> bytes:
        """Parse bytes that came from the peer and return the body bytes in them.

        Raises:
            WireError: they are no HTTP/1.1 response, or there is more than one.
        """
        if self.status == 0:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise WireError(f"not an HTTP answer: {error}") from error
        if self.status == 0 and self._num_head_bytes > MAX_HEAD_BYTES:
            raise WireError("the head of the answer does not end")
        body = b"".join(self._body)
        self._body.clear()
        return body

    def end(self) -> bool:
        """Note that the peer closed the connection; return whether the response was whole."""
        self._keep_alive = False
        if self.status and not self._has_length:
            self.done = True
        return self.done

    # ------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        if self.done:
            raise WireError("the server sent more than one answer")
        self.reason = ""
        self.headers.clear()

    def on_status(self, status: bytes) -> None:
        self.reason += status.decode("latin-1")  # comes in pieces, as the bytes do

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.status:
            return  # it comes after the body
        self.headers[name.lower().decode("latin-1")] = value.decode("latin-1")
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.done = self.status != 0  # an interim answer (1xx) has another one behind it


class EventSplitter:
    """Cuts a stream of body bytes into the data of its server-sent events."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        """The event that has begun, in the pieces in which it came. No piece is empty."""
        self._has_cr = False
        """Whether the last byte was a CR, which waits for its LF and is not in `_parts`."""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events completed by `body`, without `data:` and comments."""
        if self._has_cr:
            body = b"\r" + body
        if b"\r" in body:
            self._has_cr = body.endswith(b"\r")
            body = body[: len(body) - self._has_cr].replace(b"\r\n", b"\n")
        if not body:
            return []
        last = self._parts[-1][-1:] if self._parts else b""
        self._parts.append(body)
        if b"\n\n" not in last + body:  # joining at each piece would take quadratic time
            return []
        *events, rest = b"".join(self._parts).split(b"\n\n")
        self._parts = [rest] if rest else []
        found: list[bytes] = []
        for event in events:
            lines = [
                line[5:].removeprefix(b" ")
                for line in event.split(b"\n")
                if line.startswith(b"data:")
            ]
            if lines:
                found.append(b"\n".join(lines))
        return found
