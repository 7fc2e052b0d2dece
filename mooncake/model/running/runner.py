"""Runs step plans on the model, in order, on a thread of its own (`engine.plan.PolledRunner`).

Owns the state of each sequence: its prompt (for prompt logprobs) and, in the sampler, its history.
Every plan names the pages of its sequences.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import torch

from mooncake.base import Grammar, InternalError, TokenLogprobs
from mooncake.base.mailbox import Mailbox
from mooncake.base.models.parallel import stage_layers
from mooncake.base.threads import VitalThread
from mooncake.engine.plan import (
    BY_MODEL,
    Counted,
    LayerDone,
    RunnerEvent,
    StepPlan,
    StepResult,
    StepSlot,
)
from mooncake.engine.ranks.kv_moves import ALL_LAYERS, OfRank
from mooncake.engine.ranks.step_log import Way
from mooncake.engine.sequence import Sequence as EngineSequence
from mooncake.model.copies import Copies, HostCopies, LayerReports
from mooncake.model.device.graphs import DecodeGraphs
from mooncake.model.drafts.model_drafts import DraftLayer, ModelDrafts
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampled, Sampler
from mooncake.model.parallel.lead import Lead
from mooncake.model.parallel.peers import Peers
from mooncake.model.parallel.stages import StageTimes
from mooncake.model.running.computed_step import CapturedSteps, ComputedStep, ForwardPass

_PATIENCE = 0.5
"""An instance that has just computed a step waits for its next one for this share of that step's
time. Only then does it take part, without rows, in a step of others. Otherwise two busy instances
would take turns.
"""
_END_S = 30.0
"""How long a step may go on after a rank is lost. By then its exchanges have been ended."""
_STEP_S = 600.0
"""How long the last step may go on when no rank is lost."""
_LOOK_S = 0.5
"""How often to check whether a rank has been lost meanwhile."""
_COUNTED_EVERY = 16
"""The runner reports its counts once for this many steps of others in which it takes part."""


class ModelRunner:
    """One model, its KV pages and a sampler behind a queue of plans."""

    def __init__(
        self,
        model: KimiK2,
        kv: KvTensors,
        sampler: Sampler,
        *,
        num_threads: int | None = None,
        captured: CapturedSteps | None = None,
        copies: Copies | None = None,
        lead: Lead | None = None,
        peers: Peers | None = None,
        draft_layer: DraftLayer | None = None,
    ) -> None:
        """Start the thread.

        num_threads: torch's CPU threads, of the whole process; None: unchanged. captured: steps
        over the same pages; None: every step runs eagerly. copies: to the model's device; None: the
        device is the host. lead: the followers that compute each step with this rank; None: there
        are none. peers: the instances that share experts with this one, and step with it; None:
        there are none. draft_layer: makes the drafts that a plan leaves to the model; None: it
        leaves none.

        The queue is as long as the engine lets it be (two steps in flight, or one more than the
        number of stages).
        """
        self._model = model
        self._forward = ForwardPass(model, kv, None if captured is None else captured.prompts)
        self._sampler = sampler
        self._num_threads = num_threads
        self._decoder = None if captured is None else captured.decode
        self._copies = copies or HostCopies()
        self._lead = lead
        self._drafts: ModelDrafts | None = None
        if draft_layer is not None:
            self._drafts = ModelDrafts(draft_layer, self._copies, model.stage.ranks)
        self._reads = () if draft_layer is None else draft_layer.reads
        self._peers = peers
        self._stages: StageTimes | None = None
        """The times of stages; None when no stage comes before this one's."""
        self._num_windows = 0
        """How many windows of experts' rows were reported."""
        self._asked = 0
        """The last step that another instance has begun."""
        self._starts: dict[int, EngineSequence] = {}
        self._plans: queue.SimpleQueue[StepPlan | int | None] = queue.SimpleQueue()
        """Plans, and the numbers of steps that others begin; None ends the queue."""
        self._untold: queue.SimpleQueue[StepPlan | None] | None = None
        """Steps of which the earlier stages have not heard; None: there are no earlier stages."""
        self._events: Mailbox[RunnerEvent] = Mailbox()
        self._ended = -1
        """The last step whose result has been emitted."""
        self._layers = LayerReports(self._emit)
        self._lock = threading.Lock()
        self._closed = False
        if lead is not None:
            lead.watch(self._events.ring, self._hear)
        if peers is not None:
            peers.watch(
                self._plans.put,
                self._events.ring,
                lambda: self._emit(Counted(counters=dict(peers.counters))),
            )
        self._threads = [VitalThread(self._run, "model-runner")]
        if not model.stage.is_first:  # this is the last stage, and earlier ones must be ahead of it
            self._untold = queue.SimpleQueue()
            assert lead is not None
            layers = stage_layers(model.spec.num_hidden_layers, lead.num_stages)
            self._stages = StageTimes([len(each) for each in layers])
            self._threads.append(VitalThread(self._tell_ahead, "step-log"))
        for thread in self._threads:
            thread.start()

    def prepare(self, grammar: Grammar) -> None:
        """Start compiling the grammar of a coming sequence; never blocks."""
        self._sampler.prepare(grammar)

    def submit(self, plan: StepPlan) -> None:
        """Queue a step; never blocks. Raises RuntimeError when the runner is closed."""
        if self._closed:
            raise RuntimeError("the runner is closed")
        (self._untold or self._plans).put(plan)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while events wait."""
        return self._events.fileno()

    def poll(self) -> Sequence[RunnerEvent]:
        """Return the events since the last call, oldest first, without waiting.

        Raises:
            InternalError: a rank of this model was lost, so no step can run any more.
        """
        if self._lost is not None:
            raise InternalError(f"{self._lost}: all ranks of this worker end")
        return self._events.receive()

    def check_integrity(self) -> None:
        """Raise an error when a rank holds pages of a sequence that has ended (see
        `Lead.check_integrity`), or the draft layer holds memory of one. No step may be running.
        """
        if self._drafts is not None:
            self._drafts.check_integrity(self._starts)
        if self._lead is not None:
            self._lead.check_integrity(self._starts)

    def close(self) -> None:
        """Finish the running step, drop queued ones and free the descriptor. May be called twice.

        Events that were not polled are lost. Model, pages and captured steps are released, so a
        remaining reference to this runner holds no device memory.

        Raises:
            InternalError: the running step does not end, perhaps because a rank was lost.
        """
        if self._closed:
            return
        self._closed = True
        if self._lead is not None:
            self._lead.watch(lambda: None, lambda _: None)
        if self._peers is not None:
            self._peers.watch(lambda _: None, lambda: None, lambda: None)
        (self._untold or self._plans).put(None)
        for thread in self._threads:
            _await(thread, lambda: self._lost)
        if self._peers is not None:
            assert self._model.exchange is not None
            if self._lost is None:
                self._peers.leave(self._model.exchange.num_steps)
            else:
                self._peers.fail(self._lost)
        self._layers.close()
        self._events.close()
        del self._model, self._forward, self._decoder, self._sampler, self._drafts

    @property
    def _lost(self) -> str | None:
        """Why no step can run any more, or None if steps can."""
        others = [each for each in (self._peers, self._lead) if each is not None]
        return next((each.lost for each in others if each.lost is not None), None)

    def _emit(self, event: RunnerEvent) -> None:
        with self._lock:
            self._append(event)

    def _hear(self, event: OfRank | LayerDone) -> None:
        """Emit a follower's event, unless the result of its step has been emitted."""
        with self._lock:
            if not isinstance(event, LayerDone) or event.step_id > self._ended:
                self._append(event)

    def _append(self, event: RunnerEvent) -> None:
        self._events.put(event)
        if isinstance(event, StepResult):
            self._ended = event.step_id

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        patience_s = 0.0
        with torch.inference_mode():
            while True:
                try:
                    plan = self._plans.get(timeout=patience_s if self._is_awaited() else None)
                except queue.Empty:
                    patience_s = 0.0
                    self._serve()
                else:
                    if plan is None or self._closed:
                        if self._lead is not None and self._lost is None:
                            self._wait()  # a step that runs ahead needs the ranks that end next
                        return
                    if isinstance(plan, int):
                        self._asked = max(self._asked, plan)
                    else:
                        result = self._step(plan)
                        patience_s = _PATIENCE * result.seconds if plan.slots else 0.0
                        self._emit(result)
                self._tell_rows()
                if self._peers is not None:
                    assert self._model.exchange is not None
                    self._peers.name_slow(self._model.exchange.take_slow(), time.monotonic())

    def _is_awaited(self) -> bool:
        """Whether others have begun a step in which this instance has not taken part yet."""
        if self._peers is None or self._peers.lost is not None:
            return False
        assert self._model.exchange is not None
        return self._model.exchange.num_steps < self._asked

    def _serve(self) -> None:
        """Take part, without rows, in the step that others have begun."""
        assert self._model.exchange is not None
        try:
            if self._lead is not None:
                self._lead.ranks.step([], {})
                self._lead.begin_step()
            (self._decoder or self._model).serve()
            if self._lead is not None:
                self._model.stage.ranks.meet()
            self._wait()
        except Exception as error:  # whatever it was, no rank can go on
            self._fail(f"a step of instances that share experts failed: {error}")
            return
        if self._model.exchange.num_steps % _COUNTED_EVERY == 0:
            self._emit(Counted(counters=self._counters()))

    def _tell_rows(self) -> None:
        """Report the rows of experts when a window has ended."""
        balancer = self._model.balancer
        if balancer is not None and balancer.num_windows > self._num_windows:
            self._num_windows = balancer.num_windows
            self._emit(Counted(counters=self._counters(), expert_rows=balancer.rows))

    def _counters(self) -> dict[str, float]:
        others = {} if self._peers is None else self._peers.counters
        stages = {} if self._stages is None else self._stages.counters
        return self._model.counters | others | stages

    def _fail(self, why: str) -> None:
        """End the ranks that wait for this one in the middle of a step."""
        for others in (self._peers, self._lead):
            if others is not None:
                others.fail(why)

    def _tell_ahead(self) -> None:
        """Tell earlier stages of each step as soon as it is there."""
        assert self._untold is not None
        assert self._lead is not None
        while True:
            plan = self._untold.get()
            if plan is not None and not self._closed:
                try:
                    self._tell(plan)
                except Exception as error:  # whatever it was, no rank can go on
                    why = f"other ranks could not be told of step {plan.step_id}: {error}"
                    self._lead.fail(why)
            self._plans.put(plan)
            if plan is None:
                return

    def _tell(self, plan: StepPlan) -> Way:
        """Record which sequences begin and end with this step, and tell the followers everything
        about it. Return how it is computed.
        """
        for sequence_id in plan.ended:
            self._starts.pop(sequence_id, None)
        for start in plan.starts:
            self._starts[start.sequence_id] = start
        unknown = [s.sequence_id for s in plan.slots if s.sequence_id not in self._starts]
        if unknown:
            raise ValueError(f"sequences {unknown} were never started")
        way = self._way(plan)
        if self._lead is not None:
            self._lead.ranks.forget([*plan.ended, *(start.sequence_id for start in plan.starts)])
            if plan.slots:
                reported_as = plan.step_id if plan.report_layers else None
                self._lead.ranks.step(
                    plan.slots, self._prompt_rows(plan), way, reported_as=reported_as
                )
        return way

    def _way(self, plan: StepPlan) -> Way:
        decoder = self._decoder
        if decoder is None or plan.report_layers or self._whole(plan):
            return Way.AS_IT_COMES
        if not decoder.takes(plan.slots):
            return Way.AS_IT_COMES
        return Way.BEGUN if decoder.has_begun(plan.slots) else Way.REPLAYED

    def _whole(self, plan: StepPlan) -> list[StepSlot]:
        """Return the slots for which all rows are wanted at the end."""
        return [slot for slot in plan.slots if self._logprobs_wanted(slot.sequence_id)]

    def _prompt_rows(self, plan: StepPlan) -> dict[int, int]:
        """Return how many rows of these slots become logits."""
        return {slot.sequence_id: len(self._following(slot)) for slot in self._whole(plan)}

    def _step(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        try:
            try:
                result = self._execute(plan)
            finally:
                self._layers.drain()  # no event of a step may follow its result
        except Exception as error:  # after any error, the engine must hear that the step ended
            self._fail(f"step {plan.step_id}: {error}")
            return StepResult(
                step_id=plan.step_id,
                seconds=time.perf_counter() - begin,
                error=f"step {plan.step_id}: {type(error).__name__}: {error}",
            )
        seconds = time.perf_counter() - begin
        if self._stages is not None and plan.slots:
            of_stages = self._model.stage.seconds
            self._stages.add(of_stages, time.monotonic())
            seconds = max(of_stages)
        return msgspec.structs.replace(result, seconds=seconds, counters=self._counters())

    def _execute(self, plan: StepPlan) -> StepResult:
        """Compute a step. The result lacks its time."""
        for sequence_id in plan.ended:
            self._sampler.forget(sequence_id)
        for start in plan.starts:
            self._sampler.start(start)
        way = self._tell(plan) if self._untold is None else self._way(plan)
        if self._drafts is not None:
            self._drafts.forget([*plan.ended, *(start.sequence_id for start in plan.starts)])
        if not plan.slots:
            return StepResult(step_id=plan.step_id, seconds=0.0)
        lead = self._lead
        if lead is not None:
            lead.begin_step()
        if self._peers is not None:
            assert self._model.exchange is not None
            self._peers.wake(self._model.exchange.num_steps + 1)
        slots = self._drafted(plan.slots)
        if self._decoder is not None:
            if way is not Way.AS_IT_COMES:
                return self._decode(self._decoder, plan.step_id, slots)
            self._decoder.interrupt()

        def after_write(layer: int) -> None:
            if lead is not None:
                lead.reached(layer + 1)
            self._layers.add(LayerDone(step_id=plan.step_id, layer=layer), self._copies.mark())

        computed = ComputedStep(
            self._model, self._forward, self._copies, self._drafts, self._reads, slots,
            self._prompt_rows(plan), after_write if plan.report_layers else None,
        )  # fmt: skip
        logprobs: dict[int, list[TokenLogprobs]] = {s.sequence_id: [] for s in self._whole(plan)}
        for slot, begin, piece in computed.prompt_logits():
            num = self._starts[slot.sequence_id].request.sampling.num_prompt_logprobs
            assert num is not None
            following = self._following(slot)[begin : begin + len(piece)]
            logprobs[slot.sequence_id] += self._sampler.prompt_logprobs(piece, following, num)
        logits = computed.sampled_logits()
        if self._drafts is None:
            self._leave_pages()
        failures = self._sampler.broken([slot.sequence_id for slot in computed.sampled])
        result = StepResult(
            step_id=plan.step_id, seconds=0.0, prompt_logprobs=logprobs, failures=failures
        )
        if logits is not None:
            self._sample(logits, computed.sampled, result)
        written = computed.keep(result.tokens, handed_on=plan.report_layers)
        if self._drafts is not None:
            self._leave_pages()
        if written or not result.tokens:  # tokens would have come last
            self._wait()
        return result

    def _drafted(self, slots: Sequence[StepSlot]) -> Sequence[StepSlot]:
        """Return the slots of a step with the drafts that its plan left to the model."""
        if self._drafts is None or not any(BY_MODEL in slot.drafts for slot in slots):
            return slots
        slots = self._drafts.make(slots)
        if self._untold is not None:
            assert self._lead is not None
            self._lead.ranks.drafted(slots)
        return slots

    def _leave_pages(self) -> None:
        """Return when no rank writes to pages of this step any more."""
        if self._lead is not None:
            self._model.stage.ranks.meet()
            self._lead.reached(ALL_LAYERS)

    def _sample(self, logits: torch.Tensor, slots: Sequence[StepSlot], result: StepResult) -> None:
        """Sample for those of `slots` that have not failed: after the token before its drafts, and
        in further rounds after each draft that equals the sampled token. So every token is sampled
        as in a step of its own, from settings and a grammar that know all tokens before it.

        logits: for each slot the rows of that token and of its drafts, slot after slot.
        """
        row, open_ = 0, []
        for slot in slots:
            if slot.sequence_id not in result.failures:
                open_.append((row, slot))
            row += 1 + slot.num_drafts
        for turn in itertools.count():
            if turn and open_:
                broken = self._sampler.broken([slot.sequence_id for _, slot in open_])
                # A sequence that breaks here fails in the next step, which begins with this token.
                open_ = [(row, slot) for row, slot in open_ if slot.sequence_id not in broken]
            if not open_:
                return
            rows = [row + turn for row, _ in open_]
            part = logits
            if rows != list(range(len(logits))):
                part = logits.index_select(0, self._copies.send(torch.tensor(rows)))
            ids = [slot.sequence_id for _, slot in open_]
            sampled = self._sampler.sample(part, ids)
            _add(result, ids, sampled)
            open_ = [
                (row, slot)
                for (row, slot), token in zip(open_, sampled[0], strict=True)
                if turn < slot.num_drafts and slot.drafts[turn] == token
            ]
        raise AssertionError("rounds end with the drafts")

    def _decode(self, decoder: DecodeGraphs, step_id: int, slots: Sequence[StepSlot]) -> StepResult:
        """Replay a step. When the batch has settled, begin the next step before this one's tokens
        are read.
        """
        logits = decoder.logits(slots)
        if self._lead is not None and self._drafts is None:
            self._lead.reached(ALL_LAYERS)
        asked = [slot.sequence_id for slot in slots if slot.sample]
        result = StepResult(step_id=step_id, seconds=0.0, failures=self._sampler.broken(asked))
        if self._drafts is not None or any(slot.num_drafts for slot in slots):
            self._sample_drafted(decoder, logits, slots, result)
            return result
        rows = [
            row
            for row, slot in enumerate(slots)
            if slot.sample and slot.sequence_id not in result.failures
        ]
        if not rows:
            self._wait()
            return result
        every = len(rows) == len(slots)
        if not every:
            logits = logits[: len(slots)].index_select(0, self._copies.send(torch.tensor(rows)))
        ids = [slots[row].sequence_id for row in rows]

        def begin_next(tokens: torch.Tensor) -> None:
            if self._lead is not None:
                self._lead.ahead(tokens)
            decoder.run_ahead(slots, tokens)

        # A stage before this one would compute a guess before steps that it knows of.
        settled = self._untold is None and decoder.settled(slots)
        sampled = self._sampler.sample(logits, ids, begin_next if every and settled else None)
        _add(result, ids, sampled)
        decoder.confirm(sampled[0])
        if self._lead is not None:
            # Whoever gets these tokens may give the pages of an ended sequence to others.
            self._lead.wait_until_guesses_are_heard()
        return result

    def _sample_drafted(
        self,
        decoder: DecodeGraphs,
        logits: torch.Tensor,
        slots: Sequence[StepSlot],
        result: StepResult,
    ) -> None:
        """Sample from a replayed step with drafts, or of a model whose states are read for them,
        and keep these states.
        """
        sampled = [slot for slot in slots if slot.sample]
        if len(sampled) < len(slots):
            sampling = [slot.sample for slot in slots for _ in slot.tokens]
            rows = [row for row, wanted in enumerate(sampling) if wanted]
            logits = logits.index_select(0, self._copies.send(torch.tensor(rows)))
        self._sample(logits, sampled, result)
        written = False
        if self._drafts is not None:
            rows_of, states = decoder.read_rows(slots)
            written = self._drafts.keep(rows_of, states, result.tokens, handed_on=False)
            self._leave_pages()
        if written or not result.tokens:  # tokens would have come last
            self._wait()

    def _wait(self) -> None:
        """Block until the device has finished the step, so that its pages may be reused."""
        end = self._copies.mark()
        if end is not None:
            end.reached()

    def _logprobs_wanted(self, sequence_id: int) -> bool:
        return self._starts[sequence_id].request.sampling.num_prompt_logprobs is not None

    def _following(self, slot: StepSlot) -> Sequence[int]:
        """Return the prompt tokens that follow each token of a slot."""
        first = slot.start + 1
        return self._starts[slot.sequence_id].prompt_tokens[first : first + len(slot.tokens)]


def _add(result: StepResult, sequence_ids: Sequence[int], sampled: Sampled) -> None:
    """Add a token of each of these sequences."""
    tokens, logprobs = sampled
    for sequence_id, token in zip(sequence_ids, tokens, strict=True):
        result.tokens.setdefault(sequence_id, []).append(token)
    for row, entry in logprobs.items():
        result.logprobs.setdefault(sequence_ids[row], []).append(entry)


def _await(thread: threading.Thread, lost: Callable[[], str | None]) -> None:
    """Wait until a thread of a runner ends: at most `_STEP_S`, and at most `_END_S` after `lost`
    says that a rank was lost.

    Raises:
        InternalError: it does not end.
    """
    left_s = _STEP_S
    while thread.is_alive():
        if (why := lost()) is not None:
            left_s = min(left_s, _END_S)
        if left_s <= 0:
            what = "the running step" if why is None else f"{why}, and the step that waits for it"
            raise InternalError(f"{what} does not end")
        thread.join(_LOOK_S)
        left_s -= _LOOK_S
