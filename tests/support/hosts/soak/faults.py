"""Which faults a soak has, drawn from its seed. Nothing is done here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALL = (
    "kill", "kill", "kill", "kill up", "vanish", "unplug", "one way", "stop", "slow link",
    "loss", "slow disk", "full disk", "clock",
)  # fmt: skip
"""Kinds, the most frequent ones more than once."""
KINDS = tuple(dict.fromkeys(ALL))


@dataclass(frozen=True)
class Fault:
    """Something that happens to a host and lasts for a while."""

    kind: str
    host: str
    what: str = ""
    """The role of the process that it happens to, or the other host of a link."""
    seconds: float = 0.0
    size: float = 0.0
    """Seconds that a clock is off or a disk takes more, Mbit/s of a link, or the share it loses."""

    @property
    def cuts(self) -> bool:
        """Whether connections to a gateway of its host may break."""
        return self.kind in ("kill up", "vanish") or (self.kind, self.what) == ("kill", "gateway")

    @property
    def silences(self) -> bool:
        """Whether a gateway of its host may say nothing."""
        return self.kind in ("vanish", "unplug") or (self.kind, self.what) == ("stop", "gateway")

    def __str__(self) -> str:
        of = f" {self.what}" if self.what else ""
        size = f", {self.size:g}" if self.size else ""
        return f"{self.kind}{of} on {self.host} ({self.seconds:.1f} s{size})"


def draw(chance: random.Random, roles: Mapping[str, Sequence[str]]) -> Fault:
    """Return the next fault of a cluster, whose hosts have processes of these roles."""
    kind, host = chance.choice(ALL), chance.choice(sorted(roles))
    seconds = chance.uniform(2.0, 20.0)
    role = chance.choice(sorted(roles[host]))
    other = chance.choice([each for each in sorted(roles) if each != host])
    match kind:
        case "kill":
            return Fault(kind, host, role)
        case "kill up":
            return Fault(kind, host)
        case "one way":
            return Fault(kind, host, other, seconds)
        case "stop":
            return Fault(kind, host, role, seconds)
        case "slow link":
            return Fault(kind, host, "", seconds, chance.choice([2.0, 10.0, 50.0]))
        case "loss":
            return Fault(kind, host, "", seconds, chance.choice([0.01, 0.05, 0.2]))
        case "slow disk":
            return Fault(kind, host, "", seconds, chance.choice([0.02, 0.2, 2.0]))
        case "clock":
            ahead = chance.choice([-1.0, 1.0])
            return Fault(kind, host, "", seconds, ahead * chance.choice([1.0, 60.0, 86400.0]))
    return Fault(kind, host, "", seconds)
