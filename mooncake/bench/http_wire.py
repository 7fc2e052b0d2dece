"""HTTP/1.1 and server-sent events as bytes: what a measuring client needs and no more. Pure.

A general HTTP library costs more per event than a small server takes to make one; on a machine that
runs both, the client would be part of what it measures.
"""

from __future__ import annotations

from collections.abc import Mapping

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
        self.done = False
        self.keep_alive = True
        self._buffer = b""
        self._left = 0
        """Bytes left of the body, or of the chunk."""
        self._chunked = False
        self._in_chunk = False
        """A chunk's contents have begun and the empty line after them has not come."""
        self._in_trailer = False
        self._until_close = False

    @property
    def started(self) -> bool:
        """Whether any byte of the response has come."""
        return self.status != 0 or self._buffer != b""

    def feed(self, data: bytes) -> bytes:
        """Take what came from the peer and return the body bytes in it.

        Raises:
            WireError: this is no HTTP/1.1 response, or there is more than one.
        """
        if self.status == 0:
            self._buffer += data
            data = self._read_head()
        if self.status == 0:
            return b""
        if self._chunked:
            return self._read_chunks(data)
        if self._until_close:
            return data
        if len(data) > self._left:
            raise WireError("the server sent more than it announced")
        self._left -= len(data)
        self.done = self._left == 0
        return data

    def end(self) -> bool:
        """The peer closed the connection; return whether the response was whole."""
        self.keep_alive = False
        if self._until_close and self.status:
            self.done = True
        return self.done

    def _read_head(self) -> bytes:
        """Read the head when it is whole and return the bytes after it."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                raise WireError("the head of the answer does not end")
            return b""
        head, rest = self._buffer[:end].decode("latin-1"), self._buffer[end + 4 :]
        self._buffer = b""
        first, *lines = head.split("\r\n")
        version, _, status = first.partition(" ")
        code, _, self.reason = status.partition(" ")
        if not version.startswith("HTTP/1.") or not code.isdigit():
            raise WireError(f"not an HTTP answer: {first[:80]!r}")
        if 100 <= int(code) < 200:
            self._buffer = rest
            return self._read_head()
        self.status = int(code)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        self._begin_body(version, headers)
        return rest

    def _begin_body(self, version: str, headers: Mapping[str, str]) -> None:
        connection = headers.get("connection", "").lower()
        self.keep_alive = connection != "close" and (
            version != "HTTP/1.0" or connection == "keep-alive"
        )
        if self.status in (204, 304):
            self.done = True
        elif "chunked" in headers.get("transfer-encoding", "").lower():
            self._chunked = True
        elif headers.get("content-length", "").isdigit():
            self._left = int(headers["content-length"])
            self.done = self._left == 0
        else:
            self._until_close = True

    def _read_chunks(self, data: bytes) -> bytes:
        """Return the chunks' contents in `data`; an unfinished line is kept for later."""
        data = self._buffer + data
        parts: list[bytes] = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at += len(part)
                self._left -= len(part)
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._read_chunk_line(data[at:end])
            at = end + 2
        self._buffer = data[at:]
        if len(self._buffer) > MAX_HEAD_BYTES:
            raise WireError("a chunk's size line does not end")
        return b"".join(parts)

    def _read_chunk_line(self, line: bytes) -> None:
        """Take a line between contents: the end of a chunk, a size, or what follows the last."""
        if self._in_chunk:
            if line:
                raise WireError("a chunk is longer than its size says")
            self._in_chunk = False
        elif self._in_trailer:
            self.done = not line
        else:
            try:
                self._left = int(line.split(b";", 1)[0], 16)
            except ValueError as error:
                raise WireError(f"not a chunk's size: {line[:40]!r}") from error
            self._in_chunk = self._left > 0
            self._in_trailer = self._left == 0


class EventSplitter:
    """Cuts a stream of body bytes into the data of its server-sent events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, body: bytes) -> list[bytes]:
        """Return the data of the events that became whole, without `data:`; comments are left
        out.
        """
        if self._rest:
            body = self._rest + body
        if b"\r" in body:
            # A pair may be cut between the two: the lone one waits for its other half.
            held = b"\r" if body.endswith(b"\r") else b""
            body = body[: len(body) - len(held)].replace(b"\r\n", b"\n") + held
        *events, self._rest = body.split(b"\n\n")
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
