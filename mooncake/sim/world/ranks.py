"""An instance of several ranks: the shipped lead and logs over simulated links and processes.

A rank's process may die, stand still, be slow, or miss a word of its lead. The ranks compute a step
in parts and wait for each other after each, as real ones do after each layer; one that waits for
too long fails. The lead's own process is the worker's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from mooncake.base import InternalError
from mooncake.engine.plan import LayerDone, StepPlan
from mooncake.engine.ranks import LeadRanks
from mooncake.engine.step_log import (
    Held,
    RankMessage,
    RankStep,
    StepReader,
    UsePages,
    decode,
    encode,
)
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.runner import SimRunner, StepCost

LINK_S = 1e-4
"""From a lead to a follower."""
LEAD = 0


class RanksLost(msgspec.Struct, frozen=True):
    """A runner's last event: its instance cannot go on, and its process ends."""

    why: str


class _Rank:
    """The process of one rank; the lead's hears nothing."""

    def __init__(self) -> None:
        self.alive = True
        self.hung_until_s = 0.0
        self.slowdown = 1.0
        self.misses_next = False
        """Its link loses the next word."""
        self.reader = StepReader()
        self.inbox: deque[RankMessage] = deque()
        self.computes = False


class RankedRunner(SimRunner):
    """A runner whose steps all ranks of its instance compute together."""

    def __init__(
        self,
        heap: EventHeap,
        cost: StepCost,
        deliver: Callable[[msgspec.Struct], None],
        *,
        num_ranks: int,
        pages: UsePages,
        exchange_s: float,
        **settings: Any,
    ) -> None:
        """Start `num_ranks` ranks over `pages`. An exchange fails after `exchange_s`. `settings`
        are those of `SimRunner`.
        """
        super().__init__(heap, cost, deliver, **settings)
        self._exchange_s = exchange_s
        self._ranks = [_Rank() for _ in range(num_ranks)]
        self._queue: deque[tuple[StepPlan, float]] = deque()
        self._part = 0
        self._begun_s = 0.0
        self._here: set[int] = set()
        """Ranks that wait for the others in the present exchange."""
        self._num_exchanges = 0
        self._lead = LeadRanks(self)
        self._lead.use_pages(pages)

    # ------------------------------------------------------------ faults

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def num_living(self) -> int:
        """How many processes of its ranks there are."""
        return sum(rank.alive for rank in self._ranks)

    def kill_rank(self, number: int) -> None:
        """kill -9 of a follower; the lead sees it a moment later."""
        rank = self._ranks[number]
        if rank.alive:
            rank.alive = False
            self._heap.after(LINK_S, partial(self._notice, number))

    def hang_rank(self, number: int, seconds: float) -> None:
        """Stop a rank's process for a while, as SIGSTOP does."""
        rank = self._ranks[number]
        if rank.hung_until_s <= self._heap.now():
            rank.hung_until_s = self._heap.now() + seconds

    def slow_rank(self, number: int, slowdown: float, seconds: float) -> None:
        """Have a rank take `slowdown` times as long for a while."""
        rank = self._ranks[number]
        rank.slowdown = slowdown
        self._heap.after(seconds, partial(setattr, rank, "slowdown", 1.0))

    def lose_step(self, number: int) -> None:
        """Have the lead's next word to a follower not arrive."""
        self._ranks[number].misses_next = True

    # ------------------------------------------------------------ the lead

    def _start(self, plan: StepPlan, seconds: float) -> None:
        self._queue.append((plan, seconds))
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        if self._later(LEAD, self._begin):
            return
        plan, seconds = self._queue[0]
        self._begun_s = self._heap.now()
        self._lead.forget([*plan.ended, *(start.sequence_id for start in plan.starts)])
        if not plan.slots:
            self._heap.after(seconds, self._end_step)
            return
        self._part = 0
        self._lead.step(plan.slots, {})
        ending = {sequence_id for each, _ in self._queue for sequence_id in each.ended}
        self._lead.check_integrity(self._known.keys() | ending)
        self._compute(LEAD)

    def _end_step(self) -> None:
        if self.hung or not self._ranks[LEAD].alive:
            return
        plan, _ = self._queue.popleft()
        seconds = self._heap.now() - self._begun_s
        self.busy_s += seconds
        if self._queue:
            self._begin()
        self._finish(plan, seconds)

    def tell(self, message: RankMessage) -> None:
        """Send to all followers (`engine.ranks.Followers`)."""
        data = encode(message)
        for number, rank in enumerate(self._ranks[1:], 1):
            if rank.misses_next:
                rank.misses_next = False
            else:
                self._heap.after(LINK_S, partial(self._hear, number, data))

    def end(self) -> None:
        """Kill all followers (`engine.ranks.Followers`) and end the worker's process."""
        assert self._lead.lost is not None
        self.close()
        self._deliver(RanksLost(self._lead.lost))

    def close(self) -> None:
        """The worker's process has ended, and all followers with it."""
        for rank in self._ranks:
            rank.alive = False

    def _notice(self, number: int) -> None:
        if not self._later(LEAD, partial(self._notice, number)):
            self._lead.gone(number)

    # ------------------------------------------------------------ followers

    def _hear(self, number: int, data: bytes) -> None:
        rank = self._ranks[number]
        if not rank.alive:
            return
        rank.inbox.append(decode(data))
        if not rank.computes:
            self._follow(number)

    def _follow(self, number: int) -> None:
        """Obey the next word of the lead."""
        rank = self._ranks[number]
        if self._later(number, partial(self._follow, number)) or rank.computes or not rank.inbox:
            return
        message = rank.inbox.popleft()
        if isinstance(message, UsePages):
            rank.reader = StepReader()
            self._follow(number)
            return
        try:
            if isinstance(message, Held):
                rank.reader.check(message)
                self._follow(number)
                return
            assert isinstance(message, RankStep), "simulated ranks share a memory and a pace"
            slots = rank.reader.slots(message)
        except InternalError:
            self.kill_rank(number)
            return
        assert slots == self._queue[0][0].slots, f"rank {number} computes another step"
        rank.computes = True
        self._compute(number)

    # ------------------------------------------------------------ what all ranks do

    def _later(self, number: int, call: Callable[[], None]) -> bool:
        """Whether a rank does nothing now: it is dead, or stands still and `call` comes again."""
        rank = self._ranks[number]
        stands_still = rank.hung_until_s > self._heap.now()
        if rank.alive and stands_still:
            self._heap.at(rank.hung_until_s, call)
        return stands_still or not rank.alive

    def _compute(self, number: int) -> None:
        """Compute a rank's share of a part of the step, then go to the exchange."""
        seconds = self._queue[0][1] / self._num_layer_reports
        seconds *= self._ranks[number].slowdown
        self._heap.after(seconds, partial(self._come, number))

    def _come(self, number: int) -> None:
        if self._later(number, partial(self._come, number)):
            return
        self._here.add(number)
        if len(self._here) == self.num_ranks:
            self._go_on()
            return
        wait = partial(self._give_up, number, self._num_exchanges)
        self._heap.after(self._exchange_s, wait)

    def _give_up(self, number: int, exchange: int) -> None:
        """Have a rank that waited for so long fail, unless the others came meanwhile."""
        if exchange != self._num_exchanges:
            return
        if self._later(number, partial(self._give_up, number, exchange)):
            return
        if number != LEAD:
            self.kill_rank(number)
            return
        missing = min(set(range(self.num_ranks)) - self._here)
        waited = f"did not answer for {self._exchange_s:g} s"
        self._lead.fail(f"rank {missing} of this model {waited}")

    def _go_on(self) -> None:
        """All ranks have met: begin the next part, or end the step."""
        self._here.clear()
        self._num_exchanges += 1
        self._part += 1
        plan, _ = self._queue[0]
        if self._part < self._num_layer_reports:
            if plan.report_layers:
                layer = self._part * self._num_layers // self._num_layer_reports - 1
                self._deliver(LayerDone(step_id=plan.step_id, layer=layer))
            for number in range(self.num_ranks):
                self._compute(number)
            return
        for number, rank in enumerate(self._ranks[1:], 1):
            rank.computes = False
            self._follow(number)
        self._end_step()
