"""Channels between machines of one process, for colocated serving and tests. Each channel owns its
inbox.

With `encode=True` (the default) messages pass through the codec, so a message that could not travel
between processes fails here too.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from mooncake.base.mailbox import Mailbox
from mooncake.base.pool_messages import AnyMessage
from mooncake.rpc.codec import decode, encode

INBOX_BOUND = 65536
"""Messages that may wait in one inbox; further ones are dropped and counted."""


class InprocNetwork:
    """The addresses of one process, shared by all channels that must reach each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channels: dict[str, InprocChannel] = {}

    def attach(self, channel: InprocChannel) -> None:
        """Make `channel` reachable. Raises ValueError when its address is taken."""
        with self._lock:
            if channel.address in self._channels:
                raise ValueError(f"another channel here has the address {channel.address!r}")
            self._channels[channel.address] = channel

    def detach(self, channel: InprocChannel) -> None:
        """Make `channel` unreachable; does nothing when it is not attached."""
        with self._lock:
            if self._channels.get(channel.address) is channel:
                del self._channels[channel.address]

    def find(self, address: str) -> InprocChannel | None:
        """Return the channel at `address`, or None."""
        with self._lock:
            return self._channels.get(address)


class InprocChannel:
    """A `PolledChannel` in one process; any thread may call `send`."""

    def __init__(
        self,
        network: InprocNetwork,
        address: str,
        *,
        encode: bool = True,
        inbox_bound: int = INBOX_BOUND,
    ) -> None:
        self._network = network
        self._address = address
        self._encode = encode
        self._inbox: Mailbox[AnyMessage] = Mailbox(inbox_bound)
        self.num_dropped = 0
        """Messages that did not fit into this inbox."""
        try:
            network.attach(self)
        except ValueError:
            self._inbox.close()
            raise

    @property
    def address(self) -> str:
        return self._address

    def send(self, address: str, message: AnyMessage) -> None:
        """Put `message` into the inbox at `address`; one to an unknown address is dropped.

        Raises ProtocolError when the message could not travel between processes.
        """
        if self._encode:
            message = decode(encode(message))
        target = self._network.find(address)
        if target is not None:
            target.deliver(message)

    def figures(self) -> Mapping[str, float]:
        return {}

    def deliver(self, message: AnyMessage) -> None:
        """Queue a message for this end."""
        if not self._inbox.put(message):
            self.num_dropped += 1

    def fileno(self) -> int:
        return self._inbox.fileno()

    def receive(self) -> list[AnyMessage]:
        """Return what has arrived, oldest first, without waiting."""
        return self._inbox.receive()

    def close(self) -> None:
        """Leave the network; messages not yet received are lost. A second call does nothing."""
        self._network.detach(self)
        self._inbox.receive()
        self._inbox.close()
