"""The engine of one instance: sequences in, steps to the runner, tokens out.

The engine owns its sequences, its pages and the steps in flight. The roles own everything that
moves KV between workers. The engine acts only when it is called, and holds no clock.

Ownership of pages: `add` takes over the references that a sequence comes with. While a sequence
lives, its pages are the engine's. When it ends by an output (`finish` is set), its pages stay held
and unchanged until the role calls `release(sequence)`, at once or after it has moved the KV away.
`abort` needs no `release`: the engine releases the pages as soon as no step in flight uses them. A
live sequence may also be preempted, which releases its pages. So a role whose own transfers use
pages of a live sequence takes its own references (`pool.hold`) and gives them back
(`pool.release`). `check_integrity` compares all references.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mooncake.base.blocks import BlockKey
from mooncake.base.errors import InternalError
from mooncake.base.messages import CostSample, WorkerLoad
from mooncake.base.request import (
    Failure,
    FinishInfo,
    FinishReason,
    Flow,
    GenerateRequest,
    RequestOutput,
    TokenLogprobs,
    packed_logprobs,
    request_finish,
)
from mooncake.engine.audit import check_holds, check_pages, check_queues, check_steps
from mooncake.engine.batcher import Batch, Batcher
from mooncake.engine.block_pool import BlockPool
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.engine.plan import (
    Counted,
    Runner,
    StepPlan,
    StepResult,
    StepSlot,
)
from mooncake.engine.sequence import Made, Sequence, SequenceState, Standing
from mooncake.engine.speculation import Drafter, Speculation, drafter_of
from mooncake.engine.step_shares import StepShare

_MAX_TICK_S = 1.0
"""The time between two ticks counts as at most this many seconds, so that a process that was
stopped is not taken for hung.
"""
_LONG_STEP_TOKENS = 256
"""Steps with at least this many prompt tokens report each layer as progress, because a slow CPU may
need longer than `step_timeout_s` for all layers.
"""
_FIRST_STEPS = 8
"""These have `first_step_timeout_s`."""
_STREAM_COSTS = 16
"""The costs of this many steps with streams alone are learned together, because a fit takes up to
0.4 ms.
"""


class EngineHung(InternalError):
    """The runner has made no progress for too long; this engine cannot go on."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was submitted to the runner and has not ended."""

    plan: StepPlan
    sequences: list[Sequence]
    """The sequences of the step, in the order of `plan.slots`."""
    submitted_s: float
    share: StepShare | None
    """The share with which the step was planned."""


