"""The answers to the probes of a process: whether it has started, takes work, and can go on.

Pure: the state of a process goes in, a verdict comes out. `launch.host.health` collects the state.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class Probe(enum.Enum):
    """The question that a probe asks."""

    STARTUP = "startup"
    READY = "ready"
    LIVE = "live"


class Status(enum.Enum):
    STARTING = "starting"
    JOINING = "joining"
    OK = "ok"
    DRAINING = "draining"
    STUCK = "stuck"
    FAILED = "failed"


PASSING = {
    Probe.STARTUP: frozenset({Status.JOINING, Status.OK, Status.DRAINING}),
    Probe.READY: frozenset({Status.OK}),
    Probe.LIVE: frozenset({Status.STARTING, Status.JOINING, Status.OK, Status.DRAINING}),
}
"""The statuses in which each probe passes. A process that fails `LIVE` cannot recover and must be
restarted.
"""


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a process, or of one worker in it, at one moment."""

    starting: str = ""
    """What its start is doing; empty once it has started."""
    num_done: int = 0
    num_whole: int = 0
    """How much of that is done, and the whole. A whole of 0: it is not counted."""
    joined: bool = True
    """Whether the cluster knows it."""
    draining: bool = False
    """Whether it was told to leave."""
    stuck_s: float = 0.0
    """Seconds for which its loop has not turned."""
    limit_s: float = float("inf")
    """A loop that has not turned for longer than this will not turn again."""
    failure: str = ""
    """Why it cannot go on; empty while it can."""

    @property
    def status(self) -> Status:
        """The worst status that applies."""
        if self.failure:
            return Status.FAILED
        if self.stuck_s > self.limit_s:
            return Status.STUCK
        if self.starting:
            return Status.STARTING
        if self.draining:
            return Status.DRAINING
        return Status.OK if self.joined else Status.JOINING

    @property
    def reason(self) -> str:
        """The reason for the status, for people; empty when all is well."""
        match self.status:
            case Status.FAILED:
                return self.failure
            case Status.STUCK:
                return f"its loop has not turned for {self.stuck_s:.0f} s"
            case Status.STARTING:
                counted = f", {self.num_done} of {self.num_whole}" if self.num_whole else ""
                return f"{self.starting}{counted}"
            case Status.DRAINING:
                return "it was told to leave"
            case Status.JOINING:
                return "no gateway knows it yet"
            case Status.OK:
                return ""


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to one probe; the encoded body has no `ok`, which is the HTTP status."""

    status: str
    reason: str = ""


def passes(probe: Probe, vitals: Vitals) -> bool:
    """Whether a process in this state passes `probe`."""
    return vitals.status in PASSING[probe]


def judge(probe: Probe, parts: Sequence[Vitals]) -> tuple[bool, Verdict]:
    """Return whether a process passes `probe`, and what to say. It passes if all its parts do. The
    text is about the first part that does not pass, or is not well.
    """
    failing = [part for part in parts if not passes(probe, part)]
    unwell = [part for part in parts if part.status is not Status.OK]
    for part in (*failing, *unwell):
        return not failing, Verdict(part.status.value, part.reason)
    return True, Verdict(Status.OK.value)
