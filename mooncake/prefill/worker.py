"""The prefill worker: a state machine that turns each task into KV on decode's pages and one first
token.

    GATHERING ──► COMPUTING ──► PUSHING ──► SETTLING ──► gone
    (prefix)      (engine)      (decode's    (only the pool's
                                 pages)       copy is missing)

Queues: tasks wait in the engine's waiting queue, which is bounded; a full queue refuses the task.
Reservations that came before their task wait in the job table, which is bounded; they are answered
with `PushEnded` when the task does not come in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import Enum

import msgspec

from mooncake.base.kv_layout import KvLayout
from mooncake.base.messages import (
    BlockSource,
    BlocksPushed,
    KVReady,
    PushEnded,
    RequestTask,
    Reserved,
    WorkerRef,
)
from mooncake.base.request import (
    Failure,
    Flow,
    RequestOutput,
    request_finish,
)
from mooncake.engine.plan import LayerDone, StepResult, StepSlot
from mooncake.engine.sequence import Made, rank
from mooncake.instance.instance import Instance
from mooncake.instance.job_table import Job
from mooncake.instance.push import Destination, Push
from mooncake.instance.role import RoleWorker


class Stage(Enum):
    """The stage of a prefill; see the module's picture."""

    GATHERING = "gathering"
    COMPUTING = "computing"
    PUSHING = "pushing"
    SETTLING = "settling"


class PrefillJob(Job):
    """State of one task."""

    def __init__(self, sequence_id: int, task: RequestTask, layout: KvLayout, push: Push) -> None:
        super().__init__(sequence_id, task, layout)
        self.max_new_tokens = len(self.output_tokens) + 1
        self.report_layers = True
        self.push = push
        self.stage = Stage.GATHERING
        self.decode: Destination | None = None
        """The pages that decode reserved, once its message has come."""
        self.num_final = 0
        """Leading blocks whose KV is complete and that have been given to the push."""
        self.put_asked = False
        self.sampled_s = 0.0
        self.handed_over = False
        """True once decode got `KVReady`: it waits for no `PushEnded`."""
        self.ended = False
        """True if it was aborted or failed: events that still come for it are ignored."""


