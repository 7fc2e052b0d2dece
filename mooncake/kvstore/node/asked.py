"""Takes the questions of peers that come to a pool node over the data connection: gets, whose
blocks follow the answer, and puts, whose blocks follow the question. Each is checked as a message
of its kind would be.

Pure; owned by the node.
"""

from __future__ import annotations

from mooncake.base import PinBlocks, ProtocolError, PutStart
from mooncake.base.any_message import AnyMessage
from mooncake.base.rights import refusal
from mooncake.kvstore.node.blocks import NodePorts
from mooncake.kvstore.node.sessions import PinSessions, PutSessions
from mooncake.rpc.codec import decode
from mooncake.telemetry.audit import audit
from mooncake.transfer.engine import Asked, AskEnded


class AskedQuestions:
    """Hands the questions of one node to its puts and pins, and their ends."""

    def __init__(self, ports: NodePorts, pins: PinSessions, puts: PutSessions) -> None:
        self._ports = ports
        self._pins = pins
        self._puts = puts

    def on_asked(self, event: Asked, now: float) -> None:
        """Begin to answer a question, or refuse it."""
        try:
            message = decode(event.question)
        except ProtocolError as error:
            self._ports.transfer.refuse(event.number, error.message)
            return
        reason = self._refusal(message, event)
        if reason is None and isinstance(message, PinBlocks) and not event.num_pieces:
            self._pins.on_asked(message, event, now)
        elif reason is None and isinstance(message, PutStart) and event.num_pieces:
            self._puts.on_asked(message, event, now)
        else:
            what = f"{type(message).__name__} with {event.num_bytes} bytes is no question"
            self._ports.transfer.refuse(event.number, reason or what)

    def _refusal(self, message: AnyMessage, event: Asked) -> str | None:
        """Return why the sender may not send this, as the channel decides about messages."""
        sender, whence = event.sender, event.whence
        reason = refusal(sender, message, whence)
        if reason is not None:
            self._ports.counters["messages_refused"] += 1
            audit(
                "message_refused", kind=sender.channel_key, who=sender.name, whence=whence,
                reason=reason,
            )  # fmt: skip
        return reason

    def on_ended(self, event: AskEnded, now: float) -> None:
        """End what was open for a question."""
        self._pins.on_ask_ended(event, now)
        self._puts.on_ask_ended(event, now)
