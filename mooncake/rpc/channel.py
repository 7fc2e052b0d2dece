"""The control channel port: messages between workers, delivered at most once, in order per pair,
without blocking.

A message is lost when a peer dies, so every protocol above ends in a timeout or a `PeerLost`;
nothing here retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from mooncake.base.pool_messages import AnyMessage


class PeerEnded(msgspec.Struct, frozen=True):
    """The process at an address has ended. Its connection was closed, and its machine's kernel says
    that no process listens there any more. This event is never sent; a channel that was told to
    watch its peers produces it.
    """

    address: str


class Channel(Protocol):
    """The port through which a role sends. The driver passes arrivals to `handle`."""

    @property
    def address(self) -> str:
        """The address at which others reach this end."""

    def send(self, address: str, message: AnyMessage) -> None:
        """Queue `message` for `address`; never blocks. A message to a lost peer is dropped."""

    def figures(self) -> Mapping[str, float]:
        """Return counts since start, by name, for load reports."""


class PolledChannel(Channel, Protocol):
    """A channel that a driver's loop polls."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message has arrived."""

    def receive(self) -> Sequence[AnyMessage | PeerEnded]:
        """Return the messages that have arrived, oldest first, without waiting."""

    def close(self) -> None:
        """Stop receiving, wait a moment for queued messages to leave, and free the sockets."""
