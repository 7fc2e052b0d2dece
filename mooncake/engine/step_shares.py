"""How much of a step each flow (a tenant in a class) gets when several have something to compute.
Pure. `Sharing` owns what was learned about steps, what flows owe, and how long ago they met.
Planning changes none of it: `Sharing.commit` counts a step that is submitted, `Sharing.observe` its
end.

A row of one flow waits for the whole step, so a flow with many rows slows down all others.
Therefore the step is at most `FACTOR` times as long as the smallest flow's own step would be, or as
long as if all flows had as little to compute as the smallest. The smallest flow gets all it wants.
The others share the rest of the time by the weights of their classes, and their streams take turns.
Each of these flows has a balance: it receives its share of each step, and pays for the time that it
is predicted to take and for its part of any delay. A flow that owes sits out. An unused balance
only covers later prediction errors; it makes no share larger. A chunk of a prompt may take more
than a share, up to twice as long as reading its context takes: chunks that fit a share would read a
long context for few tokens each. Batch never counts as the smallest, so no other class waits for
it. Nor do a tenant's interactive requests while it has a premium prompt: the tenant itself has said
which of its requests is urgent, and short steps would make the prompt wait for its other streams.

For `NUM_AFTER` steps after flows met, a flow that is alone has steps of at most `AFTERWARDS` times
the length of the smallest flow's own. So a flow that comes back does not wait for a long step.
After these steps, and where it was alone before, it is not limited. Where prompts want more than a
step's token budget, they share it by the same weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooncake.base import CostSample
from mooncake.base.request import Flow, Priority, fair_shares
from mooncake.engine.chunks import UNIT, largest_chunk
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.sequence import Sequence

FACTOR = 2.0
"""The predicted time of a step where flows meet, divided by that of a step with only what the
smallest flow wants. It bounds predictions of steps, not times of requests. These also wait for the
step that runs when they come, for prediction errors, and for work outside of steps. It was chosen
so that they took less than three times as long as alone, with k2-demo on two quiet cores.
"""
AFTERWARDS = 8.0
NUM_AFTER = 32
MOST_OWED = 32
"""A flow owes at most this many shares of a step, however much it had to take at once."""
MOST_LATE = 2
"""A flow pays at most this many shares because one step took longer than predicted."""
_LEARNED_TOGETHER = 16
"""This many steps are learned together, because a fit takes up to 0.4 ms."""
_LEAST_REST = 0.1
"""At least this part of a measured step counts for its prompts, whatever its rows are predicted to
take.
"""


class StepTimes:
    """Predicts how much time sequences add to a step. Rows of single tokens are learned apart from
    chunks of prompts, because on a CPU a row costs ten times as much as a token of a chunk.
    """

    def __init__(self) -> None:
        self._rows = StepCostModel()
        self._prompts = StepCostModel()
        self._knows_rows = self._has_learned = False
        self._unlearned: deque[tuple[CostSample, bool]] = deque(maxlen=4 * _LEARNED_TOGETHER)

    def calibrate(self, samples: Iterable[CostSample]) -> None:
        """Learn from steps that were timed before the first one."""
        samples = [sample for sample in samples if sample.seconds > 0]
        rows = [_as_rows(one) for one in samples if one.num_new_tokens == one.num_sequences]
        self._knows_rows, self._has_learned = bool(rows), bool(samples)
        self._rows = StepCostModel(rows)
        others = [one for one in samples if one.num_new_tokens > one.num_sequences]
        self._prompts = StepCostModel([self._without_rows(one) for one in others])

    def observe(self, sample: CostSample, *, has_prompts: bool) -> None:
        """Keep a measured step. It is learned when times are asked for."""
        if sample.seconds > 0 and sample.num_new_tokens > 0:
            self._unlearned.append((sample, has_prompts))

    def learn(self) -> None:
        """Learn from the kept steps as soon as there are enough for a fit."""
        if len(self._unlearned) < (_LEARNED_TOGETHER if self._has_learned else 1):
            return
        self._has_learned = True
        rows = [_as_rows(sample) for sample, has_prompts in self._unlearned if not has_prompts]
        self._rows.observe(rows)
        self._knows_rows |= bool(rows)
        self._prompts.observe(
            self._without_rows(sample) for sample, has_prompts in self._unlearned if has_prompts
        )
        self._unlearned.clear()

    @property
    def fixed_s(self) -> float:
        """The time of a step without its rows."""
        return (self._rows if self._knows_rows else self._prompts).coefficients[0]

    @property
    def fixed_with_prompts_s(self) -> float:
        """The time of a step with prompts, without its rows and chunks."""
        return max(self.fixed_s, self._prompts.coefficients[0])

    def rows_s(self, num_rows: int, num_context_tokens: int) -> float:
        """Return the time that rows of single tokens add. `num_context_tokens`: of all of them
        together.
        """
        if not self._knows_rows:
            return 0.0
        return self._rows.step_s(num_rows, num_context_tokens, num_rows) - self.fixed_s

    def chunk_s(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return the time that a chunk of one prompt adds."""
        whole_s = self._prompts.step_s(num_tokens, num_context_tokens, 1)
        return self.rows_s(1, 0) + whole_s - self._prompts.coefficients[0]

    def context_s(self, num_context_tokens: int) -> float:
        """Return what a chunk takes to read its context, however few tokens attend to it."""
        return self._prompts.coefficients[-1] * num_context_tokens

    def largest_chunk(self, most: int, least: int, num_context_tokens: int, left_s: float) -> int:
        """Return the largest chunk that adds no more than `left_s`, from `least` to `most`."""
        limit_s = left_s - self.rows_s(1, 0) + self._prompts.coefficients[0]
        return largest_chunk(self._prompts, most, min(least, most), num_context_tokens, limit_s)

    def _without_rows(self, sample: CostSample) -> CostSample:
        """Return a step as if it had only its chunks, without the row that each of them has."""
        num_chunks = sample.num_sequences - sample.num_streams
        num_rows = num_chunks + sample.num_stream_tokens
        rest_s = sample.seconds - self.rows_s(num_rows, sample.num_stream_context_tokens)
        return CostSample(
            num_new_tokens=sample.num_new_tokens - sample.num_stream_tokens,
            num_context_tokens=sample.num_context_tokens - sample.num_stream_context_tokens,
            num_sequences=num_chunks,
            seconds=max(rest_s, _LEAST_REST * sample.seconds),
        )


