"""The visitor's side of one owner of device memory: what its regions are, windows asked for and
held.

Lives in the staging loop. Each question is answered once, by the owner or, when its stream breaks,
by us; one that the owner may be acting on only after it has confirmed that it is over, or cannot
be reached.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from mooncake.base.errors import ProtocolError, TransferError
from mooncake.transfer.backends.io_loop import IoLoop
from mooncake.transfer.backends.rdma_session import VisitorSession
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.arena import StagingLimits
from mooncake.transfer.staging.slots import FairSlots

_LOG = logging.getLogger(__name__)

Visit = VisitorSession[wire.Ask, wire.Answer]
Answered = Callable[[wire.Answer], None]
"""Given Granted, Done or Refused."""


class PeerHub(Protocol):
    """What all peers of one engine share."""

    limits: StagingLimits

    @property
    def loop(self) -> IoLoop: ...

    def new_session(self, peer: StagingPeer, fenced: Sequence[str]) -> Visit:
        """Begin to connect. Raises TransferError."""

    def reached(self, peer: StagingPeer) -> None:
        """The owner has let `peer` in."""

    def forget(self, peer: StagingPeer, refusal: str | None) -> None:
        """Nothing more goes by `peer`; `refusal`: why its owner could not be reached."""


class PeerState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    GONE = "gone"


@dataclass(slots=True)
class _Question:
    answered: Answered
    acts: bool = False
    """The owner copies for it, or is about to."""


@dataclass(slots=True)
class _Learner:
    """Somebody who wants to know what some regions are."""

    missing: set[int]
    known: Callable[[], None]
    failed: Callable[[str], None]


class StagingPeer:
    """See the module."""

    def __init__(self, engine_id: str, address: tuple[str, int], hub: PeerHub) -> None:
        self.engine_id = engine_id
        self.address = address
        self.state = PeerState.CONNECTING
        self.permits = FairSlots(hub.limits.num_windows_asked)
        """Who may ask for a window."""
        self._hub = hub
        self._facts: dict[int, wire.RegionFacts] = {}
        self._learners: list[_Learner] = []
        self._questions: dict[int, _Question] = {}
        self._unfenced: dict[int, _Question] = {}
        """Of an earlier stream; the owner may still be copying."""
        self._next_ticket = 1
        self._unsent: list[wire.Ask] = []
        self._session: Visit | None = None
        hub.loop.post(functools.partial(self._connect, []))  # it may fail at once

    @property
    def window_bytes(self) -> int:
        """Length of the owner's windows. Only when a region is known."""
        return next(iter(self._facts.values())).window_bytes

    @property
    def num_open(self) -> int:
        """Questions without an answer, and windows held."""
        return len(self._questions) + len(self._unfenced)

    # ------------------------------------------------------------ the stream

    def _connect(self, fenced: Sequence[str]) -> None:
        if self.state is PeerState.GONE:  # closed before it began
            return
        try:
            self._session = self._hub.new_session(self, fenced)
        except TransferError as error:
            self._hub.loop.post(functools.partial(self._end, error.message, refused=True))

    def on_welcome(self) -> None:
        """The owner has ended the earlier stream, and its copies."""
        self.state = PeerState.READY
        self._hub.reached(self)
        unfenced, self._unfenced = self._unfenced, {}
        self._refuse(unfenced, "the control stream broke")
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._say(message)

    def on_session_end(self, reason: str) -> None:
        """The stream broke: ask whether copies for us are over, else there is no more to do."""
        session, self._session = self._session, None
        if self.state is not PeerState.READY or session is None:
            self._end(reason, refused=True)
            return
        _LOG.info("staging stream to %s broke: %s", self.engine_id, reason)
        questions, self._questions = self._questions, {}
        acting = {ticket: each for ticket, each in questions.items() if each.acts}
        if not acting:
            self._questions = questions
            self._end(reason)
            return
        self.state = PeerState.CONNECTING
        self._unfenced = acting
        self._fail_learners(reason)
        self._connect([session.connection_id])
        self._refuse({t: each for t, each in questions.items() if not each.acts}, reason)

    def give_up(self, reason: str) -> None:
        """The owner does not answer: as if the stream had broken."""
        if self._session is not None:
            self._session.close()
            self.on_session_end(reason)

    def _end(self, reason: str, *, refused: bool = False) -> None:
        if self.state is PeerState.GONE:
            return
        self.state = PeerState.GONE
        self._hub.forget(self, reason if refused else None)
        if self._unfenced:
            _LOG.warning("copies of %s end unconfirmed: %s", self.engine_id, reason)
        self._fail_learners(reason)
        questions = {**self._unfenced, **self._questions}
        self._questions, self._unfenced = {}, {}
        self._refuse(questions, reason)

    def close(self, reason: str) -> None:
        """Hang up."""
        if self._session is not None:
            self._session.close()
        self._end(reason)

    def _refuse(self, questions: dict[int, _Question], reason: str) -> None:
        for ticket, question in questions.items():
            question.answered(wire.Refused(ticket, reason))

    def _fail_learners(self, reason: str) -> None:
        learners, self._learners = self._learners, []
        for learner in learners:
            learner.failed(reason)

    # ------------------------------------------------------------ questions

    def learn(
        self, region_ids: Iterable[int], known: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Call `known` when it is known what these regions are, or `failed` with a reason."""
        missing = set(region_ids) - self._facts.keys()
        if not missing:
            known()
            return
        asked = set().union(*(learner.missing for learner in self._learners))
        self._learners.append(_Learner(missing, known, failed))
        for region_id in sorted(missing - asked):
            self._say(wire.AskRegion(region_id))

    def facts(self, region_id: int) -> wire.RegionFacts:
        """Return what a region is, which was learnt."""
        return self._facts[region_id]

    def ask(self, make: Callable[[int], wire.Ask], answered: Answered, acts: bool = False) -> int:
        """Ask what `make(ticket)` returns; return the ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._questions[ticket] = _Question(answered, acts)
        if self.state is PeerState.GONE:
            self._hub.loop.post(functools.partial(self._refuse_late, ticket))
        else:
            self._say(make(ticket))
        return ticket

    def _refuse_late(self, ticket: int) -> None:
        question = self._questions.pop(ticket, None)
        if question is not None:
            self._refuse({ticket: question}, "it is not connected any more")

    def land(self, ticket: int) -> None:
        """A granted window is full; the answer goes where that to the first question went."""
        question = self._questions.get(ticket)
        if question is not None:  # else the stream broke, and that was the answer
            question.acts = True
            self._say(wire.Land(ticket))

    def drop(self, ticket: int) -> None:
        """A window is not needed any more; no answer comes."""
        if self._questions.pop(ticket, None) is not None:
            self._say(wire.Drop(ticket))

    def _say(self, message: wire.Ask) -> None:
        if self.state is PeerState.READY and self._session is not None:
            self._session.send(message)
        elif self.state is PeerState.CONNECTING:
            self._unsent.append(message)

    def on_answer(self, answer: wire.Answer) -> None:
        """Take what the owner says. Raises ProtocolError."""
        if isinstance(answer, wire.RegionFacts):
            self._learnt(answer)
            return
        question = self._questions.get(answer.ticket)
        if question is None:  # dropped meanwhile
            return
        if isinstance(answer, wire.Granted):
            if question.acts:
                raise ProtocolError("the owner grants what was not asked for")
        else:
            del self._questions[answer.ticket]
        question.answered(answer)

    def _learnt(self, answer: wire.RegionFacts) -> None:
        self._facts[answer.region_id] = answer
        for learner in self._learners:
            learner.missing.discard(answer.region_id)
        known = [learner for learner in self._learners if not learner.missing]
        self._learners = [learner for learner in self._learners if learner.missing]
        for learner in known:
            learner.known()
