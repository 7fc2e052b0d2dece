"""Whose turn it is: between classes of service, and between tenants within one class.

Pure; owned by the gateway's desk (turns, standing) and by the Conductor (lines at its workers).
Classes are strict: premium before interactive before batch. Within a class tenants take turns by
tokens, as in start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996): a request's turn is
where its tenant's last one ended, but never before what is being served now, so a flood stands in
line behind itself and credit cannot be saved up. Turns travel with the tasks: engines serve their
lines in this order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mooncake.base import Priority

LATELY_S = 60.0
"""A tenant or a class that was seen so lately counts as present: room is kept for it."""
OVER_SHARE = 0.85
"""Of every limit, for a tenant that holds more than its fair share while others are present."""
BELOW_PREMIUM_SHARE = 0.9
"""Of every limit, for interactive requests while premium ones are about."""
BATCH_SHARE = 0.7
"""Of every limit, for batch: it fills what is idle, not what is left."""
MAX_IDLE_FLOWS = 256
RATE_WINDOW_S = 30.0
"""Over which the work of a class is averaged."""
MOST_OVERTAKEN = 0.9
"""Share of the workers' time that higher classes are thought to take, at most."""

Order = tuple[int, float]
"""(class, turn): smaller goes first."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request may claim against others."""

    order: Order
    share: float = 1.0
    """Of limits and permits, what it may use of them."""


class Turns:
    """The turns of all tenants, by class, and what each tenant has in the house."""

    def __init__(self) -> None:
        self._clocks = dict.fromkeys(Priority, 0.0)
        """Class -> the furthest turn that has been served."""
        self._next: dict[tuple[Priority, str], float] = {}
        """Class and tenant -> where its next turn begins."""
        self._open: Counter[tuple[Priority, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        """Tenant -> prompt tokens of its requests in the house."""
        self._seen_s: dict[str, float] = {}
        """Tenants present, the one not seen for longest first."""
        self._premium_s: float | None = None

    def standing(self, priority: Priority, tenant: str, now: float) -> Standing:
        """Return the standing of a request that has just come; nothing is taken yet."""
        turn = max(self._next.get((priority, tenant), 0.0), self._clocks[priority])
        return Standing((priority.order, turn), self._share(priority, tenant, now))

    def take(self, priority: Priority, tenant: str, turn: float, num_tokens: int) -> None:
        """A request of so many prompt tokens takes its turn; to be ended by `ended`."""
        self._next[priority, tenant] = turn + num_tokens
        self._open[priority, tenant] += 1
        self._tokens[tenant] += num_tokens

    def began(self, priority: Priority, turn: float) -> None:
        """The request of this turn has its first token: whoever comes now comes after it."""
        self._clocks[priority] = max(self._clocks[priority], turn)

    def ended(self, priority: Priority, tenant: str, num_prompt: int, num_output: int) -> None:
        """A request has left after so many output tokens, which count as well."""
        flow = (priority, tenant)
        self._next[flow] += num_output
        self._open[flow] -= 1
        self._tokens[tenant] -= num_prompt
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        if not self._open[flow]:
            del self._open[flow]
            self._forget_idle(priority)

    def note(self, priority: Priority, tenant: str, now: float) -> None:
        """Somebody asks for something, whether or not it is given."""
        self._seen_s.pop(tenant, None)
        self._seen_s[tenant] = now
        for name in [name for name, at_s in self._seen_s.items() if now - at_s > LATELY_S]:
            del self._seen_s[name]
        if priority is Priority.PREMIUM:
            self._premium_s = now

    def _share(self, priority: Priority, tenant: str, now: float) -> float:
        """Return how much of the limits a request of this class and tenant may use now."""
        if priority is Priority.BATCH:
            share = BATCH_SHARE
        elif priority is Priority.PREMIUM or self._premium_s is None:
            share = 1.0
        else:
            share = BELOW_PREMIUM_SHARE if now - self._premium_s <= LATELY_S else 1.0
        return share * (OVER_SHARE if self._is_over(tenant, now) else 1.0)

    def check_integrity(self, holders: Counter[tuple[Priority, str]]) -> None:
        """Raise AssertionError unless exactly these have requests in the house."""
        assert self._open == holders, "turns were given to others than the requests here"
        assert set(self._tokens) == {tenant for _, tenant in holders}
        assert len(self._next) <= len(self._open) + MAX_IDLE_FLOWS

    def _is_over(self, tenant: str, now: float) -> bool:
        recent = {name for name, at_s in self._seen_s.items() if now - at_s <= LATELY_S}
        num_present = len(recent | self._tokens.keys())
        return self._tokens[tenant] * num_present > self._tokens.total()

    def _forget_idle(self, priority: Priority) -> None:
        """Drop what makes no difference any more; a class at rest starts from one mark again."""
        flows = [flow for flow in self._next if flow[0] is priority]
        if not any(flow in self._open for flow in flows):
            self._clocks[priority] = max(self._next[flow] for flow in flows)
        idle = [flow for flow in flows if flow not in self._open]
        passed = [flow for flow in idle if self._next[flow] <= self._clocks[priority]]
        too_many = max(0, len(idle) - MAX_IDLE_FLOWS // len(Priority))
        for flow in passed or idle[:too_many]:
            del self._next[flow]


class Lines:
    """Who waits to be computed at each worker, in which order: what goes before a newcomer is not
    all that is queued there.
    """

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, tuple[Order, float]]] = {}
        self._worker_of: dict[str, str] = {}
        self._rates: dict[int, tuple[float, float]] = {}
        """Class -> seconds of work that came in a second lately, and when that was."""

    def add(
        self, worker_id: str, request_id: str, order: Order, seconds: float, now: float
    ) -> None:
        """A request was placed, and its prompt will take so long."""
        rate, at_s = self._rates.get(order[0], (0.0, now))
        rate = rate * math.exp((at_s - now) / RATE_WINDOW_S) + seconds / RATE_WINDOW_S
        self._rates[order[0]] = rate, now
        self._lines.setdefault(worker_id, {})[request_id] = order, seconds
        self._worker_of[request_id] = worker_id

    def remove(self, request_id: str) -> None:
        """Its prompt is computed, or it has left; repeats change nothing."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            line = self._lines[worker_id]
            del line[request_id]
            if not line:
                del self._lines[worker_id]

    def behind_s(self, worker_id: str, order: Order) -> float:
        """Return the seconds of work in this worker's line that let `order` go first."""
        line = self._lines.get(worker_id, {})
        return sum(seconds for other, seconds in line.values() if other > order)

    def stretch(self, order: Order, num_workers: int, now: float) -> float:
        """Return how many times as long a wait takes because of those who will come and go first:
        the higher classes, at the rate of late.
        """
        found = [(rate, at_s) for level, (rate, at_s) in self._rates.items() if level < order[0]]
        rate = sum(rate * math.exp((at_s - now) / RATE_WINDOW_S) for rate, at_s in found)
        return 1 / (1 - min(rate / max(1, num_workers), MOST_OVERTAKEN))

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError when somebody is in a line who is placed nowhere."""
        assert set(self._worker_of) <= placed, "an ended request stands in a line"
        assert sum(len(line) for line in self._lines.values()) == len(self._worker_of)
