"""Faults as values: kind, time and target. Pure; `injector` carries them out."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from random import Random

import msgspec

from mooncake.base import ConfigError

GATEWAY = "gateway"

KINDS = {
    "kill": "the process of worker `target` dies; its supervisor notices and restarts it",
    "kill_node": "all workers of node `target` die at once; only missing heartbeats reveal it",
    "hang": "worker `target` stands still for `seconds`, and what it writes lands afterwards",
    "hang_step": "the running step of engine `target` never ends, though it is heard",
    "kill_rank": "the process of rank `target`, such as decode-0/1, of an instance of several dies",
    "hang_rank": "rank `target` stands still for `seconds`",
    "slow_rank": "rank `target` takes `amount` times as long for `seconds`",
    "lose_step": "the next message of its lead to rank `target` is lost",
    "cut": "no message and no byte passes between nodes `target` and `other` for `seconds`",
    "cut_gateway": "the same between node `target` and the gateway",
    "cut_one_way": "no message passes from `target` to `other`, nodes or gateways, for `seconds`",
    "lose": "every message is lost with probability `amount` for `seconds`",
    "delay": "messages take `amount` seconds longer, and up to twice that, for `seconds`",
    "reorder": "messages overtake others with probability `amount` for `seconds`",
    "slow_links": "links move 1 KB/s for `seconds`",
    "slow_disk": "the disks of pool `target` take `amount` times as long for `seconds`",
    "disk_error": "the disks of pool `target` refuse to read and write for `seconds`",
    "skew": "the clock of `target`, a worker or the gateway, jumps ahead by `amount` seconds",
    "change_role": "engine `target` is told to serve in the other role, if it is not the last",
    "leave": "engine `target` is asked to end, and ends after `seconds` whatever it still has",
    "restart_gateway": "gateway and Conductor start anew and know nothing",
}
"""Each kind of fault -> what happens."""

_NEEDS: dict[str, tuple[str, ...]] = {
    "kill": ("target",),
    "kill_node": ("target",),
    "hang": ("target", "seconds"),
    "hang_step": ("target",),
    "kill_rank": ("target",),
    "hang_rank": ("target", "seconds"),
    "slow_rank": ("target", "seconds", "amount"),
    "lose_step": ("target",),
    "cut": ("target", "other", "seconds"),
    "cut_gateway": ("target", "seconds"),
    "cut_one_way": ("target", "other", "seconds"),
    "lose": ("seconds", "amount"),
    "delay": ("seconds", "amount"),
    "reorder": ("seconds", "amount"),
    "slow_links": ("seconds",),
    "slow_disk": ("target", "seconds", "amount"),
    "disk_error": ("target", "seconds"),
    "skew": ("target", "amount"),
    "change_role": ("target",),
    "leave": ("target", "seconds"),
    "restart_gateway": (),
}
_SHARES = ("lose", "reorder")
_NODES = ("kill_node", "cut", "cut_gateway")
_ENGINES = ("hang_step", "change_role", "leave")
_POOLS = ("slow_disk", "disk_error")
_RANKS = ("kill_rank", "hang_rank", "slow_rank", "lose_step")


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault: its kind, its target, and its time and duration in seconds."""

    at_s: float
    """The time after the first request."""
    kind: str
    target: str = ""
    other: str = ""
    seconds: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_s:9.4f}  FAULT {self.kind}", self.target, self.other]
        parts += [f"{self.seconds:.2f} s" if self.seconds else ""]
        parts += [f"{self.amount:g}" if self.amount else ""]
        return " ".join(part for part in parts if part)


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """The possible targets of faults in one cluster."""

    workers: list[str]
    nodes: list[str]
    pools: list[str]
    ranks: list[str] = []
    """The followers, by worker and number."""
    gateways: tuple[str, ...] = (GATEWAY,)

    def fitting(self, kind: str) -> list[str]:
        """Return the targets that a kind of fault may have."""
        if kind in _NODES:
            return self.nodes
        if kind == "cut_one_way":
            return [*self.nodes, *self.gateways]
        if kind in _POOLS:
            return self.pools
        if kind in _RANKS:
            return self.ranks
        if kind in _ENGINES:
            return [worker for worker in self.workers if worker not in self.pools]
        return [*self.workers, GATEWAY] if kind == "skew" else self.workers


def check_faults(faults: Sequence[Fault], names: Names, source: str) -> None:
    """Raise ConfigError, naming `source` and the fault, when one cannot happen in this cluster."""
    for number, fault in enumerate(faults, 1):
        where = f"{source}, fault {number}"
        if fault.kind not in KINDS:
            raise ConfigError(f"{where}: kind {fault.kind!r} is not one of {', '.join(KINDS)}")
        needs = _NEEDS[fault.kind]
        for field in ("target", "other", "seconds", "amount"):
            given = bool(getattr(fault, field))
            if given != (field in needs):
                verb = "needs a" if not given else "has no"
                raise ConfigError(f"{where}: {fault.kind} {verb} {field}")
        if fault.at_s < 0 or fault.seconds < 0 or fault.amount < 0:
            raise ConfigError(f"{where}: a time or an amount is negative; give 0 or more")
        if fault.kind in _SHARES and fault.amount > 1:
            raise ConfigError(
                f"{where}: amount is a probability, and {fault.amount:g} is above 1; give 1 at most"
            )
        known = names.fitting(fault.kind)
        for name in (fault.target, fault.other):
            if name and name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
                raise ConfigError(f"{where}: no {name!r} in this cluster; {hint}")


def random_fault(random: Random, names: Names, at_s: float, *, of_rank: bool = False) -> Fault:
    """Draw a fault that can happen in the cluster of `names`. `of_rank`: whether it happens to one
    of its ranks.
    """
    kinds = [kind for kind in KINDS if names.fitting(kind)]
    # What happens most often in real clusters happens most often here.
    kind = random.choice(_RANKS if of_rank else [*kinds, "kill"])
    needs = _NEEDS[kind]
    known = names.fitting(kind)
    target = random.choice(known) if "target" in needs else ""
    # A cut may lose messages within a node too. For other faults the two ends differ.
    others = [name for name in known if name != target or kind == "cut"] or known
    amounts = {
        "slow_disk": [10.0, 1000.0, 1e5],
        "slow_rank": [3.0, 50.0, 1000.0],
        "skew": [0.1, 1.0, 30.0],
    }.get(kind, [0.02, 0.2, 0.5])
    return Fault(
        at_s=at_s,
        kind=kind,
        target=target,
        other=random.choice(others) if "other" in needs else "",
        seconds=random.choice([0.02, 0.3, 1.5, 4.0]) if "seconds" in needs else 0.0,
        amount=random.choice(amounts) if "amount" in needs else 0.0,
    )
