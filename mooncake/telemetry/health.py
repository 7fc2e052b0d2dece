"""What the probes of a process are told: has it started, does it take work, can it go on.

Pure: what is known of a process goes in, a verdict comes out. `launch.host.health` gathers it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class Probe(enum.Enum):
    """What is asked."""

    STARTUP = "startup"
    READY = "ready"
    LIVE = "live"


class Status(enum.Enum):
    """How a process is."""

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
"""The statuses in which a probe passes. Who fails `LIVE` cannot get well and is to be restarted."""


class Vitals(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a process, or of one worker in it, at one moment."""

    starting: str = ""
    """What its start is doing; empty once it has started."""
    num_done: int = 0
    num_whole: int = 0
    """How much of that is done, of how much; of 0: it is not counted."""
    joined: bool = True
    """Whether the cluster knows it."""
    draining: bool = False
    """Whether it was told to leave."""
    stuck_s: float = 0.0
    """For how many seconds its loop has not turned."""
    limit_s: float = float("inf")
    """A loop that has not turned for longer does not turn again."""
    failure: str = ""
    """Why it cannot go on; empty while it can."""

    @property
    def status(self) -> Status:
        """The worst that is true of it."""
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
        """What a person is told about the status; empty when all is well."""
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
    """Return whether a process passes `probe`, which it does if all its parts do, and what to say:
    about the first part that does not, or is not well.
    """
    failing = [part for part in parts if not passes(probe, part)]
    unwell = [part for part in parts if part.status is not Status.OK]
    for part in (*failing, *unwell):
        return not failing, Verdict(part.status.value, part.reason)
    return True, Verdict(Status.OK.value)
