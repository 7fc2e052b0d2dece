"""The decode worker: a state machine that joins requests to a running batch once their KV has
arrived.

Queues: tasks without room wait in `_waiting`, by turn and class (at most `max_reservations`; a full
queue refuses the task). Others may pass a task that waits only for resting pages. Pages that a
prefill worker may be writing to are not freed before its `PushEnded` or `KVReady` has come, or
before it was lost and is fenced (`instance.mover.Reservations`).
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Set

import msgspec

from mooncake.base.messages import (
    BlocksPushed,
    KVReady,
    PushEnded,
    RequestTask,
    Reserved,
    WorkerRef,
)
from mooncake.base.request import Failure, Flow, RequestOutput
from mooncake.decode.task import (
    MAX_WAITING_LOOKED_AT,
    DecodeJob,
    Stage,
    can_ever_fit,
    has_room,
    may_be_passed,
    may_reserve,
)
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Made, rank
from mooncake.instance.instance import Instance
from mooncake.instance.role import RoleWorker


class DecodeWorker(RoleWorker[DecodeJob]):
    """The decode role of one instance (see `base.machine.Machine`)."""

    def __init__(self, instance: Instance) -> None:
        super().__init__(instance)
        self._aborted: dict[tuple[str, int], DecodeJob] = {}
        """(request, attempt) -> jobs whose pages prefill may still write to."""
        self._waiting: list[DecodeJob] = []
        self._next_ask_s = float("-inf")

    # ------------------------------------------------------------ Machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        match event:
            case BlocksPushed():
                self._on_blocks_pushed(event)
            case KVReady():
                self._on_kv_ready(event, now)
            case PushEnded():
                self._on_push_ended(event)
            case StepResult():
                self._take(self.instance.on_step(event, now), now)
            case _:
                super().handle(event, now)

    def tick(self, now: float) -> float | None:
        self._end_orphans(now)
        self._admit_waiting(now)
        if self._waiting:
            self._admit_due(now)
        self._take(self.instance.engine.tick(now), now)
        return min(self._ask_again(now), self.instance.tick(now))

    @property
    def quiet(self) -> bool:
        return not self._jobs and not self._aborted and self.instance.quiet

    def check_integrity(self) -> None:
        super().check_integrity()
        for job in self._waiting:
            assert job.stage is Stage.WAITING, f"{job.request_id} waits in stage {job.stage}"
            assert not job.pages, f"{job.request_id} waits and holds pages"

    # ------------------------------------------------------------ taking a request in

    def _new_job(self, task: RequestTask) -> DecodeJob:
        return DecodeJob(self.instance.next_sequence_id(), task, self.instance.layout)

    def _begin(self, job: DecodeJob, _now: float) -> None:
        layout = self.instance.layout
        if not can_ever_fit(layout.num_blocks(job.num_task_tokens), self.instance.pool.num_blocks):
            message = f"{job.num_task_tokens} tokens do not fit the KV memory of a decode worker"
            self._fail(job, Failure.invalid(message))
        elif len(self._waiting) >= self.instance.config.max_reservations:
            self._fail(job, Failure.turned_away("the decode queue is full"))
        else:
            insort(self._waiting, job, key=rank)

    def _admit_waiting(self, now: float) -> None:
        """Start the jobs for which there is room, in order; `may_be_passed` has the exception."""
        passed: list[DecodeJob] = []
        reserved: set[int] | None = None
        for job in list(self._waiting):
            if reserved is None and not job.local:  # jobs that compute all here reserve nothing
                holders = (*self._jobs, *self._aborted.values())
                reserved = set[int]().union(*(each.reserved_pages for each in holders))
            if self._admit(job, now, reserved or set()):
                if reserved is not None:
                    reserved.update(job.pages)
                self._waiting.remove(job)
                for other in passed:
                    other.num_passed += 1
            elif len(passed) < MAX_WAITING_LOOKED_AT and self._may_be_passed(job):
                passed.append(job)
            else:
                return

    def _may_be_passed(self, job: DecodeJob) -> bool:
        instance, pool = self.instance, self.instance.pool
        return may_be_passed(
            instance.layout.num_blocks(job.num_task_tokens),
            pool.num_available,
            instance.reservations.num_resting,
            instance.engine.num_running,
            pool.num_blocks,
            job.num_passed,
        )

    def _admit(self, job: DecodeJob, now: float, reserved: Set[int] | None) -> bool:
        """Start a waiting job if there is room; return whether it was started. `reserved`: pages
        held for others that do not run. None: the job is due its pages and leaves none for others
        to grow into, because they may have more than their share.
        """
        instance, layout = self.instance, self.instance.layout
        if job.local:
            self._compute_here(job, now)
            return True
        matched = list(instance.pool.match(job.keys))
        num_new = layout.num_blocks(job.num_task_tokens) - len(matched)
        available = instance.pool.num_available
        if reserved is None:
            num_growing = 0
        elif may_reserve(
            num_new + len(set(matched) - reserved), len(reserved), instance.pool.num_blocks
        ):
            num_growing = instance.engine.num_running
        else:
            return False
        if not has_room(num_new + len(matched), available, num_growing):
            return False
        instance.pool.hold(matched)
        pages = instance.pool.allocate(num_new)
        job.grant = instance.reservations.open(pages) if pages is not None else None
        if pages is None or job.grant is None:
            instance.pool.release(matched + (pages or []))
            return False
        job.pages, job.num_matched, job.stage = matched + pages, len(matched), Stage.RESERVED
        if job.trace is not None:
            job.trace.waited("reserve", now)
        self._send_reserved(job, now)
        return True

    def _admit_due(self, now: float) -> None:
        """Start the first waiting job of each tenant and class that is below its share of the
        pages, if others run with more than their share. It does not wait until these end.
        """
        layout, engine = self.instance.layout, self.instance.engine
        tried: set[Flow] = set()
        outside = self._reserved()
        for job in list(self._waiting):
            flow = job.flow
            if flow in tried:
                continue
            tried.add(flow)
            room = engine.reclaim(flow, layout.num_blocks(job.num_task_tokens), outside)
            if room and self._admit(job, now, reserved=None):
                self._waiting.remove(job)
                outside[flow] += len(job.pages)

    def _reserved(self) -> Counter[Flow]:
        """Return how many pages each flow holds for requests that do not run yet, or not any
        more.
        """
        held: Counter[Flow] = Counter()
        for job in (*self._jobs, *self._aborted.values()):
            if job.reserved_pages:
                held[job.flow] += len(job.reserved_pages)
        return held

    def _send_reserved(self, job: DecodeJob, now: float) -> None:
        """Tell prefill where to push. A repeat changes nothing, except that prefill answers it with
        `PushEnded` when it is done with the request.
        """
        assert job.task.prefill is not None
        assert job.grant is not None
        job.asked_s = now
        self.instance.send(
            job.task.prefill,
            Reserved(
                request_id=job.request_id,
                attempt=job.attempt,
                decode=self.instance.worker,
                parts=self.instance.mover.parts(
                    job.pages[job.num_matched :], job.num_matched, job.grant
                ),
            ),
        )

    def _ask_again(self, now: float) -> float:
        """Ask prefill about pages that have been reserved for long, because its last message may
        have been lost. Returns when to ask again.
        """
        every_s = self.instance.config.ask_again_s
        if now >= self._next_ask_s:
            self._next_ask_s = now + every_s
            old: dict[WorkerRef, None] = {}
            for job in (*self._jobs, *self._aborted.values()):
                held = job.stage in (Stage.RESERVED, Stage.ABORTED)
                if held and now - job.asked_s >= every_s and job.task.prefill is not None:
                    self._send_reserved(job, now)
                    old[job.task.prefill] = None
            self.instance.membership.ask_about(list(old))
        return self._next_ask_s

    def _compute_here(self, job: DecodeJob, now: float) -> None:
        """Collect the cached prefix, then compute the rest in this engine."""
        job.stage = Stage.GATHERING
        if job.trace is not None:
            job.trace.since_s = now
        self._gather(job, job.sources, now)

    def _on_gathered(self, job: DecodeJob, pages: list[int], now: float) -> None:
        if self._jobs.get(job.request_id) is not job:
            self.instance.pool.release(pages)
            return
        job.take_kv(pages, len(pages) * self.instance.layout.block_tokens)
        self._run(job, now)

    def _on_kv_ready(self, message: KVReady, now: float) -> None:
        if self._release_aborted(message.request_id, message.attempt):
            return
        job = self._jobs.find(message.request_id, message.attempt)
        if job is None or job.local or job.stage not in (Stage.WAITING, Stage.RESERVED):
            return
        job.take_sampled(message.token)
        if job.trace is not None:
            job.trace.pass_on(message.spans)
        if not message.pushed:
            self._unreserve(job)
            job.local, job.sources = True, message.sources
            if job.stage is Stage.RESERVED:
                self._compute_here(job, now)
            return
        job.stage = Stage.COMPARING
        self._end_reservation(job)
        self._compare(job, range(job.num_matched, len(job.pages)), message.checksums)
        self._join(job, now)

    # ------------------------------------------------------------ comparing what was pushed

    def _on_blocks_pushed(self, message: BlocksPushed) -> None:
        job = self._jobs.find(message.request_id, message.attempt)
        if job is not None and job.stage is Stage.RESERVED:
            own = range(job.num_matched, len(job.pages))
            if all(index in own for index in message.indexes):
                self._compare(job, message.indexes, message.checksums)

    def _compare(self, job: DecodeJob, indexes: Iterable[int], checksums: list[int]) -> None:
        """Hash the blocks that prefill pushed, if it sent checksums."""
        if not self.instance.checksums.can_hash:
            return
        asked = job.comparison.ask(list(indexes), checksums)
        if not asked:
            return

        def hashed(found: list[int], at: float) -> None:
            job.comparison.found(asked, found)
            self._join(job, at)

        self.instance.checksums.start([job.pages[index] for index in asked], hashed)

    def _join(self, job: DecodeJob, now: float) -> None:
        """Run a request whose KV has come, once all of it has been compared. From the first block
        that differs from what was sent, compute it here.
        """
        if job.stage is not Stage.COMPARING or job.comparison.open:
            return
        wrong = job.comparison.wrong
        self.instance.count("blocks_pushed_compared", job.comparison.num_compared)
        self.instance.count("blocks_pushed_corrupt", len(wrong))
        num_right = min(wrong, default=len(job.pages))
        for key, page in zip(job.keys, job.pages[:num_right], strict=False):
            self.instance.pool.publish(key, page)
        if wrong:
            self._unreserve(job)
            job.local = True
            self._compute_here(job, now)
            return
        job.num_blocks_put = job.first_own = job.num_counted = len(job.keys)
        job.num_computed = job.num_task_tokens
        self._run(job, now)

    def _run(self, job: DecodeJob, now: float) -> None:
        """Have the engine generate the rest of the request, whose pages hold what is computed."""
        job.num_given = job.num_tokens
        if not self.instance.engine.add(job, now):
            self.instance.pool.release(job.drop_kv())
            self._fail(job, Failure.turned_away("the decode batch queue is full"))
            return
        job.stage = Stage.RUNNING
        if job.trace is not None and not job.local:
            job.trace.since_s = now

    # ------------------------------------------------------------ generating

    def _take(self, outputs: list[Made], now: float) -> None:
        """Send tokens and ends to the gateways, put full blocks into the pool, and drop ended
        jobs.
        """
        for sequence, output in outputs:
            job = self._jobs.of_sequence(sequence)
            assert job is not None, "a sequence without a job"
            if output.finish is None or output.finish.failure is None:
                self._write_through(job, now, ended=output.finish is not None)
            self._send_output(job, output, now)
            if output.finish is not None:
                self.instance.engine.release(job)
                self._jobs.remove(job)

    def _send_output(self, job: DecodeJob, output: RequestOutput, now: float) -> None:
        cached = job.num_cached_tokens
        first = job.local and output.start == len(job.task.output_tokens)
        if first and output.tokens:
            self.instance.count("prompt_tokens", job.num_task_tokens)
            self.instance.count("prompt_tokens_cached", cached)
        if job.trace is not None:
            if first and output.tokens:
                job.trace.computed(job, now)
            if output.finish is not None:
                job.trace.decoded(job, job.num_tokens - job.num_given, now)
        made = job.output(output, cached if first else None)
        self.instance.queue_output(job.task.gateway, made)

    def _write_through(self, job: DecodeJob, now: float, *, ended: bool) -> None:
        """Put the blocks that have become full into this node's pool. If the answer has `ended`,
        tell the pool whether to keep it.
        """
        num_full = job.num_computed // self.instance.layout.block_tokens
        keeps_answer = ended and job.keeps_answer
        is_new = num_full > job.num_blocks_put
        if not (is_new or keeps_answer) or self.instance.kvstore is None:
            return
        num_cached = job.num_cached_tokens // self.instance.layout.block_tokens
        indexes = range(max(job.num_blocks_put, num_cached), num_full)
        before = job.keys[job.first_own : indexes.start]
        head = job.chain_head(
            before, job.num_counted - job.first_own, job.first_own,
            job.num_computed if keeps_answer else 0,
        )  # fmt: skip
        job.num_blocks_put = job.num_counted = num_full
        if not indexes:
            self.instance.report_use(head)
            return
        push = self.instance.open_push()  # one for these blocks alone: it holds them only briefly
        for index in indexes:
            push.add_block(index, job.pages[index])
        push.advance(indexes, self.instance.layout.num_layers, now)
        blocks = {job.keys[index]: index for index in indexes}
        tenant = job.request.tenant
        self.instance.put(push, blocks, tenant, lambda at: self.instance.close_push(push, at), head)

    # ------------------------------------------------------------ endings

    def _end(self, job: DecodeJob, now: float) -> None:
        """End a job. Pages that prefill may write to are kept until it has stopped."""
        self._jobs.remove(job)
        match job.stage:
            case Stage.WAITING:
                self._waiting.remove(job)
            case Stage.RESERVED:
                job.stage = Stage.ABORTED
                self._aborted[job.request_id, job.attempt] = job
            case Stage.COMPARING:
                job.stage = Stage.ABORTED
                self._unreserve(job)
            case Stage.GATHERING:
                assert job.reuse is not None
                job.reuse.cancel(now)
            case Stage.RUNNING:
                self.instance.engine.abort(job.sequence_id)
            case Stage.ABORTED:
                raise AssertionError("an aborted job is not in the table")

    def _fail(self, job: DecodeJob, failure: Failure) -> None:
        """Report a failure of a job that holds no pages, and drop it."""
        self._jobs.remove(job)
        self.instance.fail(job.task, failure)

    def _end_reservation(self, job: DecodeJob) -> None:
        """Let nobody write to the pages of a job any more: prefill has said that it does not."""
        if job.grant is not None:
            self.instance.reservations.end(job.grant)
            job.grant = None

    def _unreserve(self, job: DecodeJob) -> None:
        self._end_reservation(job)
        pages, job.pages = job.pages, []
        if pages:
            self.instance.pool.release(pages)

    def _release_aborted(self, request_id: str, attempt: int) -> bool:
        job = self._aborted.pop((request_id, attempt), None)
        if job is not None:
            self._unreserve(job)
        return job is not None

    def _on_push_ended(self, message: PushEnded) -> None:
        if self._release_aborted(message.request_id, message.attempt):
            return
        job = self._jobs.find(message.request_id, message.attempt)
        if job is None or job.stage is not Stage.RESERVED:
            return
        self._unreserve(job)
        self._jobs.remove(job)
        if message.failed:
            self._fail(job, Failure.unavailable("the prefill worker does not know this request"))

    def _on_peer_lost(self, worker: WorkerRef, now: float) -> None:
        """Fail the jobs that waited for a lost prefill worker. Their pages come back as soon as it
        cannot write to them any more.
        """
        for job in [j for j in self._jobs if j.task.prefill == worker]:
            if job.stage in (Stage.WAITING, Stage.RESERVED) and not job.local:
                if job.stage is Stage.WAITING:
                    self._waiting.remove(job)
                self._rest(job, now)
                self._fail(job, Failure.unavailable("the prefill worker was lost"))
        for key in [k for k, j in self._aborted.items() if j.task.prefill == worker]:
            self._rest(self._aborted.pop(key), now)

    def _rest(self, job: DecodeJob, now: float) -> None:
        pages, job.pages = job.pages, []
        if job.grant is not None:
            self.instance.reservations.fence(job.grant, pages, now)
            job.grant = None
