"""Writes an answer as a list of parts, each with text, reasoning or one call: the form of replies
to Messages and Responses. It owns the open part; an API's own renderer makes parts and events.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from msgspec import UNSET

from mooncake.api.generation.generation import Call
from mooncake.api.schema.replies import encode
from mooncake.api.text.answer import Delta, Piece

Part = TypeVar("Part")


class PartsRenderer(ABC, Generic[Part]):
    """Owns the reply while it grows. There is one `Renderer` for each reply. The whole reply is
    made by the same steps as the stream, so they agree.
    """

    def __init__(self, reply: Any, parts: list[Part]) -> None:
        """`parts`: the list in `reply` to which parts are added."""
        self.reply = reply
        self.parts = parts
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._is_open = False
        self._holds: tuple[bool, int | None] = False, None
        """What the open part holds: see `Piece.holds`."""
        self._texts: list[str] = []
        """The text, or the arguments, of the open part."""

    def whole(self, call: Call, deltas: list[Delta]) -> bytes:
        [delta] = deltas
        self.chunk(call, delta)
        self.end(call)
        return encode(self.reply)

    def chunk(self, call: Call, delta: Delta) -> list[bytes]:
        """Add what is new and return its events."""
        del call
        events: list[bytes] = []
        for piece in delta.pieces:
            if not self._is_open or piece.holds != self._holds:
                events += self.close()
                self._is_open, self._holds = True, piece.holds
                self.parts.append(self._part(piece))
                events += self._begun(self.parts[-1])
            if piece.text:
                self._texts.append(piece.text)
                events += self._grown(self.parts[-1], piece.text)
        self.reply.schema_errors = delta.schema_errors or UNSET
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        return events

    def close(self) -> list[bytes]:
        """End the open part, if there is one, and return the last events of it."""
        if not self._is_open:
            return []
        text = "".join(self._texts)
        self._texts.clear()
        self._is_open = False
        return self._ended(self.parts[-1], text)

    @abstractmethod
    def end(self, call: Call) -> list[bytes]:
        """End the reply and return its last events."""

    @abstractmethod
    def _part(self, piece: Piece) -> Part:
        """Return the part that begins with `piece`, still empty."""

    @abstractmethod
    def _begun(self, part: Part) -> list[bytes]:
        """Return the events by which a part begins."""

    @abstractmethod
    def _grown(self, part: Part, text: str) -> list[bytes]:
        """Return the events for `text`, or for arguments, that is added to a part."""

    @abstractmethod
    def _ended(self, part: Part, text: str) -> list[bytes]:
        """Complete a part with its whole text. Return the events by which it ends."""
