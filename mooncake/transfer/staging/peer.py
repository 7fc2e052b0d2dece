"""The client's side of one owner of device memory: what its regions are, and requests for windows.

Each request is answered once: by the owner or, when its session breaks, by us. If the owner may be
acting on a request, we answer it only after the owner has confirmed that the broken session is
over, or after it cannot be reached. Lives in the staging loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.endpoint import PeerKey
from mooncake.transfer.net.session import ClientSession, SessionState
from mooncake.transfer.staging import wire
from mooncake.transfer.staging.slots import FairSlots

if TYPE_CHECKING:
    from mooncake.transfer.staging.engine import StagingEngine

_LOG = logging.getLogger(__name__)

Answered = Callable[[wire.Answer], None]
"""Called with Granted, Done or Refused."""


@dataclass(slots=True)
class _Request:
    answered: Answered
    acts: bool = False
    """True if the owner copies for this request, or is about to."""


@dataclass(slots=True)
class _Learner:
    """A caller that waits until it is known what some regions are."""

    missing: set[int]
    known: Callable[[], None]
    failed: Callable[[str], None]


class StagingPeer:
    """One owner of device memory."""

    def __init__(self, key: PeerKey, hub: StagingEngine) -> None:
        """Begin to connect. Raises ConfigError when the endpoint in `key` is malformed."""
        self.engine_id = key.engine_id
        self.permits = FairSlots(hub.limits.num_windows_asked)
        """Permits to ask for a window."""
        self._loop = hub.loop
        self._facts: dict[int, wire.RegionFacts] = {}
        self._learners: list[_Learner] = []
        self._requests: dict[int, _Request] = {}
        self._unfenced: dict[int, _Request] = {}
        """Requests of an earlier session; the owner may still be copying for them."""
        self._next_ticket = 1
        self._unsent: list[wire.Ask] = []
        self._session: ClientSession[wire.Ask, wire.Answer] = ClientSession(
            key, hub.peers, hub.loop, hub.limits.connect_s, self, wire.CODEC
        )
        self._session.connect()

    @property
    def window_bytes(self) -> int:
        """Length of the owner's windows. Available only when a region is known."""
        return next(iter(self._facts.values())).window_bytes

    # ------------------------------------------------------------ the session

    def on_welcome(self) -> None:
        """Answer what an earlier session left open, and send what has waited for this one."""
        self._session.ready()
        unfenced, self._unfenced = self._unfenced, {}
        self._refuse(unfenced, "the control session broke")
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            self._session.send(message)

    def on_break(self, reason: str, connection_id: str) -> None:
        """Ask whether the owner's copies for us are over. End if there are none."""
        acting = {ticket: each for ticket, each in self._requests.items() if each.acts}
        if not acting:
            self._session.end(reason)
            return
        others = {ticket: each for ticket, each in self._requests.items() if not each.acts}
        self._requests, self._unfenced = {}, acting
        self._fail_learners(reason)
        self._session.connect([connection_id])
        self._refuse(others, reason)

    def give_up(self, reason: str) -> None:
        """Treat the owner, which does not answer, as if its session had broken."""
        self._session.give_up(reason)

    def end(self, reason: str) -> None:
        """Close the session."""
        self._session.end(reason)

    def on_gone(self, reason: str) -> None:
        """Answer all open requests: nothing more comes from the owner."""
        if self._unfenced:
            _LOG.warning(
                "%s is gone before it confirmed that its copies ended: %s", self.engine_id, reason
            )
        self._fail_learners(reason)
        requests = {**self._unfenced, **self._requests}
        self._requests, self._unfenced = {}, {}
        self._refuse(requests, reason)

    def _refuse(self, requests: dict[int, _Request], reason: str) -> None:
        for ticket, request in requests.items():
            request.answered(wire.Refused(ticket, reason))

    def _fail_learners(self, reason: str) -> None:
        learners, self._learners = self._learners, []
        for learner in learners:
            learner.failed(reason)

    # ------------------------------------------------------------ requests

    def learn(
        self, region_ids: Iterable[int], known: Callable[[], None], failed: Callable[[str], None]
    ) -> None:
        """Call `known` once the owner has described these regions, or `failed` with a reason."""
        missing = set(region_ids) - self._facts.keys()
        if not missing:
            known()
            return
        asked = set().union(*(learner.missing for learner in self._learners))
        self._learners.append(_Learner(missing, known, failed))
        for region_id in sorted(missing - asked):
            self._send(wire.AskRegion(region_id))

    def facts(self, region_id: int) -> wire.RegionFacts:
        """Return what a region is. Call it only after `learn`."""
        return self._facts[region_id]

    def ask(self, make: Callable[[int], wire.Ask], answered: Answered) -> int:
        """Send what `make(ticket)` returns; return the ticket."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._requests[ticket] = _Request(answered)
        if self._session.state is SessionState.GONE:
            self._loop.post(functools.partial(self._refuse_late, ticket))
        else:
            self._send(make(ticket))
        return ticket

    def _refuse_late(self, ticket: int) -> None:
        request = self._requests.pop(ticket, None)
        if request is not None:
            self._refuse({ticket: request}, "it is not connected any more")

    def land(self, ticket: int, checksum: int) -> None:
        """Tell the owner that a granted window is full of bytes with this checksum (0: not to be
        compared); the answer goes to the request for it.
        """
        request = self._requests.get(ticket)
        if request is not None:  # otherwise the session broke, and that was the answer
            request.acts = True
            self._send(wire.Land(ticket, checksum))

    def drop(self, ticket: int) -> None:
        """Give a window back. No answer comes."""
        if self._requests.pop(ticket, None) is not None:
            self._send(wire.Drop(ticket))

    def _send(self, message: wire.Ask) -> None:
        if self._session.state is SessionState.READY:
            self._session.send(message)
        elif self._session.state is SessionState.CONNECTING:
            self._unsent.append(message)

    def on_answer(self, answer: wire.Answer) -> None:
        """Take an answer of the owner. Raises ProtocolError."""
        if isinstance(answer, wire.RegionFacts):
            self._learnt(answer)
            return
        request = self._requests.get(answer.ticket)
        if request is None:  # dropped meanwhile
            return
        if isinstance(answer, wire.Granted):
            if request.acts:
                raise ProtocolError("the owner granted a window that was not asked for")
        else:
            del self._requests[answer.ticket]
        request.answered(answer)

    def _learnt(self, answer: wire.RegionFacts) -> None:
        self._facts[answer.region_id] = answer
        for learner in self._learners:
            learner.missing.discard(answer.region_id)
        known = [learner for learner in self._learners if not learner.missing]
        self._learners = [learner for learner in self._learners if learner.missing]
        for learner in known:
            learner.known()
