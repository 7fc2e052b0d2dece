"""Fairness: the order between classes of service, and between tenants within one class.

Pure. `Turns` is owned by the admission permits, `WorkerQueues` by the Conductor. Classes are
strict: premium before interactive before batch. Within a class tenants take turns by tokens, as in
start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996): a request's turn begins where its
tenant's last one ended, but never before the turn that is being served now. So a flood of requests
queues behind itself, and unused turns cannot be saved up. Turns travel with the tasks: engines
serve their queues in this order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from mooncake.base import Priority

LATELY_S = 60.0
"""A tenant or class seen within this time counts as present, and capacity is kept free for it."""
OVER_SHARE = 0.85
"""The share of every limit for a tenant above its fair share while others are present."""
BELOW_PREMIUM_SHARE = 0.9
"""The share of every limit for interactive requests while premium ones are present."""
BATCH_SHARE = 0.7
"""The share of every limit for batch requests: they fill idle capacity only."""
MAX_IDLE_FLOWS = 256
RATE_WINDOW_S = 30.0
"""The work of a class is averaged over this time."""
MOST_OVERTAKEN = 0.9
"""At most this share of the workers' time is expected to go to higher classes."""

Order = tuple[int, float]
"""(class, turn): smaller goes first."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A request's place in the order, and the share of the limits it may use."""

    order: Order
    share: float = 1.0
    """The share of limits and permits that the request may use."""


class Turns:
    """The turns of all tenants, by class, and what each tenant has accepted."""

    def __init__(self) -> None:
        self._clocks = dict.fromkeys(Priority, 0.0)
        """Class -> the latest turn that has been served."""
        self._next: dict[tuple[Priority, str], float] = {}
        """(class, tenant) -> where its next turn begins."""
        self._open: Counter[tuple[Priority, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        """Tenant -> prompt tokens of its accepted requests."""
        self._seen_s: dict[str, float] = {}
        """Tenant -> when it was last seen, the earliest first."""
        self._premium_s: float | None = None

    def queue_position(self, priority: Priority, tenant: str, now: float) -> QueuePosition:
        """Return the queue position of a request that has just arrived; nothing is recorded yet."""
        turn = max(self._next.get((priority, tenant), 0.0), self._clocks[priority])
        return QueuePosition((priority.order, turn), self._share(priority, tenant, now))

    def add(self, priority: Priority, tenant: str, turn: float, num_tokens: int) -> None:
        """Record an accepted request of `num_tokens` prompt tokens; `remove` must follow."""
        self._next[priority, tenant] = turn + num_tokens
        self._open[priority, tenant] += 1
        self._tokens[tenant] += num_tokens

    def on_first_token(self, priority: Priority, turn: float) -> None:
        """Record that this turn was served: requests that arrive from now on come after it."""
        self._clocks[priority] = max(self._clocks[priority], turn)

    def remove(self, priority: Priority, tenant: str, num_prompt: int, num_output: int) -> None:
        """Record the end of a request; its output tokens delay its tenant's next turn as well."""
        flow = (priority, tenant)
        self._next[flow] += num_output
        self._open[flow] -= 1
        self._tokens[tenant] -= num_prompt
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        if not self._open[flow]:
            del self._open[flow]
            self._forget_idle(priority)

    def note_arrival(self, priority: Priority, tenant: str, now: float) -> None:
        """Record that a tenant has sent a request, whether or not it will be accepted."""
        self._seen_s.pop(tenant, None)
        self._seen_s[tenant] = now
        for name in [name for name, at_s in self._seen_s.items() if now - at_s > LATELY_S]:
            del self._seen_s[name]
        if priority is Priority.PREMIUM:
            self._premium_s = now

    def _share(self, priority: Priority, tenant: str, now: float) -> float:
        """Return the share of the limits that a request of this class and tenant may use now."""
        if priority is Priority.BATCH:
            share = BATCH_SHARE
        elif priority is Priority.PREMIUM or self._premium_s is None:
            share = 1.0
        else:
            share = BELOW_PREMIUM_SHARE if now - self._premium_s <= LATELY_S else 1.0
        return share * (OVER_SHARE if self._is_over(tenant, now) else 1.0)

    def check_integrity(self, holders: Counter[tuple[Priority, str]]) -> None:
        """Raise AssertionError unless exactly these (class, tenant) counts are accepted."""
        assert self._open == holders, "turns were given to others than the requests here"
        assert set(self._tokens) == {tenant for _, tenant in holders}
        assert len(self._next) <= len(self._open) + MAX_IDLE_FLOWS

    def _is_over(self, tenant: str, now: float) -> bool:
        recent = {name for name, at_s in self._seen_s.items() if now - at_s <= LATELY_S}
        num_present = len(recent | self._tokens.keys())
        return self._tokens[tenant] * num_present > self._tokens.total()

    def _forget_idle(self, priority: Priority) -> None:
        """Drop flows that make no difference any more; the clock of an idle class moves to the
        latest of its turns.
        """
        flows = [flow for flow in self._next if flow[0] is priority]
        if not any(flow in self._open for flow in flows):
            self._clocks[priority] = max(self._next[flow] for flow in flows)
        idle = [flow for flow in flows if flow not in self._open]
        passed = [flow for flow in idle if self._next[flow] <= self._clocks[priority]]
        too_many = max(0, len(idle) - MAX_IDLE_FLOWS // len(Priority))
        for flow in passed or idle[:too_many]:
            del self._next[flow]


class WorkerQueues:
    """The prompts that wait to be computed at each worker, with their order: a new request does not
    wait for all of them.
    """

    def __init__(self) -> None:
        self._queues: dict[str, dict[str, tuple[Order, float]]] = {}
        self._worker_of: dict[str, str] = {}
        self._rates: dict[int, tuple[float, float]] = {}
        """Class -> seconds of work that arrived per second lately, and when that was updated."""

    def add(
        self, worker_id: str, request_id: str, order: Order, seconds: float, now: float
    ) -> None:
        """Add a placed request whose prompt takes `seconds` to compute."""
        rate, at_s = self._rates.get(order[0], (0.0, now))
        rate = rate * math.exp((at_s - now) / RATE_WINDOW_S) + seconds / RATE_WINDOW_S
        self._rates[order[0]] = rate, now
        self._queues.setdefault(worker_id, {})[request_id] = order, seconds
        self._worker_of[request_id] = worker_id

    def remove(self, request_id: str) -> None:
        """Remove a request whose prompt is computed or that has ended; repeats change nothing."""
        worker_id = self._worker_of.pop(request_id, None)
        if worker_id is not None:
            queue = self._queues[worker_id]
            del queue[request_id]
            if not queue:
                del self._queues[worker_id]

    def overtaken_s(self, worker_id: str, order: Order) -> float:
        """Return the seconds of work in this worker's queue that a request of `order` overtakes."""
        queue = self._queues.get(worker_id, {})
        return sum(seconds for other, seconds in queue.values() if other > order)

    def slowdown(self, order: Order, num_workers: int, now: float) -> float:
        """Return the factor by which a wait becomes longer because requests of higher classes that
        are still to arrive overtake it, at the rate they arrived lately.
        """
        found = [(rate, at_s) for level, (rate, at_s) in self._rates.items() if level < order[0]]
        rate = sum(rate * math.exp((at_s - now) / RATE_WINDOW_S) for rate, at_s in found)
        return 1 / (1 - min(rate / max(1, num_workers), MOST_OVERTAKEN))

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError when a queued request is placed nowhere."""
        assert set(self._worker_of) <= placed, "an ended request stands in a queue"
        assert sum(len(queue) for queue in self._queues.values()) == len(self._worker_of)
