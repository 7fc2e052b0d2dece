"""An instance of several ranks: the shipped lead and logs over simulated links and processes.

A rank's process may die, stand still, be slow, or miss a message of its lead. The ranks of a stage
compute a step in parts and wait for each other after each part, as real ranks do after each layer.
A rank that waits for too long fails. A stage begins a step when the stage before has passed it on.
The lead's own process is the worker's. It is in the last stage, and hears of every step at once.
Instances that share experts also wait for each other's ranks (`expert_group`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from mooncake.base import InternalError, Shape
from mooncake.engine.plan import LayerDone, StepPlan, StepSlot
from mooncake.engine.ranks.rank_group import LeadRanks
from mooncake.engine.ranks.step_log import (
    Held,
    RankMessage,
    RankStep,
    StepReader,
    UsePages,
    decode,
    encode,
)
from mooncake.sim.world.clock import EventHeap
from mooncake.sim.world.expert_group import LINK_S, ExpertGroup
from mooncake.sim.world.runner import SimRunner, StepCost

LEAD = 0
NO_ROWS = StepPlan(step_id=-1, starts=[], slots=[], ended=[])
"""What an instance computes in a step of other instances that share its experts."""
AGREEMENT = -1
"""The part before a step's first part, in which instances say how many rows each has."""

TogetherCost = Callable[[StepPlan, Sequence[int]], float]
"""(step, tokens of each other instance in it) -> its seconds."""


class RanksLost(msgspec.Struct, frozen=True):
    """A runner's last event: its instance cannot go on, and its process ends."""

    why: str


@dataclass(eq=False)
class _Step:
    """A step on its way through the stages."""

    plan: StepPlan
    seconds: float
    """The time of the step in each stage."""


class _Rank:
    """The process of one rank. The lead's process receives no messages."""

    def __init__(self) -> None:
        self.alive = True
        self.hung_until_s = 0.0
        self.slowdown = 1.0
        self.misses_next = False
        """Whether its link loses the next message."""
        self.reader = StepReader()
        self.inbox: deque[RankMessage] = deque()
        self.slots: list[StepSlot] | None = None
        """The step that it heard of and has not ended. It computes the step once its stage can."""
        self.computes = False


class _Stage:
    """Ranks that compute the same layers, one step at a time."""

    def __init__(self, number: int, ranks: range) -> None:
        self.number = number
        """The number of the stage; the one with the first layers is 0."""
        self.ranks = ranks
        self.waiting: deque[_Step] = deque()
        """The steps whose activations have arrived."""
        self.step: _Step | None = None
        self.part = 0
        self.begun_s = 0.0
        self.here: set[int] = set()
        """The ranks that wait for the others in the present exchange."""
        self.num_exchanges = 0


