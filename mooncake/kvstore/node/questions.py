"""Messages that peers ask over the data connection. Each is handled like one of the control
channel, and its answer goes back on that connection: a peer that asks so needs no address.

Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from mooncake.base import PinBlocks, PinGranted, ProtocolError, PutEnd, PutGranted, PutStart, Unpin
from mooncake.base.messages import Answer
from mooncake.base.pool_messages import AnyMessage, BlocksFound, FindBlocks
from mooncake.base.rights import refusal, speaker_of
from mooncake.kvstore.node.peers import Peer, Peers, PeerState, peer_of
from mooncake.kvstore.node.sessions import PinSessions
from mooncake.rpc.channel import Channel
from mooncake.rpc.codec import decode, encode, head_of
from mooncake.telemetry.audit import audit
from mooncake.transfer.engine import (
    MAX_ANSWER_PIECES,
    Asked,
    AskEnded,
    AskerLeft,
    Pieces,
    Region,
    Transfer,
)

ANSWERS: dict[type[AnyMessage], type[Answer] | None] = {
    FindBlocks: BlocksFound,
    PutStart: PutGranted,
    PutEnd: None,
    PinBlocks: PinGranted,
    Unpin: None,
}
"""The messages that may be asked, and the answer to each. Those without one are answered by nil."""
NIL = head_of(b"") + b"\xc0"

_Awaited = tuple[Peer, int, type[Answer]]
"""(asker, ticket, kind of answer)"""


class AnsweringChannel:
    """The node's control channel. Answers to open questions do not go by it, but back on the
    connection that asked.
    """

    def __init__(self, channel: Channel, transfer: Transfer, region: Region) -> None:
        """`region`: any memory of the node; the answers carry none of it."""
        self._channel, self._transfer, self._region = channel, transfer, region
        self._open: dict[_Awaited, int] = {}
        """The number of each question that is not answered yet."""

    @property
    def address(self) -> str:
        return self._channel.address

    def figures(self) -> Mapping[str, float]:
        """Return the counts of the control channel."""
        return self._channel.figures()

    def send(self, address: str, message: AnyMessage) -> None:
        """Answer a question, or send a message. One to a peer without an address is dropped."""
        if isinstance(message, Answer) and self._open:
            awaited = peer_of(message.asker), message.ticket, type(message)
            number = self._open.pop(awaited, None)
            if number is not None:
                self.answer(number, encode(message))
                return
        if not address.startswith("#"):
            self._channel.send(address, message)

    def answer(self, number: int, answer: bytes) -> None:
        """Answer a question by these bytes."""
        self._transfer.answer(number, answer, self._region, Pieces([], 0))

    def expect(self, awaited: _Awaited, number: int) -> bool:
        """Have the next such answer answer a question. Return False if another one waits for it."""
        return self._open.setdefault(awaited, number) == number

    def forget(self, awaited: _Awaited) -> bool:
        """Expect an answer no more. Return whether it was still expected."""
        return self._open.pop(awaited, None) is not None


class Questions:
    """Takes the questions to one node."""

    def __init__(
        self,
        channel: AnsweringChannel,
        transfer: Transfer,
        pins: PinSessions,
        handlers: Mapping[type, Callable[[Any, float], object]],
        counters: Counter[str],
        peers: Peers,
        release: Callable[[PeerState, float], None],
    ) -> None:
        """`handlers` take the messages in `ANSWERS`. `release` ends all that a peer has open."""
        self._channel, self._transfer, self._pins = channel, transfer, pins
        self._handlers, self._counters = handlers, counters
        self._waiting: dict[int, tuple[_Awaited, AnyMessage]] = {}
        """The open questions whose answers may come later, by number."""
        self._peers, self._release = peers, release
        self._askers: dict[Peer, set[int]] = {}
        """The connections by which peers without an address have asked, while they have something
        open.
        """

    def on_asked(self, event: Asked, now: float) -> None:
        """Handle a question. A question is refused for the same reasons as a message of the control
        channel.
        """
        try:
            message = decode(event.question)
        except ProtocolError as error:
            self._transfer.refuse(event.number, error.message)
            return
        reason = self._refusal(message, event)
        if reason is None:
            reason = self._begin(message, event, now)
        if reason is not None:
            self._transfer.refuse(event.number, reason)

    def _refusal(self, message: AnyMessage, event: Asked) -> str | None:
        """Return why a question is not for this node to answer."""
        sender, whence = event.sender, event.whence
        reason = refusal(sender, message, whence, answers_there=True)
        if reason is not None:  # as the channel does with a message
            self._counters["messages_refused"] += 1
            audit(
                "message_refused", kind=sender.channel_key, who=sender.name, whence=whence,
                reason=reason,
            )  # fmt: skip
        elif type(message) not in ANSWERS or speaker_of(message) is None:
            return f"{type(message).__name__} is no question"
        return reason

    def _begin(self, message: AnyMessage, event: Asked, now: float) -> str | None:
        """Begin to answer a question. Return why it cannot be answered."""
        if isinstance(message, PinBlocks) and event.piece_bytes:
            return self._pins.send(event.number, message, now)
        answer, speaker, number = ANSWERS[type(message)], speaker_of(message), event.number
        assert speaker is not None
        if answer is not None:
            num_keys, ticket = len(getattr(message, "keys", ())), getattr(message, "ticket", 0)
            awaited = peer_of(speaker), ticket, answer
            if num_keys > MAX_ANSWER_PIECES:
                return f"a question names {num_keys} blocks, more than {MAX_ANSWER_PIECES}"
            is_open = answer is PinGranted and self._pins.waits(speaker, ticket)
            if is_open or not self._channel.expect(awaited, number):
                return f"the ticket {ticket} is open"
            self._waiting[number] = awaited, message
        self._handlers[type(message)](message, now)
        if speaker.address.startswith("#"):
            self._note(peer_of(speaker), event.asker)
        if answer is None:
            self._channel.answer(number, NIL)
        return None

    def _note(self, peer: Peer, asker: int) -> None:
        """Note by which connection a peer speaks that has something open."""
        open_ = self._peers.states
        if peer in open_:
            self._askers.setdefault(peer, set()).add(asker)
        else:
            self._askers.pop(peer, None)
        if len(self._askers) > 2 * len(open_):  # what has ended by time, or by a message
            self._askers = {peer: each for peer, each in self._askers.items() if peer in open_}

    def on_left(self, event: AskerLeft, now: float) -> None:
        """End what peers without an address have open that spoke by this connection only."""
        for peer, askers in list(self._askers.items()):
            askers.discard(event.asker)
            if not askers:
                del self._askers[peer]
                if (state := self._peers.states.get(peer)) is not None:
                    self._release(state, now)

    def on_ended(self, event: AskEnded, now: float) -> None:
        """Note that a question is over. A pin whose asker hung up before the answer ends, too."""
        self._pins.on_sent(event.number, now)
        awaited, message = self._waiting.pop(event.number, (None, None))
        if awaited is not None and self._channel.forget(awaited) and isinstance(message, PinBlocks):
            self._pins.on_unpin(Unpin(reader=message.reader, ticket=message.ticket), now)
