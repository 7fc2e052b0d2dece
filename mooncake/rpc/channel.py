"""The control channel port: messages between workers, at most once, in order per pair, never
blocking.

Loss is possible (a peer dies), so every protocol above ends in a timeout or a `PeerLost`; nothing
here retries.
"""

from __future__ import annotations

from typing import Protocol

from mooncake.base.any_message import AnyMessage


class Channel(Protocol):
    """What a role sends through. Arrivals are brought to `handle(message, now)` by the driver."""

    @property
    def address(self) -> str:
        """Where others reach this end."""

    def send(self, address: str, message: AnyMessage) -> None:
        """Queue `message` for `address`; never blocks. To a peer that is gone it vanishes."""


class PolledChannel(Channel, Protocol):
    """A channel that a driver's loop reads."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when something arrived."""

    def receive(self) -> list[AnyMessage]:
        """Return what has arrived, oldest first, without waiting."""

    def close(self) -> None:
        """Stop receiving, give what is queued a moment to leave, free the sockets."""
