"""The machine of an engine that sleeps. It says so to the gateways, has weights checked for them,
lends them to others, and ends when it is told how to come back.

Pure: the check itself is a port, because it reads files for minutes. It holds no pages and computes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mooncake.base.messages import (
    Asleep,
    BorrowWeights,
    CheckWeights,
    NextLife,
    PeerLost,
    Restart,
    WeightsChecked,
    Welcome,
)
from mooncake.rpc.channel import Channel
from mooncake.rpc.membership import MAX_GATEWAYS


class Sleeper:
    """Sleeps until a `Restart` names it."""

    draining = True
    """True, so that gateways send no requests."""

    def __init__(
        self,
        asleep: Asleep,
        channel: Channel,
        gateways: Sequence[str],
        seeds: Sequence[str],
        check: Callable[[CheckWeights], None],
        interval_s: float,
        lend: Callable[[BorrowWeights], None] | None = None,
    ) -> None:
        """`gateways` and `seeds` are addresses; `seeds` is read at each use, because it may change.
        `check` begins to check a checkpoint, and `checked` is called with what it finds, between
        two events. `lend` answers workers that want to read weights.
        """
        self._asleep = asleep
        self._channel = channel
        self._gateways = dict.fromkeys(gateways)
        self._seeds = seeds
        self._check = check
        self._lend = lend
        self._interval_s = interval_s
        self._next_s = float("-inf")
        self._asked: CheckWeights | None = None
        """The latest question."""
        self._answer: WeightsChecked | None = None
        self._checking = False
        self.joined = False
        """True if a gateway knows that it sleeps."""
        self.next_life: NextLife | None = None
        """How it comes back; None: it sleeps on."""

    @property
    def gateways(self) -> list[str]:
        """The addresses of the gateways that it knows."""
        return list(self._gateways)

    def handle(self, event: msgspec.Struct, now: float) -> None:
        """Take a message of a gateway. Others are of an earlier life, and ignored."""
        del now
        match event:
            case Restart() if event.worker == self._asleep.worker:
                self.next_life = NextLife(mode=event.mode)
            case CheckWeights():
                self._on_question(event)
            case BorrowWeights() if self._lend is not None:
                self._lend(event)
            case Welcome():
                self.joined = True
                for gateway in (event.gateway, *event.gateways):
                    self._gateways.setdefault(gateway.address)
                while len(self._gateways) > MAX_GATEWAYS:
                    del self._gateways[next(iter(self._gateways))]
            case PeerLost():
                self._gateways.pop(event.worker.address, None)

    def checked(
        self, revision: str, fingerprint: str, error: str, *, borrows: bool = False
    ) -> None:
        """Take the result of the check that was begun last. If another one was asked for meanwhile,
        begin that.
        """
        assert self._asked is not None, "nothing was to be checked"
        self._checking = False
        answer = self._answer
        if answer is None or (answer.asker, answer.ticket) != (
            self._asked.asker, self._asked.ticket,
        ):  # fmt: skip
            self._begin(self._asked)
            return
        self._answer = msgspec.structs.replace(
            answer, revision=revision, fingerprint=fingerprint, error=error, borrows=borrows
        )
        self._channel.send(self._asked.asker.address, self._answer)

    def tick(self, now: float) -> float:
        """Tell the gateways that this engine sleeps, if that is due. Return when to call again."""
        if now >= self._next_s:
            self._next_s = now + self._interval_s
            for address in {**self._gateways, **dict.fromkeys(self._seeds)}:
                self._channel.send(address, self._asleep)
        return self._next_s

    def check_integrity(self) -> None:
        """Nothing is held here that could be lost."""

    def _on_question(self, question: CheckWeights) -> None:
        """Begin a check. A repeated question is answered again once there is an answer."""
        known = self._asked
        self._asked = question
        if known is not None and (known.asker, known.ticket) == (question.asker, question.ticket):
            if not self._checking and self._answer is not None:
                self._channel.send(question.asker.address, self._answer)
        elif not self._checking:
            self._begin(question)

    def _begin(self, question: CheckWeights) -> None:
        self._checking = True
        self._answer = WeightsChecked(
            asker=question.asker, ticket=question.ticket, worker=self._asleep.worker
        )
        self._check(question)