class RankedRunner(SimRunner):
    """A runner in which all ranks of its instance compute each step together."""

    def __init__(
        self,
        heap: EventHeap,
        cost: StepCost,
        deliver: Callable[[msgspec.Struct], None],
        *,
        num_ranks: int,
        pages: UsePages,
        exchange_s: float,
        together_s: TogetherCost | None = None,
        **settings: Any,
    ) -> None:
        """Start `num_ranks` ranks over `pages`.

        exchange_s: an exchange fails after this time. together_s: makes a step's seconds depend on
        the rows of the instances that share its experts. settings: the settings of `SimRunner`.
        """
        super().__init__(heap, cost, deliver, **settings)
        self._exchange_s = exchange_s
        self._together_s = together_s
        self._ranks = [_Rank() for _ in range(num_ranks)]
        shape = Shape(tp=num_ranks // len(self._stages), pp=len(self._stages))
        self._groups = [_Stage(stage, shape.ranks_of(stage)) for stage in range(shape.pp)]
        self._group_of = [self._groups[shape.stage_of(rank)] for rank in range(num_ranks)]
        self._experts: ExpertGroup | None = None
        """The instances that it shares its experts with."""
        self._instance = 0
        """The number of this instance among them."""
        self._untold: deque[_Step] = deque()
        self._num_told = 0
        """How many steps its ranks have heard of."""
        self._num_flying = 0
        self._lead = LeadRanks(self)
        self._lead.use_pages(pages)

    # ------------------------------------------------------------ shared experts

    def share_experts(self, group: ExpertGroup) -> None:
        """Compute each step together with the other instances of `group`, from the first
        step on.
        """
        assert len(self._groups) == 1, "instances of several stages share no experts"
        self._experts, self._instance = group, group.join(self)

    @property
    def num_rows(self) -> int:
        """The number of tokens of the present step."""
        step = self._groups[0].step
        assert step is not None, "a step that all have begun"
        return step.plan.num_tokens

    def serve(self, step: int) -> None:
        """Take part in a step that another instance begins, without rows when no own step is in
        line.
        """
        if self._later(LEAD, partial(self.serve, step)) or self.hung:
            return
        if self._num_told + len(self._untold) < step:
            self._queue(_Step(NO_ROWS, self._cost.seconds(NO_ROWS)))

    def go_on(self) -> None:
        """Go on: all ranks of all instances have met."""
        self._go_on(self._groups[0])

    def lose_instance(self, number: int) -> None:
        """Fail, because the link to another instance has closed."""
        if not self._later(LEAD, partial(self.lose_instance, number)):
            self._lead.fail(f"instance {number} of this expert group has ended")

    # ------------------------------------------------------------ faults

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    @property
    def num_living(self) -> int:
        """How many of the instance's ranks have a process that lives."""
        return sum(rank.alive for rank in self._ranks)

    def kill_rank(self, number: int) -> None:
        """Kill a follower, as kill -9 does. The lead sees it a moment later."""
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
        """Make a rank take `slowdown` times as long for a while."""
        rank = self._ranks[number]
        rank.slowdown = slowdown
        self._heap.after(seconds, partial(setattr, rank, "slowdown", 1.0))

    def lose_step(self, number: int) -> None:
        """Lose the lead's next message to a follower."""
        self._ranks[number].misses_next = True

    # ------------------------------------------------------------ the lead

    def _start(self, plan: StepPlan, seconds: float) -> None:
        assert plan.slots, "an engine plans no step without slots"
        self._queue(_Step(plan, seconds))

    def _queue(self, step: _Step) -> None:
        self._untold.append(step)
        self._tell_next(frozenset(self._known))  # as of this step: the log is checked against it

    def _tell_next(self, known: frozenset[int]) -> None:
        """Tell the followers of a step. The first stage begins it when it can."""
        if self._later(LEAD, partial(self._tell_next, known)) or not self._untold:
            return
        step = self._untold.popleft()
        plan = step.plan
        self._lead.forget([*plan.ended, *(start.sequence_id for start in plan.starts)])
        self._lead.step(plan.slots, {})
        self._lead.check_integrity(known)
        self._num_told += 1
        if self._experts is not None:
            self._experts.wake(self._instance, self._num_told)
        self._num_flying += 1
        if self._num_flying == 1 and len(self._groups) > 1:
            self._look_after(self._signs)
        if len(self._groups) == 1:
            self._arrive(self._groups[0], step)
        else:
            self._heap.after(self._tell_s, partial(self._arrive, self._groups[0], step))

    def _end_step(self, stage: _Stage, step: _Step) -> None:
        if self.hung or not self._ranks[LEAD].alive:
            return
        self._num_flying -= 1
        if step.plan is NO_ROWS:
            return
        seconds = self._heap.now() - stage.begun_s
        self.busy_s += seconds
        self._finish(step.plan, seconds)

    @property
    def _signs(self) -> tuple[int, ...]:
        """Counts that grow as long as stages with something to compute go on."""
        return tuple(stage.num_exchanges for stage in self._groups)

    def _look_after(self, seen: tuple[int, ...]) -> None:
        """Let the lead check, after a while, whether the stages that it waits for have gone on."""
        self._heap.after(self._exchange_s, partial(self._look, seen))

    def _look(self, seen: tuple[int, ...]) -> None:
        if self._later(LEAD, partial(self._look, seen)) or not self._num_flying or self.hung:
            return
        stuck = [stage for stage in self._groups[:-1] if stage.step is not None]
        if self._signs == seen and stuck:
            self._say_silent(stuck[0])
        else:
            self._look_after(self._signs)

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
        """End all followers, because the worker's process has ended."""
        for rank in self._ranks:
            rank.alive = False
        if self._experts is not None:
            self._experts.leave(self._instance)

    def _notice(self, number: int) -> None:
        if not self._later(LEAD, partial(self._notice, number)):
            self._lead.gone(number)

    # ------------------------------------------------------------ followers

    def _hear(self, number: int, data: bytes) -> None:
        rank = self._ranks[number]
        if not rank.alive:
            return
        rank.inbox.append(decode(data))
        self._follow(number)

    def _follow(self, number: int) -> None:
        """Carry out the lead's next message."""
        rank = self._ranks[number]
        busy = rank.slots is not None or not rank.inbox
        if self._later(number, partial(self._follow, number)) or busy:
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
        rank.slots = slots
        self._compute(number)

    # ------------------------------------------------------------ what all ranks do

    def _later(self, number: int, call: Callable[[], None]) -> bool:
        """Whether a rank can do nothing now: it is dead, or it stands still and `call` is repeated
        later.
        """
        rank = self._ranks[number]
        stands_still = rank.hung_until_s > self._heap.now()
        if rank.alive and stands_still:
            self._heap.at(rank.hung_until_s, call)
        return stands_still or not rank.alive

    def _arrive(self, stage: _Stage, step: _Step) -> None:
        """Record that the activations of a step have come to a stage."""
        stage.waiting.append(step)
        if stage.step is None:
            self._begin(stage)

    def _begin(self, stage: _Stage) -> None:
        """Let a stage compute the step that waits there, if any."""
        if not stage.waiting:
            return
        step = stage.step = stage.waiting.popleft()
        stage.part = AGREEMENT if self._experts is not None else 0
        stage.begun_s = self._heap.now()
        if stage.number and stage is self._groups[-1]:
            self._report(step, self._stages[stage.number][0] - 1)
        for number in stage.ranks:
            self._compute(number)

    def _report(self, step: _Step, layer: int) -> None:
        """Tell the lead that the layers up to this one are written."""
        if self._later(LEAD, partial(self._report, step, layer)):
            return
        if step.plan.report_layers:
            self._deliver(LayerDone(step_id=step.plan.step_id, layer=layer))

    def _compute(self, number: int) -> None:
        """Let a rank that knows its step compute it, once its stage has the activations."""
        rank, step = self._ranks[number], self._group_of[number].step
        if self._later(number, partial(self._compute, number)) or rank.computes or step is None:
            return
        if number != LEAD:
            if rank.slots is None:
                return
            assert rank.slots == step.plan.slots, f"rank {number} computes another step"
        rank.computes = True
        self._compute_part(number, step)

    def _compute_part(self, number: int, step: _Step) -> None:
        """Compute a rank's share of a part of the step, then go to the exchange."""
        whole_s = 0.0 if self._group_of[number].part == AGREEMENT else step.seconds
        seconds = whole_s / self._num_parts * self._ranks[number].slowdown
        self._heap.after(seconds, partial(self._come, number))

    @property
    def _num_parts(self) -> int:
        """The number of parts of a step in each stage."""
        return max(1, self._num_layer_reports // len(self._groups))

    def _come(self, number: int) -> None:
        if self._later(number, partial(self._come, number)):
            return
        stage = self._group_of[number]
        stage.here.add(number)
        exchange = stage.num_exchanges
        if len(stage.here) == len(stage.ranks):
            if self._experts is None:
                self._go_on(stage)
            else:
                self._experts.meet(self._instance)
        if stage.num_exchanges == exchange:
            self._heap.after(self._exchange_s, partial(self._give_up, number, exchange))

    def _give_up(self, number: int, exchange: int) -> None:
        """Make a rank fail that has waited too long, unless the others have come meanwhile."""
        stage = self._group_of[number]
        if exchange != stage.num_exchanges:
            return
        if self._later(number, partial(self._give_up, number, exchange)):
            return
        if number != LEAD:
            self.kill_rank(number)
            return
        self._say_silent(stage)

    def _say_silent(self, stage: _Stage) -> None:
        """Make the lead fail, because a rank of this stage, or another instance, does not come."""
        waited = f"did not answer for {self._exchange_s:g} s"
        if missing := set(stage.ranks) - stage.here:
            self._lead.fail(f"rank {min(missing)} of this model {waited}")
        else:
            assert self._experts is not None, "all ranks of a stage have come"
            self._lead.fail(f"instance {self._experts.missing} of this expert group {waited}")

    def _go_on(self, stage: _Stage) -> None:
        """Begin the next part, or pass the step on, because all ranks of a stage have met."""
        step = stage.step
        assert step is not None
        stage.here.clear()
        stage.num_exchanges += 1
        if self._experts is not None and stage.part == AGREEMENT and self._together_s is not None:
            others = self._experts.rows_of_others(self._instance)
            step.seconds = self._together_s(step.plan, others)
        stage.part += 1
        layers = self._stages[stage.number]
        if stage.part < self._num_parts:
            if stage.part:
                done = stage.part * len(layers) // self._num_parts
                self._report(step, layers[0] + done - 1)
            for number in stage.ranks:
                self._compute_part(number, step)
            return
        stage.step = None
        for number in stage.ranks:
            rank = self._ranks[number]
            rank.computes, rank.slots = False, None
        if stage is self._groups[-1]:
            self._end_step(stage, step)
        else:
            self._report(step, layers[-1])
            following = self._groups[stage.number + 1]
            send_s = self._send_s(step.plan.num_tokens)
            self._heap.after(send_s, partial(self._arrive, following, step))
        if stage.step is None:
            self._begin(stage)
        for number in stage.ranks:
            if number != LEAD:
                self._follow(number)
