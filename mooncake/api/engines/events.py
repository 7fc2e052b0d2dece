"""Server-sent events of engines: cut apart, not changed; and the usage that they tell. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_COUNT = 1 << 31
"""A number of tokens this large is a fault of the engine, and is ignored."""
_END = re.compile(rb"\r?\n\r?\n")
_LONGEST_END = 4
DONE_DATA = b"[DONE]"


class EventCutter:
    """Cuts a stream into events, each with the empty line at its end."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._num_searched = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that `piece` completes."""
        self._rest += piece
        found: list[bytes] = []
        begin = 0
        at = max(0, self._num_searched - _LONGEST_END)
        while (end := _END.search(self._rest, max(at, begin))) is not None:
            found.append(bytes(self._rest[begin : end.end()]))
            begin = end.end()
        del self._rest[:begin]
        self._num_searched = len(self._rest)
        return found

    @property
    def num_waiting(self) -> int:
        """Bytes of an event that has no end yet."""
        return len(self._rest)

    def rest(self) -> bytes:
        """Return what has come of an event that has no end."""
        return bytes(self._rest)


def data_of(event: bytes) -> bytes:
    """Return the data of an event; nothing: it has none, as a comment."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def error_in(data: bytes) -> str | None:
    """Return the message of an event that is an error, or None if the event is no error."""
    if b'"error"' not in data[:64]:
        return None
    document = _object(data)
    error = document.get("error")
    if error is None:
        return None
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


@dataclass
class Counted:
    """The tokens of one answer, as far as the engine has told."""

    num_prompt: int | None = None
    num_output: int | None = None
    num_cached: int | None = None
    is_length: bool = False
    """The answer was cut off at its limit."""

    def take(self, data: bytes) -> bool:
        """Take what a reply or an event's data tells. Return whether it tells nothing else."""
        if b'"finish_reason":"length"' in data or b'"stop_reason":"max_tokens"' in data:
            self.is_length = True
        if b'"usage"' not in data:
            return False
        document = _object(data)
        message = document.get("message")
        usage = document.get("usage") or (isinstance(message, dict) and message.get("usage"))
        if not isinstance(usage, dict):
            return False
        self.num_prompt = _count(usage, "prompt_tokens", "input_tokens", self.num_prompt)
        self.num_output = _count(usage, "completion_tokens", "output_tokens", self.num_output)
        details = usage.get("prompt_tokens_details")
        cached = details if isinstance(details, dict) else usage
        self.num_cached = _count(
            cached, "cached_tokens", "cache_read_input_tokens", self.num_cached
        )
        return document.get("choices") == []


def _count(usage: dict[str, Any], name: str, other: str, known: int | None) -> int | None:
    for each in (name, other):
        found = usage.get(each)
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found < MAX_COUNT:
            return found
    return known


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
