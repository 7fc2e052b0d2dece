"""Fairness: the order between requests of classes of service and of tenants.

Pure. `Turns` is owned by the admission permits, `WorkerQueues` by the Conductor. Requests take
turns by tokens, as in self-clocked fair queuing (Golestani, INFOCOM 1994): a request's turn ends as
many tokens, divided by its weight, after its tenant's last one, or after the turn that is being
served now, if that is later. So a flood of requests queues behind itself, and unused turns cannot
be saved up. A premium flood leaves interactive requests their part: 16 tokens of premium are served
for 4 of interactive. A tenant that uses both classes has one share, which it divides. Batch
requests are patient: they come after all others and use idle capacity. While they wait, they earn
credit from the tokens of others (`BatchCredit`); when it suffices, the first one is admitted at
once. Turns travel with the tasks, so engines serve their queues in this order.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from mooncake.base import Flow, Priority

LATELY_S = 60.0
"""A tenant or class seen within this time counts as present, and capacity is kept free for it."""
OVER_SHARE = 0.85
"""The share of every limit that a tenant above its fair share may use while others are present."""
BELOW_PREMIUM_SHARE = 0.9
"""The share of every limit for interactive requests while premium ones are present."""
BATCH_SHARE = 0.7
"""The share of every limit for batch requests: they fill idle capacity."""
MAX_IDLE_FLOWS = 256
RATE_WINDOW_S = 30.0
"""The work of a class is averaged over this time."""

PATIENT_TURN = 1e15
"""Turns of batch requests begin here, behind all others."""
MAX_CREDIT_TOKENS = 32_768.0
"""A batch request with a longer prompt needs only this much credit."""

Order = tuple[float, int]
"""(turn, class): smaller goes first."""


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A request's place in the order, and the share of the limits it may use."""

    order: Order
    share: float = 1.0
    """The share of limits and permits that the request may use."""
    is_patient: bool = False
    """True if it goes only where it fills idle capacity, and yields to others."""


class BatchCredit:
    """Counts the tokens that batch work earns while it waits: a part of what others compute, by the
    weights of the classes.
    """

    def __init__(self) -> None:
        self._tokens = 0.0

    def earn(self, priority: Priority, num_tokens: int) -> None:
        """Count tokens of a request of another class."""
        earned = num_tokens * Priority.BATCH.weight / priority.weight
        self._tokens = min(MAX_CREDIT_TOKENS, self._tokens + earned)

    def spend(self, num_tokens: int) -> bool:
        """Take the tokens of a batch request's prompt. Return False when there are too few."""
        cost = min(MAX_CREDIT_TOKENS, num_tokens)
        if self._tokens < cost:
            return False
        self._tokens -= cost
        return True


