"""The prefill worker: a state machine that turns `PrefillTask`s into KV on decode's pages and one
first token.

Queues: tasks wait in the engine's waiting queue (bounded there; a full one turns it away);
reservations that overtook their task wait in `_early` (bounded by `MAX_EARLY`, answered with
`PushEnded` when it takes too long).
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from mooncake.base.blocks import block_keys
from mooncake.base.messages import (
    AbortTask,
    BlockSource,
    ChainHead,
    FinishInfo,
    KVReady,
    PeerLost,
    PrefillTask,
    PushEnded,
    RequestOutput,
    Reserved,
    Role,
    Welcome,
    WorkerRef,
    is_former,
)
from mooncake.base.request import Failure
from mooncake.engine.plan import LayerDone, StepResult
from mooncake.engine.sequence import Sequence, SequenceOutput, request_finish
from mooncake.instance import Destination, Instance, PrefixReuse
from mooncake.prefill.task import PrefillJob, Stage

MAX_EARLY = 1024
MAX_REMEMBERED = 4096
EARLY_S = 10.0


class PrefillWorker:
    """The prefill role of one instance (see `base.machine.Machine`)."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self._jobs: dict[str, PrefillJob] = {}
        self._by_sequence: dict[int, PrefillJob] = {}
        self._settling: list[PrefillJob] = []
        self._early: OrderedDict[tuple[str, int], tuple[float, Reserved]] = OrderedDict()
        self._gateways: dict[str, WorkerRef] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()
        """request -> last attempt that is over here, so that a late reservation is answered."""

    # ------------------------------------------------------------ Machine

    def handle(self, event: msgspec.Struct, now: float) -> None:
        match event:
            case PrefillTask():
                self._on_task(event, now)
            case Reserved():
                self._on_reserved(event, now)
            case AbortTask():
                job = self._jobs.get(event.request_id)
                if job is not None and job.attempt <= event.attempt:
                    self._end(job, now)
                self._remember(event.request_id, event.attempt)
            case LayerDone():
                self._advance(event.step_id, event.layer + 1, now)
            case StepResult():
                self._on_step(event, now)
            case PeerLost():
                self.instance.handle(event, now)
                for job in [j for j in self._jobs.values() if j.order.decode == event.worker]:
                    self._end(job, now)
            case Welcome():
                self.instance.handle(event, now)
                self._on_gateway(event.gateway, now)
            case _:
                self.instance.handle(event, now)

    def tick(self, now: float) -> float | None:
        for gateway in self.instance.lost_gateways():
            for job in [j for j in self._jobs.values() if j.order.gateway == gateway]:
                self._fail(job, Failure.unavailable("its gateway was taken for dead"), now)
        for job in [j for j in self._jobs.values() if j.stage is Stage.PUSHING]:
            if job.decode is None and now - job.sampled_s >= self.instance.config.hold_s:
                self._hand_over_by_pool(job, now)
        while self._early:
            early_s, reserved = next(iter(self._early.values()))
            if now - early_s < EARLY_S:
                break
            self._early.popitem(last=False)
            self._push_ended(reserved.decode, reserved.request_id, reserved.attempt, failed=True)
        self._take(self.instance.start_steps(now), now)
        return self.instance.tick(now)

    @property
    def next_role(self) -> Role | None:
        """What to come back as, now that nothing is in progress here any more; None: go on."""
        role = self.instance.next_role
        return role if role is not None and self.quiet else None

    @property
    def quiet(self) -> bool:
        """Nothing is in progress here."""
        return not self._jobs and not self._settling and self.instance.quiet

    def check_integrity(self) -> None:
        self.instance.check_integrity(role_quiet=self.quiet)
        for sequence_id, job in self._by_sequence.items():
            assert job.sequence is not None, f"job of sequence {sequence_id} has no sequence"
        assert len(self._early) <= MAX_EARLY, "more early reservations than allowed"

    def _on_gateway(self, gateway: WorkerRef, now: float) -> None:
        """Requests of this gateway's former life have nobody to answer to."""
        for job in [j for j in self._jobs.values() if is_former(j.order.gateway, gateway)]:
            self._end(job, now)
        if is_former(self._gateways.get(gateway.worker_id, gateway), gateway):
            self._ended.clear()  # the new one numbers its attempts anew
        self._gateways[gateway.worker_id] = gateway

    # ------------------------------------------------------------ from task to engine

    def _on_task(self, order: PrefillTask, now: float) -> None:
        known = self._jobs.get(order.request.request_id)
        if known is not None:
            if known.attempt >= order.attempt:
                return
            self._end(known, now)
        if self._ended.get(order.request.request_id, -1) >= order.attempt:
            return
        instance, request = self.instance, order.request
        tokens = request.tokens_with(order.output_tokens)
        layout = instance.layout
        keys = block_keys(
            layout.fingerprint, tokens, layout.block_tokens, request.tenant, request.cache_salt
        )
        instance.engine.prepare(request)
        job = PrefillJob(order, keys, instance.open_push())
        self._jobs[job.request_id] = job
        if instance.draining:
            self._fail(job, Failure.turned_away("this prefill worker is shutting down"), now)
            return
        reusable = keys[: (len(tokens) - 1) // layout.block_tokens]
        if request.sampling.num_prompt_logprobs is not None:
            reusable = []  # every prompt token's logits are wanted

        def gathered(pages: list[int], at: float) -> None:
            self._on_gathered(job, pages, at)

        job.reuse = PrefixReuse(instance.pool, instance.fetcher, reusable, order.sources, gathered)
        job.reuse.start(now)

    def _on_gathered(self, job: PrefillJob, pages: list[int], now: float) -> None:
        instance, reuse, job.reuse = self.instance, job.reuse, None
        if reuse is not None:
            job.num_counted = reuse.num_counted(instance.kvstore)
        if job.ended:
            instance.pool.release(pages)
            self._close(job, now)
            return
        order = job.order
        num_cached = len(pages) * instance.layout.block_tokens
        sequence = Sequence(
            sequence_id=instance.next_sequence_id(),
            request=order.request,
            attempt=order.attempt,
            turn=order.turn,
            output_tokens=list(order.output_tokens),
            max_new_tokens=len(order.output_tokens) + 1,
            pages=pages,
            num_computed=num_cached,
            num_cached_tokens=num_cached,
            report_layers=True,
        )
        if not instance.engine.add(sequence, now):
            instance.pool.release(pages)
            self._fail(job, Failure.turned_away("the prefill queue is full"), now)
            return
        job.sequence, job.stage = sequence, Stage.COMPUTING
        self._by_sequence[sequence.sequence_id] = job
        early = self._early.pop((job.request_id, job.attempt), None)
        if early is not None:
            self._on_reserved(early[1], now)

    def _on_reserved(self, message: Reserved, now: float) -> None:
        job = self._jobs.get(message.request_id)
        over = self._ended.get(message.request_id, -1)
        if message.attempt <= over or (job is not None and message.attempt < job.attempt):
            self._push_ended(message.decode, message.request_id, message.attempt, failed=False)
            return
        if job is None or job.attempt != message.attempt or job.stage is Stage.GATHERING:
            name = (message.request_id, message.attempt)
            first_s, _ = self._early.get(name, (now, message))  # asked again: patience goes on
            self._early[name] = (first_s, message)
            if len(self._early) > MAX_EARLY:
                _, (_, oldest) = self._early.popitem(last=False)
                self._push_ended(oldest.decode, oldest.request_id, oldest.attempt, failed=True)
            return
        if job.decode is not None:
            return

        def progress(_destination: Destination, _whole: list[int], at: float) -> None:
            self._settle(job, at)

        job.decode = job.push.add_destination(message.places, message.indexes, progress, now)
        self._settle(job, now)

    # ------------------------------------------------------------ from engine to decode

    def _advance(self, step_id: int, num_layers: int, now: float) -> None:
        """The first `num_layers` layers of this step lie in the pages: push the blocks it makes
        final.
        """
        block_tokens = self.instance.layout.block_tokens
        for slot in self.instance.engine.step(step_id).plan.slots:
            job = self._by_sequence.get(slot.sequence_id)
            if job is None:
                continue
            self._take_cached(job, slot.pages, slot.start // block_tokens, now)
            end = slot.start + len(slot.tokens)
            last = end if end == job.num_tokens else end - end % block_tokens
            indexes = range(slot.start // block_tokens, -(-last // block_tokens))
            for index in indexes:
                job.push.add_block(index, slot.pages[index])
            job.num_final = max(job.num_final, last // block_tokens)
            job.push.advance(indexes, num_layers, now)

    def _take_cached(self, job: PrefillJob, pages: list[int], num_cached: int, now: float) -> None:
        """Blocks before the step that this job did not compute come from a cache: push them whole,
        and put only what follows them into the pool, and what is hot.
        """
        cached = range(job.num_final, num_cached)
        for index in cached:
            job.push.add_block(index, pages[index])
        job.push.advance(cached, self.instance.layout.num_layers, now)
        job.num_final = max(job.num_final, num_cached)
        if not job.put_asked:
            job.put_asked = True
            hot = range(min(job.order.num_replicate_blocks, num_cached))
            own = range(num_cached, len(job.keys))
            new = {job.keys[index]: index for index in (*hot, *own)}
            tenant = job.order.request.tenant
            head = ChainHead(job.keys[:num_cached], job.num_counted)
            self.instance.put(job.push, new, tenant, lambda at: self._settle(job, at), head)
            if not new:
                self.instance.tell_used(head)

    def _on_step(self, result: StepResult, now: float) -> None:
        if result.error is None:
            self._advance(result.step_id, self.instance.layout.num_layers, now)
        self._take(self.instance.on_step(result, now), now)

    def _take(self, outputs: list[SequenceOutput], now: float) -> None:
        """Every output is an end here: a sequence wants just one token."""
        for output in outputs:
            self.instance.engine.release(output.sequence)
            job = self._by_sequence.pop(output.sequence.sequence_id)
            if output.token is None:
                assert output.failure is not None
                self._fail(job, output.failure, now)
            else:
                self._on_sampled(job, output, output.token, now)

    def _on_sampled(self, job: PrefillJob, output: SequenceOutput, token: int, now: float) -> None:
        position = len(job.order.output_tokens)
        reason, stop_token_id = request_finish(
            job.order.request,
            output.sequence.output_tokens,
            self.instance.engine.config.max_model_len,
        )
        finish = FinishInfo(reason=reason, stop_token_id=stop_token_id) if reason else None
        job.num_cached_tokens = output.sequence.num_cached_tokens
        self.instance.count("prompt_tokens", job.num_tokens)
        self.instance.count("prompt_tokens_cached", job.num_cached_tokens)
        self.instance.say(
            job.order.gateway,
            RequestOutput(
                request_id=job.request_id,
                attempt=job.attempt,
                start=position,
                tokens=[token],
                logprobs=[output.logprobs] if output.logprobs is not None else None,
                prompt_logprobs=output.prompt_logprobs,
                num_cached_tokens=job.num_cached_tokens,
                finish=finish,
            ),
        )
        job.token, job.sampled_s, job.stage = token, now, Stage.PUSHING
        if finish is not None:
            self._leave(job)
        self._settle(job, now)

    def _settle(self, job: PrefillJob, now: float) -> None:
        """Go on where a push or put has got further."""
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
            assert job.token is not None
            self.instance.send(
                job.order.decode,
                KVReady(
                    request_id=job.request_id,
                    attempt=job.attempt,
                    prefill=self.instance.worker,
                    token=job.token,
                    num_cached_tokens=job.num_cached_tokens,
                ),
            )
            job.handed_over = True
            self._leave(job)
        if job.stage is Stage.SETTLING and not self.instance.write_through.is_open(job.push):
            self._end(job, now)

    def _hand_over_by_pool(self, job: PrefillJob, now: float) -> None:
        """Decode had no room in time: keep the blocks in the pool only."""
        assert job.token is not None
        store = self.instance.kvstore
        sources = (
            [BlockSource(store=store, first=0, stop=len(job.keys))] if store and job.keys else []
        )
        self.instance.count("handed_over_by_pool")
        self.instance.send(
            job.order.decode,
            KVReady(
                request_id=job.request_id,
                attempt=job.attempt,
                prefill=self.instance.worker,
                token=job.token,
                num_cached_tokens=job.num_cached_tokens,
                pushed=False,
                sources=sources,
            ),
        )
        job.handed_over = True
        self._leave(job)
        self._settle(job, now)

    # ------------------------------------------------------------ endings

    def _leave(self, job: PrefillJob) -> None:
        """The request needs no more of us; only the pool's copy is still being written."""
        job.stage = Stage.SETTLING
        self._settling.append(job)
        self._forget(job)

    def _fail(self, job: PrefillJob, failure: Failure, now: float) -> None:
        start = len(job.order.output_tokens)
        self.instance.fail(job.order.gateway, job.request_id, job.attempt, failure, start)
        self._end(job, now)

    def _end(self, job: PrefillJob, now: float) -> None:
        """Stop whatever runs for this job and free what it holds."""
        if job.ended:
            return
        job.ended = True
        self._forget(job)
        if job.sequence is not None and job.sequence.sequence_id in self._by_sequence:
            del self._by_sequence[job.sequence.sequence_id]
            self.instance.engine.abort(job.sequence.sequence_id)
        if job.reuse is not None:
            job.reuse.cancel(now)  # ends in _on_gathered, which closes
        else:
            self._close(job, now)

    def _close(self, job: PrefillJob, now: float) -> None:
        def released(_at: float) -> None:
            if job in self._settling:
                self._settling.remove(job)
            if not job.handed_over:
                self._push_ended(job.order.decode, job.request_id, job.attempt, failed=False)

        self.instance.close_push(job.push, now, released)

    def _forget(self, job: PrefillJob) -> None:
        if self._jobs.get(job.request_id) is job:
            del self._jobs[job.request_id]
        self._remember(job.request_id, job.attempt)

    def _remember(self, request_id: str, attempt: int) -> None:
        self._ended[request_id] = max(attempt, self._ended.get(request_id, -1))
        self._ended.move_to_end(request_id)
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def _push_ended(
        self, decode: WorkerRef, request_id: str, attempt: int, *, failed: bool
    ) -> None:
        self.instance.send(
            decode,
            PushEnded(
                request_id=request_id,
                attempt=attempt,
                prefill=self.instance.worker,
                failed=failed,
            ),
        )