def _as_rows(sample: CostSample) -> CostSample:
    """Return a step of streams with each of their tokens as a row of its own."""
    sizes = sample.num_new_tokens, sample.num_context_tokens, sample.num_new_tokens
    return CostSample(*sizes, sample.seconds)


@dataclass(slots=True)
class Wants:
    """What one flow has to compute."""

    num_streams: int = 0
    num_context_tokens: int = 0
    """The context of its streams."""
    chunks_s: float = 0.0
    num_tokens: int = 0
    """The tokens of its prompts."""
    seconds: float = 0.0


@dataclass(slots=True)
class Left:
    """How much of a step a flow that gets less than it wants may still use."""

    share_s: float
    """Its share of the step, whatever it owes."""
    seconds: float
    """The seconds left. Negative when it owes more than its share, or had to take more."""
    kept_s: float
    """The part of `seconds` that its streams leave for its prompts."""
    num_tokens: int
    """How many more tokens its prompts may have."""
    is_short: bool
    """Whether it gets less time than it wants. If not, its prompts get fewer tokens than
    they want.
    """
    pays: bool
    """Whether it has a balance: it gets less time than it wants, beside others."""
    taken_s: float = 0.0
    """The time that its part of the step is predicted to take."""


class StepShare:
    """How much of a step the flows that get less than they want may still use."""

    def __init__(
        self, times: StepTimes, left: dict[Flow, Left], smallest_s: float, num_after: int
    ) -> None:
        """smallest_s: what the smallest flow wants, or wanted when flows last met. num_after: for
        how many further steps a flow that is alone stays limited; `NUM_AFTER` where flows meet.
        """
        self.left = left
        self.smallest_s = smallest_s
        self.num_after = num_after
        self._times = times
        self._limits = left
        self._others_s = 0.0
        """The predicted time of the flows that are not limited."""
        self._fixed_s = times.fixed_s
        self._begun: set[tuple[Flow, bool]] = set()
        """The flows whose first stream (False) or first prompt (True) is in the step."""
        self._taken: dict[int, tuple[float, int]] = {}
        """sequence_id -> the seconds and tokens of prompts that were counted for it."""

    def lift(self) -> None:
        """Remove all limits of this step, because nobody else has anything to compute. Flows that
        sit out may compute in it, and it does not count against them.
        """
        self._limits = {}

    def is_limited(self, flow: Flow) -> bool:
        """Return whether a flow gets less time than it wants."""
        left = self._limits.get(flow)
        return left is not None and left.is_short

    def most(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens of a sequence, at most `most`, fit what is left for its flow. The
        first stream of each flow always fits. So do `UNIT` tokens of its first prompt, and beside
        other flows as many as are worth reading its context, unless the flow still owes time of
        earlier steps.
        """
        left = self._limits.get(sequence.flow)
        if left is None:
            return most
        is_prompt = sequence.num_missing > 1
        is_first = (sequence.flow, is_prompt) not in self._begun
        if left.seconds + (left.taken_s if is_first else 0.0) < 0:
            return 0
        context = sequence.num_computed + sequence.num_in_flight
        if not is_prompt:
            fits = left.seconds - left.kept_s >= self._times.rows_s(1, context)
            return most if is_first or fits else 0
        most = min(most, sequence.num_unplanned, max(left.num_tokens, UNIT if is_first else 0))
        least = UNIT if is_first else 0
        limit_s = left.seconds
        if is_first and left.pays:  # a flow that is alone would not pay for a longer step
            limit_s = max(limit_s, self._worth_s(left, context))
        return self._times.largest_chunk(most, least, context, limit_s) if most else 0

    def _worth_s(self, left: Left, num_context_tokens: int) -> float:
        """Return how long a chunk takes that is worth reading its context: half of it is for its
        own tokens, but it is no longer than its flow can pay for with later steps.
        """
        context_s = self._times.context_s(num_context_tokens)
        return min(2 * context_s, MOST_OWED * left.share_s)

    def late_s(self, seconds: float) -> dict[Flow, float]:
        """Return each limited flow's part of the step's delay over its prediction, in proportion to
        the time that the flow was predicted to take. Negative when the step was faster.
        """
        taken = {flow: left.taken_s for flow, left in self._limits.items() if left.taken_s > 0}
        added_s = self._others_s + sum(taken.values())
        has_prompts = any(is_prompt for _, is_prompt in self._begun)
        fixed_s = self._times.fixed_with_prompts_s if has_prompts else self._fixed_s
        late_s = seconds - fixed_s - added_s
        return {flow: late_s * taken_s / added_s for flow, taken_s in taken.items()}

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """Count `num_tokens` tokens of a sequence, which the step computes."""
        context = sequence.num_computed + sequence.num_in_flight
        is_prompt = sequence.num_missing > 1
        self._begun.add((sequence.flow, is_prompt))
        if is_prompt:
            taken_s, taken_tokens = self._times.chunk_s(num_tokens, context), num_tokens
        else:
            taken_s, taken_tokens = self._times.rows_s(1, context), 0
        left = self._limits.get(sequence.flow)
        if left is not None and is_prompt and num_tokens < sequence.num_unplanned:
            taken_tokens = left.num_tokens  # those behind it wait: not shorter by right
        self._taken[sequence.sequence_id] = taken_s, taken_tokens
        self._count(left, taken_s, taken_tokens)

    def take_back(self, sequence: Sequence) -> None:
        """Undo the count of a sequence, if the step had any of it."""
        taken_s, taken_tokens = self._taken.pop(sequence.sequence_id, (0.0, 0))
        self._count(self._limits.get(sequence.flow), -taken_s, -taken_tokens)

    def take_drafts(self, num_drafts: int) -> None:
        """Count drafts. Only flows that are not limited have any."""
        self._others_s += self._times.rows_s(num_drafts, 0)

    def _count(self, left: Left | None, taken_s: float, taken_tokens: int) -> None:
        if left is None:
            self._others_s += taken_s
            return
        left.seconds -= taken_s
        left.taken_s += taken_s
        left.num_tokens -= taken_tokens


class Sharing:
    """Makes the shares of steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.times = StepTimes()
        self._config = config
        self._smallest_s = 0.0
        self._balances: dict[Flow, float] = {}
        """How many shares of earlier steps each flow has not used; a negative number is owed. A
        debt stays while the flow is away, or while it is alone and limited.
        """
        self._late: dict[Flow, float] = {}
        """Flow with a balance -> the number of shares that its last step was late."""
        self._num_after = 0
        """The number of steps for which a flow that is alone is still limited."""

    @property
    def recent(self) -> bool:
        """Whether flows met not long ago."""
        return self._num_after > 0

    def of_step(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> StepShare | None:
        """Return what flows get of the next step, or None for all that they want.

        waiting: the sequences that can be admitted to it.
        """
        self.times.learn()
        wants = self._wants(running, waiting)
        guarded = [want.seconds for flow, want in wants.items() if _is_guarded(flow, wants)]
        fixed_s, smallest_s, num_after = self.times.fixed_s, self._smallest_s, self._num_after
        is_alone = len(wants) <= 1
        if is_alone and num_after:
            whole_s = AFTERWARDS * (fixed_s + smallest_s) - fixed_s
            num_after -= 1
        elif guarded and not is_alone:
            smallest_s, num_after = min(guarded), NUM_AFTER
            whole_s = max(FACTOR * (fixed_s + smallest_s) - fixed_s, len(wants) * smallest_s)
        else:
            return None
        room = self._config.max_batched_tokens - sum(one.num_streams for one in wants.values())
        seconds = shared_out(
            {flow: one.seconds for flow, one in wants.items()}, whole_s, smallest_s
        )
        tokens = shared_out({flow: one.num_tokens for flow, one in wants.items()}, max(0, room))
        left: dict[Flow, Left] = {}
        for flow, want in wants.items():
            share_s, num_tokens = seconds[flow], int(tokens[flow])
            is_short = share_s < want.seconds
            pays = is_short and not is_alone
            if is_short or num_tokens < want.num_tokens:
                owed_s = share_s * max(0.0, -self._balances.get(flow, 0.0)) if pays else 0.0
                has_both = want.num_tokens and want.num_streams
                kept_s = share_s / 2 if is_short and has_both else 0.0
                left[flow] = Left(share_s, share_s - owed_s, kept_s, num_tokens, is_short, pays)
        return StepShare(self.times, left, smallest_s, num_after)

    def commit(self, share: StepShare | None) -> None:
        """Count a step that is submitted and was planned with this share."""
        if share is None:
            self._num_after = max(0, self._num_after - 1)
        else:
            self._smallest_s, self._num_after = share.smallest_s, share.num_after
        if share is None or self._num_after < NUM_AFTER:
            if not self._num_after:
                self._balances, self._late = {}, {}
            return
        paying = {flow: left for flow, left in share.left.items() if left.pays}
        balances = dict.fromkeys(paying, 0.0) | self._balances
        for flow in balances:
            taken = paying[flow].taken_s / paying[flow].share_s if flow in paying else 0.0
            balances[flow] = min(max(balances[flow] + 1 - taken, -MOST_OWED), 1.0)
        self._balances = {flow: one for flow, one in balances.items() if flow in paying or one < 0}
        self._late = {flow: one for flow, one in self._late.items() if flow in self._balances}

    def observe(self, sample: CostSample, share: StepShare | None, *, has_prompts: bool) -> None:
        """Learn from a measured step and the share with which it was planned."""
        self.times.observe(sample, has_prompts=has_prompts)
        if share is not None and not self._config.in_lockstep:
            self.count_late(sample.seconds, share)

    def count_late(self, seconds: float, share: StepShare) -> None:
        """Charge each flow for its part of a step's delay, or credit it when the step was faster. A
        wrong prediction is wrong again, but what holds up a step only once is seldom the flow's
        fault. So the smaller of this delay and that of the flow's last step counts, at most
        `MOST_LATE` shares.
        """
        for flow, late_s in share.late_s(seconds).items():
            if share.left[flow].pays and flow in self._balances:
                late, last = late_s / share.left[flow].share_s, self._late.get(flow, 0.0)
                self._late[flow] = late
                both = min(late, last) if late > 0 else max(late, last)
                if late * last > 0:
                    self._balances[flow] -= min(max(both, -MOST_LATE), MOST_LATE)

    def _wants(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> dict[Flow, Wants]:
        wants: dict[Flow, Wants] = {}
        for sequence in (*running, *waiting):
            if not sequence.aborted and sequence.failure is None:
                self._want(wants.setdefault(sequence.flow, Wants()), sequence)
        for want in wants.values():
            want.seconds = want.chunks_s
            if want.num_streams:
                want.seconds += self.times.rows_s(want.num_streams, want.num_context_tokens)
        return wants

    def _want(self, want: Wants, sequence: Sequence) -> None:
        if sequence.num_missing == 1:
            want.num_streams += 1
            want.num_context_tokens += sequence.num_computed
            return
        config = self._config
        most = min(config.max_chunk_tokens, config.max_batched_tokens - want.num_tokens)
        if num_tokens := min(sequence.num_missing, most):
            want.chunks_s += self.times.chunk_s(num_tokens, sequence.num_computed)
            want.num_tokens += num_tokens


def _is_guarded(flow: Flow, wants: Mapping[Flow, Wants]) -> bool:
    """Return whether steps are kept short for a flow: not for batch, nor for a tenant's interactive
    requests while a premium prompt of the same tenant is computed.
    """
    kind, tenant = flow
    if kind is Priority.INTERACTIVE:
        premium = wants.get((Priority.PREMIUM, tenant))
        return premium is None or not premium.num_tokens
    return kind is Priority.PREMIUM


def shared_out(
    wanted: Mapping[Flow, float], whole: float, at_least: float = 0.0
) -> dict[Flow, float]:
    """Return each flow's part of `whole`. A flow gets `at_least` that much but never more than it
    wants. The flows that want more share the rest by the weights of their classes.
    """
    given = {flow: min(want, at_least) for flow, want in wanted.items()}
    left = whole - sum(given.values())
    hungry = [flow for flow, want in wanted.items() if want > given[flow]]
    while hungry and left > 0:
        shares = fair_shares(hungry)
        filled = [flow for flow in hungry if wanted[flow] - given[flow] <= left * shares[flow]]
        for flow in filled or hungry:
            given[flow] = wanted[flow] if filled else given[flow] + left * shares[flow]
        if not filled:
            break
        left = whole - sum(given.values())
        hungry = [flow for flow in hungry if flow not in filled]
    return given


def turn_of(sequence: Sequence, share: StepShare | None) -> tuple[bool, bool, int]:
    """Return the sort key of running sequences in a step, which goes before their rank: streams
    first. Streams of a limited flow go in order of their last step, the oldest first.
    """
    is_prompt = sequence.num_missing > 1
    if share is None or is_prompt or not share.is_limited(sequence.flow):
        return is_prompt, False, 0
    return is_prompt, True, sequence.last_turn