class Turns:
    """Keeps the turns of all tenants in all classes, and what each tenant has accepted."""

    def __init__(self) -> None:
        self.clock = 0.0
        """The latest turn that has been served, except turns of batch."""
        self._batch_clock = PATIENT_TURN
        self._credit = BatchCredit()
        self._next: dict[Flow, float] = {}
        """(class, tenant) -> where its next turn begins."""
        self._open: Counter[Flow] = Counter()
        self._tokens: Counter[str] = Counter()
        """Tenant -> prompt tokens of its accepted requests."""
        self._seen_s: dict[str, float] = {}
        """Tenant -> when it was last seen, the earliest first."""
        self._premium_s: float | None = None

    def queue_position(self, flow: Flow, num_tokens: int, now: float) -> QueuePosition:
        """Return the queue position of a request that has just arrived, with this many tokens in
        its prompt; nothing is recorded yet.
        """
        start = max(self._next.get(flow, 0.0), self._clock_of(flow))
        order = start + self._length(flow, num_tokens), flow[0].order
        return QueuePosition(order, self._share(*flow, now), flow[0] is Priority.BATCH)

    def add(self, flow: Flow, position: QueuePosition, num_tokens: int) -> None:
        """Record an accepted request of `num_tokens` prompt tokens; `remove` must follow."""
        self._next[flow] = position.order[0]
        self._open[flow] += 1
        self._tokens[flow[1]] += num_tokens

    def on_served(self, turn: float) -> None:
        """Record that this turn was served, here or by another gateway: requests that arrive from
        now on come after it.
        """
        if turn < PATIENT_TURN:
            self.clock = max(self.clock, turn)
        else:
            self._batch_clock = max(self._batch_clock, turn)

    def on_first_token(self, flow: Flow, position: QueuePosition, num_tokens: int) -> None:
        """Record that a request's prompt of `num_tokens` tokens was computed."""
        self.on_served(position.order[0])
        self._earn(flow, num_tokens)

    def due(self, position: QueuePosition, num_tokens: int) -> QueuePosition | None:
        """Return the position of a batch request that need not be patient any more, because others
        have computed enough while batch work waited. Return None if it must still wait.
        """
        if not position.is_patient or not self._credit.spend(num_tokens):
            return None
        return replace(position, order=(self.clock, position.order[1]), is_patient=False)

    def remove(self, flow: Flow, num_prompt: int, num_output: int) -> None:
        """Record the end of a request; its output tokens delay its flow's next turn as well."""
        tenant = flow[1]
        self._earn(flow, num_output)
        self._next[flow] += self._length(flow, num_output)
        self._open[flow] -= 1
        self._tokens[tenant] -= num_prompt
        if not self._tokens[tenant]:
            del self._tokens[tenant]
        if not self._open[flow]:
            del self._open[flow]
            self._forget_idle()

    def note_arrival(self, flow: Flow, now: float) -> None:
        """Record that a tenant has sent a request, whether or not it will be accepted."""
        priority, tenant = flow
        self._seen_s.pop(tenant, None)
        self._seen_s[tenant] = now
        for name in [name for name, at_s in self._seen_s.items() if now - at_s > LATELY_S]:
            del self._seen_s[name]
        if priority is Priority.PREMIUM:
            self._premium_s = now

    def _clock_of(self, flow: Flow) -> float:
        return self._batch_clock if flow[0] is Priority.BATCH else self.clock

    def _earn(self, flow: Flow, num_tokens: int) -> None:
        if flow[0] is not Priority.BATCH and any(one[0] is Priority.BATCH for one in self._open):
            self._credit.earn(flow[0], num_tokens)

    def _length(self, flow: Flow, num_tokens: int) -> float:
        """Return how far so many tokens move the next turn of a flow."""
        priority, tenant = flow
        other = {
            Priority.PREMIUM: Priority.INTERACTIVE, Priority.INTERACTIVE: Priority.PREMIUM,
        }.get(priority)  # fmt: skip
        uses_both = other is not None and (other, tenant) in self._open
        return num_tokens * (2 if uses_both else 1) / priority.weight

    def _share(self, priority: Priority, tenant: str, now: float) -> float:
        """Return the share of the limits that a request of this class and tenant may use now."""
        if priority is Priority.BATCH:
            share = BATCH_SHARE
        elif priority is Priority.PREMIUM or self._premium_s is None:
            share = 1.0
        else:
            share = BELOW_PREMIUM_SHARE if now - self._premium_s <= LATELY_S else 1.0
        return share * (OVER_SHARE if self._is_over(tenant, now) else 1.0)

    def check_integrity(self, holders: Counter[Flow]) -> None:
        """Raise AssertionError unless exactly these (class, tenant) counts are accepted."""
        assert self._open == holders, "turns were given to others than the requests here"
        assert set(self._tokens) == {tenant for _, tenant in holders}
        assert len(self._next) <= len(self._open) + MAX_IDLE_FLOWS

    def _is_over(self, tenant: str, now: float) -> bool:
        recent = {name for name, at_s in self._seen_s.items() if now - at_s <= LATELY_S}
        num_present = len(recent | self._tokens.keys())
        return self._tokens[tenant] * num_present > self._tokens.total()

    def _forget_idle(self) -> None:
        """Drop flows that make no difference any more; the clock of idle classes moves to the
        latest of their turns.
        """
        for is_batch in (False, True):
            if not any((flow[0] is Priority.BATCH) == is_batch for flow in self._open):
                for flow, turn in self._next.items():
                    if (flow[0] is Priority.BATCH) == is_batch:
                        self.on_served(turn)
        idle = [flow for flow in self._next if flow not in self._open]
        passed = [flow for flow in idle if self._next[flow] <= self._clock_of(flow)]
        for flow in passed or idle[: max(0, len(idle) - MAX_IDLE_FLOWS)]:
            del self._next[flow]


class WorkerQueues:
    """Keeps the prompts that wait to be computed at each worker, with their order. A new request
    does not have to wait for all of them.
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
        rate, at_s = self._rates.get(order[1], (0.0, now))
        rate = rate * math.exp((at_s - now) / RATE_WINDOW_S) + seconds / RATE_WINDOW_S
        self._rates[order[1]] = rate, now
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

    def overtaken(self, worker_id: str, order: Order) -> set[str]:
        """Return the requests in this worker's queue that a request of `order` overtakes."""
        queue = self._queues.get(worker_id, {})
        return {name for name, (other, _) in queue.items() if other > order}

    def slowdown(self, order: Order, num_workers: int, now: float) -> float:
        """Return the factor by which a wait becomes longer. Requests of higher classes that are
        still to arrive overtake it, at the rate at which they arrived lately, and at most by what
        their weights give them.
        """
        found = {level: known for level, known in self._rates.items() if level < order[1]}
        rate = sum(rate * math.exp((at_s - now) / RATE_WINDOW_S) for rate, at_s in found.values())
        weights = {priority.order: priority.weight for priority in Priority}
        higher = sum(weights[level] for level in found)
        most = higher / (higher + weights[order[1]])
        return 1 / (1 - min(rate / max(1, num_workers), most))

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError when a queued request is placed nowhere."""
        assert set(self._worker_of) <= placed, "an ended request stands in a queue"
        assert sum(len(queue) for queue in self._queues.values()) == len(self._worker_of)