class Engine:
    """Sequences, pages and steps of one model replica. The module's docstring says who owns pages.

    With `max_steps_in_flight > 1`, further steps are planned from what no step in flight computes:
    other sequences, and the next chunks of a prompt. Steps end in the order in which they began.
    """

    def __init__(
        self,
        config: EngineConfig,
        layout_fingerprint: str,
        runner: Runner,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter` proposes tokens where `config.speculation` is set; None: the drafter that it
        names.
        """
        self.config = config
        caches = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks, config.num_homes, caches=caches)
        self.counters: dict[str, float] = dict.fromkeys(_COUNTERS, 0.0)
        """Counts since start, for `WorkerLoad.counters`."""
        self._expert_rows: list[int] = []
        self._fingerprint = layout_fingerprint
        self._runner = runner
        self._speculation = None
        if config.speculation is not None:
            drafter = drafter or drafter_of(config.speculation)
            self._speculation = Speculation(drafter, config.speculation.num_speculative_tokens)
            self.counters |= self._speculation.counters
        self._step_cost = StepCostModel(num_stages=config.num_stages)
        self._batcher = Batcher(config, self.pool, self._speculation, self._step_cost)
        self._sequences: dict[int, Sequence] = {}
        self._unreleased: dict[int, Sequence] = {}
        self._in_flight: dict[int, InFlight] = {}
        self._ended: dict[int, None] = {}  # an ordered set: the runner may forget them
        self._next_step_id = 0
        self._next_arrival = 0
        self._cost: CostSample | None = None
        self._unlearned: list[CostSample] = []
        self._ticked_s = 0.0
        self._num_steps_ended = 0
        self.stalled_s = 0.0
        """How long steps have been in flight without progress."""

    # ------------------------------------------------------------ sequences in and out

    def add(self, sequence: Sequence, now: float) -> bool:
        """Take over `sequence` and its pages. Returns False, with nothing changed, when the queue
        is full.

        The KV that comes with it becomes part of the prefix cache.

        Raises:
            ValueError: its id is in use, or its fields contradict each other.
        """
        self._check_new(sequence)
        if len(self._batcher.waiting) >= self.config.max_waiting:
            return False
        sequence.arrival = self._next_arrival
        self._next_arrival += 1
        sequence.added_s = sequence.waits_since_s = now
        self._sequences[sequence.sequence_id] = sequence
        self.extend_keys(sequence)
        self._publish(sequence)
        if sequence.prompt_logprobs is not None and sequence.num_computed:
            self.pool.release(sequence.drop_kv())  # log-probabilities need every token computed
            sequence.num_cached_tokens = 0
        self._batcher.enqueue(sequence)
        return True

    def prepare(self, request: GenerateRequest) -> None:
        """Start compiling the grammar of a request whose sequence will be added soon."""
        if request.sampling.grammar is not None:
            self._runner.prepare(request.sampling.grammar)

    def extend_keys(self, sequence: Sequence) -> list[BlockKey]:
        """Extend the block keys of a sequence (added or not) to all known tokens."""
        return sequence.extend_keys(self._fingerprint, self.config.block_tokens)

    def get(self, sequence_id: int) -> Sequence | None:
        """Return a sequence that was added and has not ended, or None."""
        return self._sequences.get(sequence_id)

    def abort(self, sequence_id: int) -> bool:
        """End a sequence without any output. Returns False when no such sequence is here.

        The engine releases its pages once no step in flight uses them.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None or sequence.aborted:
            return False
        self.counters["sequences_aborted"] += 1
        sequence.aborted = True
        if not sequence.steps:
            self._drop(sequence)
        return True

    def release(self, sequence: Sequence) -> None:
        """Release the pages of a sequence that ended by an output.

        Raises:
            ValueError: it has not ended that way, or was released before.
        """
        if self._unreleased.get(sequence.sequence_id) is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} has no pages to release")
        del self._unreleased[sequence.sequence_id]
        self.pool.release(sequence.drop_kv())

    def reclaim(self, flow: Flow, num_pages: int, outside: Mapping[Flow, int]) -> bool:
        """Return whether `num_pages` can be allocated for a flow (a tenant in a class) that then
        holds no more than its share. If necessary, this preempts what other flows hold above their
        shares. If that is not enough, it does nothing.

        outside: pages that each flow holds outside of the engine, which cannot be taken back.
        """
        if not self._batcher.is_shared_with(flow, outside):
            return False
        preempted = self._batcher.reclaim(flow, num_pages, outside)
        self._count_preempted(preempted or [])
        return preempted is not None

    def standing(self, outside: Mapping[Flow, int]) -> Standing:
        """Return what each flow holds and is due, including the pages that it holds `outside`."""
        return self._batcher.standing(outside=outside)

    def due(self, standing: Standing) -> list[tuple[Sequence, int]]:
        """Return, for each flow, its first waiting sequence and how many pages that lacks, if the
        flow holds no more than its share with these pages. Returns nothing when no flow holds more
        than its share.
        """
        return self._batcher.due(standing)

    def claim(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its pages before those that wait longer. Returns False when there
        are not enough pages.
        """
        return self._batcher.claim(sequence)

    # ------------------------------------------------------------ steps

    def tick(self, now: float) -> list[Made]:
        """Plan and submit steps while fewer than `max_steps_in_flight` run.

        Returns the ends of sequences that can never run here (too long for the memory or the
        model). There are usually none, but the caller must not ignore them.

        Raises:
            EngineHung: the steps in flight have made no progress for `step_timeout_s`; the first
                steps have ten times as long.
        """
        self._check_progress(now)
        outputs: list[Made] = []
        while len(self._in_flight) < self.config.max_steps_in_flight:
            batch = self._batcher.plan(now)
            self._count_preempted(batch.preempted)
            for sequence, failure in batch.failed:
                outputs.append(self._fail(sequence, failure))
            if not batch.shares:
                break
            self._submit(batch, now)
        return outputs

    def on_progress(self) -> None:
        """Record that a step in flight has made progress."""
        self.stalled_s = 0.0

    @property
    def hung(self) -> bool:
        """Whether steps have been in flight for too long without progress."""
        return self.stalled_s > self._limit_s

    @property
    def _limit_s(self) -> int:
        is_first = self._num_steps_ended < _FIRST_STEPS
        return self.config.first_step_timeout_s if is_first else self.config.step_timeout_s

    def _check_progress(self, now: float) -> None:
        passed_s, self._ticked_s = now - self._ticked_s, now
        if self._in_flight:
            self.stalled_s += min(passed_s, _MAX_TICK_S)
        if self.hung:
            step_id = min(self._in_flight)
            raise EngineHung(f"step {step_id} made no progress for {self._limit_s} s")

    def step(self, step_id: int) -> InFlight:
        """Return a step that was submitted and has not ended.

        Raises:
            KeyError: there is no such step.
        """
        return self._in_flight[step_id]

    def on_step(self, result: StepResult, now: float) -> list[Made]:
        """Commit the end of a step and return the outputs of its sequences, in slot order.

        Sequences with `finish` set have left the engine, except for their pages (`release`). A
        failed step ends all its sequences; what it wrote is never published.

        Raises:
            InternalError: no such step is in flight.
        """
        step = self._in_flight.pop(result.step_id, None)
        if step is None:
            raise InternalError(f"the runner ended step {result.step_id}, which is not in flight")
        self._num_steps_ended += 1
        self.on_progress()
        self._account(step, result, now)
        outputs: list[Made] = []
        for slot, sequence in zip(step.plan.slots, step.sequences, strict=True):
            sequence.steps.remove(result.step_id)
            sequence.num_in_flight -= len(slot.tokens) - slot.num_drafts
            sampled = result.tokens.get(sequence.sequence_id, [])
            failure = sequence.failure or _failure(result, slot, sampled)
            if sequence.aborted or failure is not None:
                sampled = []
            if sampled and self.config.max_gap_s is not None:
                sequence.allowance.count(now, self.config.max_gap_s)
            finish = self._append(sequence, sampled)
            if failure is None:
                of_prompt = result.prompt_logprobs.get(sequence.sequence_id)
                num_new = len(slot.tokens) - slot.num_drafts + max(0, len(sampled) - 1)
                self._commit(sequence, slot.start + num_new, of_prompt)
            if sequence.steps:  # later chunks of the sequence, which use its pages
                sequence.failure = failure
            elif sequence.aborted:
                self._drop(sequence)
            elif failure is not None:
                outputs.append(self._fail(sequence, failure))
            elif sampled:
                logprobs = result.logprobs.get(sequence.sequence_id)
                outputs.append(self._output(sequence, sampled, logprobs, finish))
        return outputs

    def calibrate(self, samples: Iterable[CostSample]) -> None:
        """Begin to learn anew, with steps that were timed before the first one."""
        samples = list(samples)
        self._step_cost.start(samples)
        self._batcher.sharing.times.calibrate(samples)
        if self._speculation is not None:
            self._speculation.calibrate(samples)

    def cost_sample(self) -> CostSample | None:
        """Return the cost of the step that ended last; None when it failed."""
        return self._cost

    # ------------------------------------------------------------ figures

    @property
    def num_running(self) -> int:
        return len(self._batcher.running)

    @property
    def num_waiting(self) -> int:
        return len(self._batcher.waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens accepted and not yet computed, without the one token per running stream that its
        next step computes anyway.
        """
        return sum(
            sequence.num_missing - (1 if sequence.output_tokens else 0)
            for sequence in self._sequences.values()
        )

    @property
    def num_context_tokens(self) -> int:
        """Tokens in the KV of running sequences."""
        return sum(sequence.num_computed for sequence in self._batcher.running)

    @property
    def idle(self) -> bool:
        """True if no sequence is here, in flight, or waiting for its `release`."""
        return not (self._sequences or self._in_flight or self._unreleased)

    def on_counted(self, event: Counted) -> None:
        """Take the runner's counts."""
        self.counters |= event.counters
        if event.expert_rows is not None:
            self._expert_rows = event.expert_rows

    def load(self) -> WorkerLoad:
        """Return the figures for a load report."""
        return WorkerLoad(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_queued_tokens=self.num_queued_tokens,
            num_context_tokens=self.num_context_tokens,
            num_free_blocks=self.pool.num_available,
            num_total_blocks=self.pool.num_blocks,
            num_cached_blocks=self.pool.num_cached,
            counters=dict(self.counters),
            expert_rows=self._expert_rows,
        )

    def check_integrity(
        self,
        role_holds: Iterable[int] | None = None,
        unreleased_ids: Iterable[int] | None = None,
    ) -> None:
        """Raise AssertionError when pages or sequences are lost or owned twice.

        role_holds: the pages that the role itself references by `pool.allocate` or `pool.hold` (one
        entry per reference). If given, every reference in the pool must be accounted for.
        unreleased_ids: the ended sequences that the role will still release. If given, any other
        unreleased sequence is an error.
        """
        self.pool.check_integrity()
        config, waiting, running = self.config, self._batcher.waiting, self._batcher.running
        check_queues(config, waiting, running, self._sequences)
        flying = {step_id: step.sequences for step_id, step in self._in_flight.items()}
        check_steps([*waiting, *running], flying)
        check_pages(config, self.pool, [*waiting, *running])
        owners = [*self._sequences.values(), *self._unreleased.values()]
        check_holds(self.pool, owners, role_holds)
        if unreleased_ids is not None:
            forgotten = sorted(self._unreleased.keys() - set(unreleased_ids))
            if forgotten:
                raise AssertionError(f"ended sequences {forgotten} were never released")

    # ------------------------------------------------------------ inside

    def _check_new(self, sequence: Sequence) -> None:
        name = f"sequence {sequence.sequence_id}"
        known = (self._sequences, self._unreleased, self._ended)
        if any(sequence.sequence_id in ids for ids in known):
            raise ValueError(f"{name}: the id is in use")
        if sequence.state is not SequenceState.NEW:
            raise ValueError(f"{name}: it was added before")
        if not 0 <= sequence.num_computed < sequence.num_tokens:
            raise ValueError(
                f"{name}: {sequence.num_computed} of {sequence.num_tokens} tokens are computed; "
                "at least the last one has to be left"
            )
        if len(sequence.pages) * self.config.block_tokens < sequence.num_computed:
            raise ValueError(f"{name}: its pages do not hold the tokens said to be computed")
        if len(sequence.output_tokens) >= sequence.max_new_tokens:
            raise ValueError(f"{name}: all its {sequence.max_new_tokens} tokens are there already")

    def _submit(self, batch: Batch, now: float) -> None:
        step_id = self._next_step_id
        self._next_step_id += 1
        starts: list[Sequence] = []
        slots: list[StepSlot] = []
        sequences: list[Sequence] = []
        for sequence, num_tokens in batch.shares.values():
            if not sequence.known_to_runner:
                self._count_start(sequence, now)
                starts.append(sequence)
            start = sequence.num_computed + sequence.num_in_flight
            drafts = batch.drafts.get(sequence.sequence_id, [])
            slots.append(
                StepSlot(
                    sequence_id=sequence.sequence_id,
                    start=start,
                    tokens=sequence.tokens_between(start, start + num_tokens) + drafts,
                    pages=list(sequence.pages),
                    sample=num_tokens == sequence.num_unplanned,
                    num_drafts=len(drafts),
                )
            )
            sequences.append(sequence)
            sequence.steps.append(step_id)
            sequence.num_in_flight += num_tokens
        num_tokens = self.config.max_batched_tokens - batch.budget
        plan = StepPlan(
            step_id=step_id,
            starts=starts,
            slots=slots,
            ended=list(self._ended),
            report_layers=num_tokens - len(slots) >= _LONG_STEP_TOKENS
            or any(sequence.report_layers for sequence in sequences),
        )
        self._ended.clear()
        self._in_flight[step_id] = InFlight(plan, sequences, now, batch.share)
        self._batcher.sharing.commit(batch.share)
        self._runner.submit(plan)

    def _count_start(self, sequence: Sequence, now: float) -> None:
        sequence.known_to_runner = True
        if sequence.started_s is None:
            sequence.started_s = now
            self.counters["sequences_started"] += 1
            self.counters["tokens_reused"] += sequence.num_cached_tokens
            self.counters["wait_s"] += now - sequence.added_s

    def _commit(
        self, sequence: Sequence, num_computed: int, logprobs: list[TokenLogprobs] | None
    ) -> None:
        """Record that the KV of the first `num_computed` tokens lies in the pages."""
        sequence.num_computed = num_computed
        if sequence.prompt_logprobs is not None and logprobs is not None:
            sequence.prompt_logprobs += logprobs
        self._publish(sequence)

    def _publish(self, sequence: Sequence) -> None:
        """Publish the blocks of `sequence` that have become full."""
        num_full = sequence.num_computed // self.config.block_tokens
        for index in range(sequence.num_published, num_full):
            self.pool.publish(sequence.keys[index], sequence.pages[index])
        sequence.num_published = max(sequence.num_published, num_full)

    def _append(self, sequence: Sequence, sampled: list[int]) -> FinishInfo | None:
        """Append the sampled tokens up to the one that ends the sequence; drop those after it.
        Return how it ends, if it does.
        """
        finish: FinishInfo | None = None
        for index, token in enumerate(sampled):
            sequence.output_tokens.append(token)
            finish = request_finish(
                sequence.request, sequence.output_tokens, self.config.max_model_len
            )
            if finish is None and len(sequence.output_tokens) >= sequence.max_new_tokens:
                finish = FinishInfo(reason=FinishReason.LENGTH)
            if finish is not None:
                del sampled[index + 1 :]
                break
        self.extend_keys(sequence)
        return finish

    def _output(
        self,
        sequence: Sequence,
        sampled: list[int],
        logprobs: list[TokenLogprobs] | None,
        finish: FinishInfo | None,
    ) -> Made:
        """Return the sequence's new tokens. The sequence leaves the engine if `finish` is set."""
        prompt_logprobs = None
        if sampled:
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
        if finish is not None:
            self._end(sequence)
        output = RequestOutput(
            request_id=sequence.request.request_id,
            attempt=sequence.attempt,
            start=len(sequence.output_tokens) - len(sampled),
            tokens=sampled,
            logprobs=logprobs and logprobs[: len(sampled)],
            prompt_logprobs=packed_logprobs(prompt_logprobs),
            finish=finish,
        )
        return sequence, output

    def _fail(self, sequence: Sequence, failure: Failure) -> Made:
        finish = FinishInfo(reason=FinishReason.ERROR, failure=failure)
        return self._output(sequence, [], None, finish)

    def _end(self, sequence: Sequence) -> None:
        """Move a sequence to those whose pages the role must release."""
        if sequence.state is not SequenceState.ENDED:
            self._batcher.remove(sequence)
        self.counters["sequences_ended"] += 1
        self._forget_in_runner(sequence)
        del self._sequences[sequence.sequence_id]
        self._unreleased[sequence.sequence_id] = sequence

    def _drop(self, sequence: Sequence) -> None:
        """Remove `sequence` without an output; no step uses its pages any more."""
        self._batcher.remove(sequence)
        self._forget_in_runner(sequence)
        del self._sequences[sequence.sequence_id]
        self.pool.release(sequence.drop_kv())

    def _count_preempted(self, preempted: list[Sequence]) -> None:
        self.counters["preemptions"] += len(preempted)
        for sequence in preempted:
            self._forget_in_runner(sequence)

    def _forget_in_runner(self, sequence: Sequence) -> None:
        if sequence.known_to_runner:
            sequence.known_to_runner = False
            self._ended[sequence.sequence_id] = None

    def _account(self, step: InFlight, result: StepResult, now: float) -> None:
        self._cost = None
        self.counters["steps"] += 1
        self.counters |= result.counters
        self.counters["steps_wall_s"] += now - step.submitted_s
        if result.error is not None:
            self.counters["steps_failed"] += 1
            return
        slots = step.plan.slots
        self.counters["tokens_computed"] += step.plan.num_tokens
        streams = [slot for slot in slots if len(slot.tokens) == 1 + slot.num_drafts]
        has_prompts = len(streams) < len(slots)
        self._cost = CostSample(
            num_new_tokens=step.plan.num_tokens,
            num_context_tokens=sum(slot.start for slot in slots),
            num_sequences=len(slots),
            seconds=result.seconds,
            num_streams=len(streams),
            num_stream_tokens=sum(len(slot.tokens) for slot in streams),
            num_stream_context_tokens=sum(slot.start for slot in streams),
        )
        self._batcher.sharing.observe(self._cost, step.share, has_prompts=has_prompts)
        if self.config.num_stages > 1 or self.config.max_gap_s is not None:
            self._unlearned.append(self._cost)
            if has_prompts or len(self._unlearned) >= _STREAM_COSTS:
                self._step_cost.observe(self._unlearned)
                self._unlearned = []
        if self._speculation is None:
            return
        outcomes = [
            (sequence, slot.num_drafts, max(0, len(result.tokens.get(slot.sequence_id, [])) - 1))
            for slot, sequence in zip(slots, step.sequences, strict=True)
        ]
        self._speculation.count(outcomes)
        self.counters |= self._speculation.counters
        if all(slot.sample and len(slot.tokens) == 1 + slot.num_drafts for slot in slots):
            self._speculation.observe(outcomes, self._cost)


def _failure(result: StepResult, slot: StepSlot, sampled: list[int]) -> Failure | None:
    """Return why the sequence of `slot` failed, alone or with the whole step, or None."""
    if result.error is not None:
        message = f"the step that computed this request failed: {result.error}"
    elif slot.sequence_id in result.failures:
        return result.failures[slot.sequence_id]
    elif slot.sample and not sampled:
        message = "the step that computed this request sampled no token"
    else:
        return None
    return Failure(
        status=InternalError.http_status, error_type=InternalError.error_type, message=message
    )


_COUNTERS = (
    "preemptions", "sequences_aborted", "sequences_ended", "sequences_started", "steps",
    "steps_failed", "steps_wall_s", "tokens_computed", "tokens_reused", "wait_s",
)  # fmt: skip