class PrefillWorker(RoleWorker[PrefillJob]):
    """The prefill role of one instance (see `base.machine.Machine`)."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._settling: list[PrefillJob] = []
        """Jobs whose request has moved on to decode. Only the pool's copy is still being
        written.
        """

    # ------------------------------------------------------------ Machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        match event:
            case Reserved():
                self._on_reserved(event, now)
            case LayerDone():
                self.instance.handle(event, now)
                self._advance(event.step_id, event.layer + 1, now)
            case StepResult():
                self._on_step(event, now)
            case _:
                super().handle(event, now)

    def tick(self, now: float) -> float | None:
        self._end_orphans(now)
        for job in self._jobs:
            waits = job.stage is Stage.PUSHING and job.decode is None
            if waits and now - job.sampled_s >= self.instance.config.hold_s:
                self._hand_over_by_pool(job, now)
        self._make_way(now)
        for message in self._jobs.expired_early(now):
            self._send_push_ended(message, failed=True)
        self._take(self.instance.engine.tick(now), now)
        return self.instance.tick(now)

    def _make_way(self, now: float) -> None:
        """Give pages to the tenants and classes that wait for some and have less than their share.
        If there are no free pages, those with more than their share hand over through the pool what
        waits for room at decode, the last in order first.
        """
        instance, engine = self.instance, self.instance.engine
        held = [job for job in self._jobs if job.stage is Stage.PUSHING]
        if not engine.num_waiting or not (held or self._settling):
            return
        outside: Counter[Flow] = Counter()
        for job in (*held, *self._settling):
            outside[job.flow] += instance.layout.num_blocks(job.num_task_tokens)
        standing = engine.standing(outside)
        coming = sum(instance.layout.num_blocks(job.num_task_tokens) for job in self._settling)
        held = sorted((job for job in held if job.decode is None), key=rank)
        for sequence, num_pages in engine.due(standing):
            if engine.claim(sequence):
                continue
            for job in [job for job in reversed(held) if job.flow != sequence.flow]:
                if instance.pool.num_available + coming >= num_pages:
                    break
                if not standing.is_within(job.flow):
                    held.remove(job)
                    num_held = instance.layout.num_blocks(job.num_task_tokens)
                    standing.give_back(job.flow, num_held)
                    self._hand_over_by_pool(job, now)
                    coming += num_held if job in self._settling else 0
            engine.claim(sequence)

    @property
    def quiet(self) -> bool:
        return not self._jobs and not self._settling and self.instance.quiet

    # ------------------------------------------------------------ from task to engine

    def _new_job(self, task: RequestTask) -> PrefillJob:
        instance = self.instance
        return PrefillJob(instance.next_sequence_id(), task, instance.layout, instance.open_push())

    def _begin(self, job: PrefillJob, now: float) -> None:
        self._gather(job, job.task.sources, now)

    def _on_gathered(self, job: PrefillJob, pages: list[int], now: float) -> None:
        instance = self.instance
        if job.ended:
            instance.pool.release(pages)
            self._close(job, now)
            return
        job.take_kv(pages, len(pages) * instance.layout.block_tokens)
        if not instance.engine.add(job, now):
            instance.pool.release(job.drop_kv())
            self._fail(job, Failure.turned_away("the prefill queue is full"), now)
            return
        job.stage = Stage.COMPUTING
        early = self._jobs.take_early(job)
        if early is not None:
            self._on_reserved(early, now)

    def _on_reserved(self, message: Reserved, now: float) -> None:
        if self._jobs.is_over(message.request_id, message.attempt):
            self._send_push_ended(message, failed=False)
            return
        job = self._jobs.find(message.request_id, message.attempt)
        if job is None or job.stage is Stage.GATHERING:
            dropped = self._jobs.keep_early(message, now)
            if dropped is not None:
                self._send_push_ended(dropped, failed=True)
            return
        if job.decode is not None:
            return

        def progress(destination: Destination, some: list[int], at: float) -> None:
            self._report_pushed(job, destination, some)
            self._settle(job, at)

        instance = self.instance
        wanted = instance.config.push_checksums and instance.checksums.can_hash
        job.decode = job.push.add_destination(
            message.parts, progress, now, instance.checksums if wanted else None
        )
        self._settle(job, now)

    def _report_pushed(self, job: PrefillJob, destination: Destination, some: list[int]) -> None:
        """Tell decode which blocks are complete there, with their checksums. If this ends the push,
        `KVReady` tells about all of them instead.
        """
        checksums = destination.checksums
        known = [index for index in some if index in destination.whole and index in checksums]
        if known and not destination.complete:
            pushed = BlocksPushed(
                request_id=job.request_id,
                attempt=job.attempt,
                indexes=known,
                checksums=[checksums[index] for index in known],
            )
            self.instance.send(job.task.decode, pushed)

    # ------------------------------------------------------------ from engine to decode

    def _advance(self, step_id: int, num_layers: int, now: float) -> None:
        """Push the blocks that this step completes; `num_layers` layers lie in the pages."""
        block_tokens = self.instance.layout.block_tokens
        for job, slot in self._computed(step_id):
            self._take_cached(job, slot.pages, slot.start // block_tokens, now)
            end = slot.start + len(slot.tokens)
            last = end if end == job.num_task_tokens else end - end % block_tokens
            indexes = range(slot.start // block_tokens, -(-last // block_tokens))
            for index in indexes:
                job.push.add_block(index, slot.pages[index])
            job.num_final = max(job.num_final, last // block_tokens)
            job.push.advance(indexes, num_layers, now)

    def _computed(self, step_id: int) -> Iterator[tuple[PrefillJob, StepSlot]]:
        """Yield the jobs in a step with their slots. Jobs that have ended are left out."""
        step = self.instance.engine.step(step_id)
        for slot, sequence in zip(step.plan.slots, step.sequences, strict=True):
            job = self._jobs.of_sequence(sequence)
            if job is not None:
                yield job, slot

    def _take_cached(self, job: PrefillJob, pages: list[int], num_cached: int, now: float) -> None:
        """Push the blocks before the step that came from a cache. Only the blocks after them, and
        the hot ones that the Conductor wants replicated, are put into the pool.
        """
        cached = range(job.num_final, num_cached)
        for index in cached:
            job.push.add_block(index, pages[index])
        job.push.advance(cached, self.instance.layout.num_layers, now)
        job.num_final = max(job.num_final, num_cached)
        if not job.put_asked:
            job.put_asked = True
            hot = range(min(job.task.num_replicate_blocks, num_cached))
            own = range(num_cached, len(job.keys))
            new = {job.keys[index]: index for index in (*hot, *own)}
            tenant = job.request.tenant
            head = job.chain_head(job.keys[:num_cached], job.num_counted)
            self.instance.put(job.push, new, tenant, lambda at: self._settle(job, at), head)
            if not new:
                self.instance.report_use(head)

    def _on_step(self, result: StepResult, now: float) -> None:
        if result.error is None:
            self._advance(result.step_id, self.instance.layout.num_layers, now)
            self._note_chunks(result.step_id, now)
        self._take(self.instance.on_step(result, now), now)

    def _note_chunks(self, step_id: int, now: float) -> None:
        for job, slot in self._computed(step_id):
            if job.trace is not None:
                job.trace.chunk(slot.start, len(slot.tokens), now)

    def _take(self, outputs: list[Made], now: float) -> None:
        """Take the outputs of a step. Each output ends its sequence, which samples only one
        token.
        """
        for sequence, output in outputs:
            self.instance.engine.release(sequence)
            job = self._jobs.of_sequence(sequence)
            assert job is not None, "a sequence without a job"
            if output.tokens:
                self._on_sampled(job, output, now)
            else:
                assert output.finish is not None
                assert output.finish.failure is not None
                self._fail(job, output.finish.failure, now)

    def _on_sampled(self, job: PrefillJob, output: RequestOutput, now: float) -> None:
        finish = request_finish(
            job.request, job.output_tokens, self.instance.engine.config.max_model_len
        )
        self.instance.count("prompt_tokens", job.num_task_tokens)
        self.instance.count("prompt_tokens_cached", job.num_cached_tokens)
        if job.trace is not None:
            job.trace.computed(job, now)
        first = job.output(msgspec.structs.replace(output, finish=finish), job.num_cached_tokens)
        self.instance.queue_output(job.task.gateway, first)
        job.sampled_s, job.stage = now, Stage.PUSHING
        if finish is not None:
            self._leave(job)
        self._settle(job, now)

    def _settle(self, job: PrefillJob, now: float) -> None:
        """Take the next step that a finished push, put or sampled token allows."""
        if job.ended:
            return
        if (
            job.decode is not None
            and job.decode.error is not None
            and job.stage is not Stage.SETTLING
        ):
            message = f"pushing the KV to decode failed: {job.decode.error}"
            self._fail(job, Failure.unavailable(message), now)
            return
        if job.stage is Stage.PUSHING and job.decode is not None and job.decode.complete:
            if job.trace is not None:
                job.trace.pushed(job.decode, now)
            self._hand_over(job, pushed=True, sources=[])
        if job.stage is Stage.SETTLING and not job.push.puts:
            self._end(job, now)

    def _hand_over_by_pool(self, job: PrefillJob, now: float) -> None:
        """Leave the blocks in the pool for decode, which had no room in time."""
        store = self.instance.kvstore
        num_full = job.num_task_tokens // self.instance.layout.block_tokens
        sources = [BlockSource(store=store, first=0, stop=num_full)] if store and num_full else []
        self.instance.count("handed_over_by_pool")
        self._hand_over(job, pushed=False, sources=sources)
        self._settle(job, now)

    def _hand_over(self, job: PrefillJob, *, pushed: bool, sources: list[BlockSource]) -> None:
        """Tell decode to go on: its pages are filled (`pushed`), or the blocks are in the pool."""
        known = job.decode.checksums if pushed and job.decode is not None else {}
        self.instance.send(
            job.task.decode,
            KVReady(
                request_id=job.request_id,
                attempt=job.attempt,
                prefill=self.instance.worker,
                token=job.output_tokens[-1],
                num_cached_tokens=job.num_cached_tokens,
                pushed=pushed,
                sources=sources,
                checksums=[known[index] for index in sorted(known)],
                spans=job.take_spans(),
            ),
        )
        job.handed_over = True
        self._leave(job)

    # ------------------------------------------------------------ endings

    def _leave(self, job: PrefillJob) -> None:
        """Let the request go on elsewhere. The pool's copy is still being written."""
        job.stage = Stage.SETTLING
        self._settling.append(job)
        self._jobs.remove(job)

    def _fail(self, job: PrefillJob, failure: Failure, now: float) -> None:
        self.instance.fail(job.task, failure)
        self._end(job, now)

    def _on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        for job in self._jobs:
            if job.task.decode == worker:
                self._end(job, now)

    def _end(self, job: PrefillJob, now: float) -> None:
        if job.ended:
            return
        job.ended = True
        self._jobs.remove(job)
        self.instance.engine.abort(job.sequence_id)
        if job.reuse is not None:
            job.reuse.cancel(now)  # this ends in _on_gathered, which closes the push
        else:
            self._close(job, now)

    def _close(self, job: PrefillJob, now: float) -> None:
        def released(_at: float) -> None:
            if job in self._settling:
                self._settling.remove(job)
            if not job.handed_over:
                self._send(job.task.decode, job.request_id, job.attempt, failed=False)

        self.instance.close_push(job.push, now, released)

    def _send_push_ended(self, message: Reserved, *, failed: bool) -> None:
        """Answer a reservation: prefill will not write to its pages (any more)."""
        self._send(message.decode, message.request_id, message.attempt, failed=failed)

    def _send(self, decode: WorkerRef, request_id: str, attempt: int, *, failed: bool) -> None:
        ended = PushEnded(
            request_id=request_id, attempt=attempt, prefill=self.instance.worker, failed=failed
        )
        self.instance.send(decode, ended)
