"""Does what one message asks for many blocks in pieces, between which the node serves others.

Pure; owned by the node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mooncake.base import BlockKey
from mooncake.base.messages import Refused
from mooncake.base.pool_messages import DescribeBlocks, FindBlocks, RemoveBlocks, SetPins
from mooncake.base.rights import client_key
from mooncake.rpc.channel import Channel

PIECE_KEYS = 1024
"""Blocks of one piece."""
MAX_BEGUN = 64
"""Messages that are begun and not finished, of all pool clients that share a credential, and of all
others. Further ones that take more than a piece are refused.
"""
LongMessage = FindBlocks | DescribeBlocks | SetPins | RemoveBlocks


@dataclass(slots=True)
class _Work:
    client: str
    keys: Sequence[BlockKey]
    each: Callable[[Sequence[BlockKey], float], None]
    end: Callable[[float], None]
    num_done: int = 0


class LongWork:
    """The work of one node that is begun and not finished."""

    def __init__(self, channel: Channel) -> None:
        """`channel`: refusals go by it."""
        self._channel = channel
        self._begun: deque[_Work] = deque()
        self._num_begun: Counter[str] = Counter()
        """How many of them each client has, by its key; workers and gateways have none."""

    @property
    def quiet(self) -> bool:
        """Whether all that was begun is finished."""
        return not self._begun

    def refuses(self, message: LongMessage) -> bool:
        """Return whether a message is one too many, and tell its sender so. Call it before `begin`
        and before anything is done for the message.
        """
        num_begun = self._num_begun[client_key(message.asker)]
        if len(message.keys) <= PIECE_KEYS or num_begun < MAX_BEGUN:
            return False
        self.refuse(message, f"{num_begun} earlier messages are being worked on: try again")
        return True

    def refuse(self, message: LongMessage, reason: str) -> None:
        """Tell the sender of a message that nothing is done for it."""
        refused = Refused(
            asker=message.asker, ticket=message.ticket, message=type(message).__name__,
            reason=reason,
        )  # fmt: skip
        self._channel.send(message.asker.address, refused)

    def begin(
        self,
        message: LongMessage,
        keys: Sequence[BlockKey],
        each: Callable[[Sequence[BlockKey], float], None],
        end: Callable[[float], None],
        now: float,
    ) -> None:
        """Call `each` with one piece of the message's `keys` after the other, and then `end`. The
        first call is made now, the others at later ticks. Both get the time by then.
        """
        work = _Work(client_key(message.asker), keys, each, end)
        self._num_begun[work.client] += 1
        self._go_on(work, now)

    def tick(self, now: float) -> float | None:
        """Do one more piece. Return when to call again."""
        if self._begun:
            self._go_on(self._begun.popleft(), now)
        return now if self._begun else None

    def _go_on(self, work: _Work, now: float) -> None:
        begin, work.num_done = work.num_done, work.num_done + PIECE_KEYS
        work.each(work.keys[begin : work.num_done], now)
        if work.num_done < len(work.keys):
            self._begun.append(work)
            return
        self._num_begun[work.client] -= 1
        self._num_begun += Counter()  # drops those that have none
        work.end(now)
