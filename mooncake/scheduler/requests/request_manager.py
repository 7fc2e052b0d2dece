"""The request manager takes every accepted request from its permit to its one final event, even
when workers fail.

Owns the request records, permits, pending queue and deadlines; used by the gateway alone. The
membership table knows which workers are alive, the Conductor decides where a request goes. No text
in here.

    submit ─► permit ─► place ──► tasks sent ─► tokens in order ─► final event
                │         │ ▲                        │
              refused   refused └── pending queue ◄──┘ worker lost, full, failed or stalled

A request is pending when its worker was lost or full. Batch work is pending until capacity is idle,
or until others have computed so much that it is due. Batch work that fills idle capacity yields: if
another request finds no room on decode, the batch request goes back to the pending queue and keeps
its tokens so far.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection

from mooncake.base import (
    AbortTask,
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    MooncakeError,
    Overloaded,
    Priority,
    RequestOutput,
    RequestState,
    RequestTimeout,
    Role,
    Sink,
    Unavailable,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.request import FinishInfo, request_finish
from mooncake.engine.cost import StepCostModel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import QueuePosition, Turns
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.admission import (
    NO_WORKER,
    NOT_IDLE,
    OWN_LIMIT_REASONS,
    YIELDING_REASONS,
    Placement,
    Rejection,
    not_idle,
    reject,
    spread_retry,
    weights_changed,
)
from mooncake.scheduler.placement.block_feed import BlockFeed
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.attempt_tracker import AttemptTracker, GatewayPorts
from mooncake.scheduler.requests.output_delivery import Deadlines, OutputDelivery
from mooncake.scheduler.requests.permits import AdmissionPermits, PendingQueue
from mooncake.scheduler.requests.read_ahead import ReadAhead
from mooncake.scheduler.requests.record import RequestRecord
from mooncake.scheduler.scaling.policy import DemandMeter
from mooncake.telemetry.events import (
    Accepted,
    Refused,
    Requeued,
    Worked,
)

SCAN_STALLED_S = 1.0
RETRY_FULL_S = 1.0
"""A worker that has refused a request twice is tried again for it after this time at the
earliest.
"""
MAX_YIELDING = 8
"""At most this many batch requests yield to one new request."""

NOT_RETRIED = frozenset({400, 401, 403, 404, 413, 422})
"""HTTP statuses of failures that another worker would repeat."""

logger = logging.getLogger(__name__)


class RequestManager:
    """Owns the accepted requests of one gateway, from permit to final event."""

    def __init__(
        self,
        config: SchedulerConfig,
        ports: GatewayPorts,
        conductor: Conductor,
        membership: MembershipTable,
        turns: Turns | None = None,
    ) -> None:
        self._config = config
        self._ports = ports
        self._conductor = conductor
        self._membership = membership
        self._permits = AdmissionPermits(config.max_inflight, turns)
        self._requests: dict[str, RequestRecord] = {}
        self._attempts = AttemptTracker(ports, membership)
        self._read_ahead = ReadAhead(config, ports.worker, ports.channel, conductor)
        self._pending = PendingQueue(config.max_queue, self._read_ahead)
        self._delivery = OutputDelivery(config, ports.recorder)
        self._deadlines: Deadlines[str] = Deadlines()
        self._next_scan_s = 0.0
        self.demand = DemandMeter()
        """What clients ask for."""
        self.counters: Counter[str] = Counter()
        self.feed: BlockFeed | None = None
        """Is told the tokens of all requests, if somebody outside follows blocks."""

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_decoding(self) -> int:
        """The number of requests that decode, without batch work."""
        return sum(
            record.state is RequestState.DECODING and record.request.priority is not Priority.BATCH
            for record in self._requests.values()
        )

    def states(self) -> dict[str, int]:
        """Return the number of requests in each state."""
        return dict(Counter(record.state.value for record in self._requests.values()))

    @property
    def has_waiting_batch(self) -> bool:
        """True if work of the class batch waits until capacity is idle."""
        return self._pending.has_batch

    # ---------------------------------------------------------- coming and going

    def submit(self, request: GenerateRequest, sink: Sink, now: float) -> None:
        """Accept a request, or refuse it with a final event (REJECTED) before this returns."""
        queue_position = self._acquire_permit(request, now)
        if isinstance(queue_position, Rejection):
            self.refuse(request, queue_position, sink, now)
            return
        record = RequestRecord(
            request=request,
            sink=sink,
            accepted_s=now,
            queue_position=queue_position,
        )
        may_wait = request.priority is Priority.BATCH
        goes_behind = may_wait and self._pending.has_batch
        result = not_idle() if goes_behind else self._place(record, now)
        self._count_demand(request, result)
        if isinstance(result, Rejection) and not (may_wait and self._comes_later(result)):
            self._permits.cancel(request)
            self.refuse(request, result, sink, now)
            return
        self._permits.confirm(request, queue_position)
        self._requests[request.request_id] = record
        self.counters["requests_accepted"] += 1
        if request.timeout_s is not None:
            self._deadlines.add(request.request_id, now + request.timeout_s)
        self._ports.recorder.record(
            Accepted(
                request_id=request.request_id,
                at_s=now,
                num_prompt_tokens=len(request.prompt_tokens),
                max_tokens=request.sampling.max_tokens,
                tenant=request.tenant,
                ttft_slo_s=self._config.ttft_limit_s(request),
                tbt_slo_s=self._config.tbt_limit_s(request),
            )
        )
        if isinstance(result, Placement):
            self._attempts.begin(record, result, now)
        else:
            self._pending.add(record, now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request because its client asked for it. Unknown and ended ones are ignored."""
        record = self._requests.get(request_id)
        if record is not None:
            self._finish(record, FinishReason.ABORT, now)

    def end_all(self, now: float) -> None:
        """End all requests, because an operator wants none to run."""
        for record in list(self._requests.values()):
            if record.state is not RequestState.FINISHED:
                text = "An operator has ended all requests. Retry it later."
                self._fail(record, Unavailable, text, now)

    def worker_lost(self, worker_id: str, now: float, *, blameless: bool = False) -> None:
        """Place again the requests that needed this worker. The membership table and the Conductor
        have removed it already. `blameless`: the worker ended because another one did, so this does
        not count as a failure of the requests.
        """
        for request_id in self._attempts.remove_worker(worker_id):
            record = self._requests.get(request_id)
            if record is not None and record.needs(worker_id):
                record.num_paused += blameless
                self._requeue(record, f"worker {worker_id} was lost", now)

    def move_requests_from(self, worker_id: str, now: float, *, kept_only: bool = False) -> None:
        """Place the requests that need this live but draining worker on other workers. `kept_only`:
        move only those that it decodes, if their KV can be fetched (from pools or this worker) and
        others have room, so that a move is a short pause.
        """
        for request_id in self._attempts.requests_on(worker_id):
            record = self._requests.get(request_id)
            if record is None or not record.needs(worker_id):
                continue
            if kept_only and not self._is_kept(record):
                continue
            self._requeue(record, f"worker {worker_id} leaves", now, blameless=True)
            if kept_only and (record.placement is None or record.placement.must_wait):
                return

    def is_needed(self, worker_id: str) -> bool:
        """Return whether a request cannot continue without this worker, or continues with blocks
        from it.
        """
        return any(
            record.needs(worker_id) or record.goes_on_from(worker_id)
            for record in self._requests.values()
        )

    def _is_kept(self, record: RequestRecord) -> bool:
        """Return whether another worker could continue a request and recompute only its last block,
        which is not full.
        """
        keys = record.block_keys(self._conductor.layout)
        return record.decode_joined and self._conductor.num_fetchable(keys) == len(keys)

    def worker_joined(self, hello: WorkerHello, now: float) -> None:
        """Try the pending requests, because the new worker may have room for them. Then let it read
        ahead for those to come.
        """
        if len(self._pending):
            self._place_pending(now)
        self._read_ahead.welcome(hello)

    def tick(self, now: float) -> float | None:
        """Handle deadlines, pending requests and stalled attempts. Returns when to call again."""
        while (request_id := self._deadlines.pop_due(now)) is not None:
            self._expire(request_id, now)
        if len(self._pending) and now >= self._pending.next_retry_s:
            self._place_pending(now)
        if self._requests and now >= self._next_scan_s:
            self._next_scan_s = now + SCAN_STALLED_S
            self._scan_stalled(now)
        times = [self._deadlines.next_s, self._delivery.tick(now)]
        wakes = [at_s for at_s in times if at_s is not None]
        if len(self._pending):
            wakes.append(self._pending.next_retry_s)
        if self._requests:
            wakes.append(self._next_scan_s)
        return min(wakes, default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when permits, requests, queues and bookings disagree."""
        self._permits.check_integrity([r.request for r in self._requests.values()])
        self._pending.check_integrity()
        for name, record in self._requests.items():
            waits = name in self._pending
            assert record.state is not RequestState.FINISHED, "an ended request was kept"
            assert (record.state is RequestState.QUEUED) == waits
            assert (record.placement is None) == waits
            assert 0 <= record.num_failed <= self._config.max_attempts
        assert set(self._pending) <= set(self._requests), "an unknown request waits"
        self._conductor.check_integrity(self._attempts.check_integrity(self._requests.values()))

    # --------------------------------------------------------------- placing

    def _acquire_permit(self, request: GenerateRequest, now: float) -> QueuePosition | Rejection:
        if request.request_id in self._requests:
            return reject(
                InvalidRequest, "duplicate_id", f"The request id {request.request_id} is in use."
            )
        return self._permits.acquire(request, now)

    def _comes_later(self, rejection: Rejection) -> bool:
        """Return whether batch work waits for what it lacks: idle capacity, or the first worker of
        a cluster that has none while nothing is asked for.
        """
        if rejection.reason == NO_WORKER:
            return self._config.may_be_zero(Role.DECODE)
        return rejection.reason == NOT_IDLE

    def _count_demand(self, request: GenerateRequest, result: Placement | Rejection) -> None:
        """Count what a new request asks of the cluster. Batch work does not count, because it
        waits for idle capacity; nor does a request that more replicas could not serve either, or
        that only its own limits refuse.
        """
        if request.priority is Priority.BATCH:
            return
        if isinstance(result, Rejection) and (
            result.permanent or result.reason in OWN_LIMIT_REASONS
        ):
            return
        computes = self._conductor.computes
        self.demand.offer(
            len(request.prompt_tokens),
            result.num_cached_tokens if isinstance(result, Placement) else None,
            self._conductor.expected_output_tokens(request),
            computes.cost if computes is not None else StepCostModel(),
            computes.hello.max_batched_tokens if computes is not None else 0,
        )

    def refuse(
        self, request: GenerateRequest, rejection: Rejection, sink: Sink, now: float
    ) -> None:
        """Count and record a refusal, and send the client its final event."""
        self.counters["requests_refused"] += 1
        self.counters[f"refused_{rejection.reason}"] += 1
        self._ports.recorder.record(
            Refused(
                request_id=request.request_id,
                at_s=now,
                status=rejection.status,
                reason=rejection.reason,
                facts=rejection.facts,
                ttft_slo_s=self._config.ttft_limit_s(request),
                tbt_slo_s=self._config.tbt_limit_s(request),
            )
        )
        sink(
            FinalEvent(
                request_id=request.request_id,
                reason=FinishReason.REJECTED,
                num_prompt_tokens=len(request.prompt_tokens),
                num_output_tokens=0,
                failure=spread_retry(rejection, self._ports.ids).failure(),
            )
        )

    def _place(self, record: RequestRecord, now: float) -> Placement | Rejection:
        """Choose workers for a request. If decode has no room for it, batch requests yield."""
        result = self._choose(record, now)
        if record.request.priority is Priority.BATCH:
            return result
        for _ in range(MAX_YIELDING):
            yielding = self._find_yielding(result)
            if yielding is None:
                break
            if isinstance(result, Placement):
                self._conductor.release(record.request_id)
            self._end_attempt(yielding, "it yields to others", now)
            yielding.num_paused += 1
            self._pending.add(yielding, now)
            self.counters["batch_yielded"] += 1
            result = self._choose(record, now)
        return result

    def _choose(self, record: RequestRecord, now: float) -> Placement | Rejection:
        layout = self._conductor.layout
        if layout is not None and layout != record.placed_layout:
            if record.num_output_tokens:
                return (
                    weights_changed()
                )  # no answer is begun with some weights and ended with others
            record.placed_layout = layout
        self._learn_blocks(record)
        return self._conductor.place(
            record.request,
            record.block_keys(self._conductor.layout),
            record.num_output_tokens,
            now,
            record.exclude if record.num_attempts else None,
            record.queue_position,
        )

    def _learn_blocks(self, record: RequestRecord) -> None:
        layout = self._conductor.layout
        if self.feed is not None and layout is not None:
            keys, request = record.block_keys(layout), record.request
            self.feed.learn(keys, lambda: request.tokens_with(record.tokens), layout.block_tokens)

    def _find_yielding(self, result: Placement | Rejection) -> RequestRecord | None:
        """Return the batch request that was placed last among those in the way, or None."""
        if isinstance(result, Placement):
            return self._attempts.latest_patient(result.decode) if result.must_wait else None
        return self._attempts.latest_patient(None) if result.reason in YIELDING_REASONS else None

    def _end_attempt(
        self, record: RequestRecord, reason: str, now: float, failed_on: str | None = None
    ) -> None:
        """End an attempt; the request is placed nowhere afterwards."""
        logger.info("request %s, attempt %d: %s", record.request_id, record.attempt, reason)
        done = () if failed_on is None else (failed_on,)
        self._attempts.end(record, done, failed=True)
        self._conductor.release(record.request_id)
        record.move(RequestState.QUEUED)
        self._ports.recorder.record(
            Requeued(
                request_id=record.request_id,
                at_s=now,
                attempt=record.attempt,
                reason=reason,
                num_output_tokens=record.num_output_tokens,
            )
        )

    def _requeue(
        self,
        record: RequestRecord,
        reason: str,
        now: float,
        failed_on: str | None = None,
        *,
        blameless: bool = False,
    ) -> None:
        """Handle a lost attempt: place the request again, make it pending, or fail it."""
        self._end_attempt(record, reason, now, failed_on)
        if failed_on is not None:
            record.exclude.add(failed_on)
        record.num_paused += blameless
        self.counters["requests_moved" if blameless else "attempts_lost"] += 1
        if self._finish_if_ended(record, now):
            return
        if record.num_failed >= self._config.max_attempts:
            tries = record.num_failed
            text = f"The request failed {tries} times; the last time {reason}. Retry it."
            self._fail(record, Unavailable, text, now)
            return
        result = self._place(record, now)
        if isinstance(result, Placement):
            self._attempts.begin(record, result, now)
        elif result.permanent:
            self._finish(record, FinishReason.ERROR, now, failure=result.failure())
        else:
            self._wait(record, reason, now)

    def _on_turned_away(
        self, record: RequestRecord, reason: str, now: float, worker_id: str
    ) -> None:
        """Make a request pending whose worker is full. This does not count as a failure."""
        self._end_attempt(record, reason, now, worker_id)
        record.num_paused += 1
        if worker_id in record.exclude:
            record.retry_s = now + RETRY_FULL_S
        record.exclude.add(worker_id)
        self.counters["requests_turned_away"] += 1
        self._wait(record, reason, now)

    def _wait(self, record: RequestRecord, reason: str, now: float) -> None:
        if self._pending.add(record, now):
            record.wait_until_s = now + self._config.replace_wait_s
        else:
            text = f"Too many requests wait for a worker to take over ({reason}). Retry later."
            self._fail(record, Unavailable, text, now)

    def _place_pending(self, now: float) -> None:
        """Try each pending request once, in order of turns; of batch work, as much as fits."""
        self._pending.on_retried(now)
        batch_waits = False
        for request_id in list(self._pending):
            record = self._requests.get(request_id)
            if record is None:
                continue  # ended by the sink of another one meanwhile
            is_batch = record.request.priority is Priority.BATCH
            if now < record.retry_s or self._finish_if_ended(record, now):
                continue
            if is_batch and batch_waits:
                continue
            num_tokens = record.request.prompt_price
            due = self._permits.turns.due(record.queue_position, num_tokens)
            record.queue_position = due or record.queue_position
            result = self._place(record, now)
            if isinstance(result, Placement):
                self._pending.remove(request_id, gone=False)
                self._attempts.begin(record, result, now)
            elif result.permanent:
                self._finish(record, FinishReason.ERROR, now, failure=result.failure())
            elif is_batch:
                batch_waits = True  # and keep those after it: none overtakes it
            elif now >= record.wait_until_s:
                text = (
                    f"Its worker was lost and none could take over within "
                    f"{self._config.replace_wait_s:g} s. {result.message}"
                )
                self._fail(record, Unavailable, text, now)

    # --------------------------------------------------------------- outputs

    def on_output(self, output: RequestOutput, worker: WorkerRef, now: float) -> None:
        """Take an output of a worker. An output of an older attempt is ignored."""
        record = self._requests.get(output.request_id)
        if record is None or output.attempt < record.attempt:
            # Ended here while it was on its way, by a former gateway, or while the worker was cut
            # off from here.
            if output.finish is None:
                self._ports.channel.send(
                    worker.address,
                    AbortTask(request_id=output.request_id, attempt=output.attempt),
                )
            return
        placement = record.placement
        if output.attempt != record.attempt or placement is None:
            return
        from_decode = worker == placement.decode
        if not from_decode and worker != placement.prefill:
            return
        record.learn_cached(output)
        if output.spans:
            worked = Worked(
                request_id=record.request_id,
                at_s=now,
                attempt=record.attempt,
                spans=output.spans,
            )
            self._ports.recorder.record(worked)
        if output.tokens and from_decode:
            record.decode_joined = True
        for event in record.add_output(output):
            self._deliver(record, event, worker.worker_id, now)
            if record.state is RequestState.FINISHED:
                return  # its sink has aborted it
        finish = record.due_finish()
        if finish is not None:
            self._on_finish(record, finish, worker.worker_id, now)
        elif not record.has_gap:
            record.gap_since_s = None
        elif record.gap_since_s is None:
            record.gap_since_s = now

    def _deliver(
        self, record: RequestRecord, event: RequestOutput, worker_id: str, now: float
    ) -> None:
        record.last_progress_s = now
        if record.state is RequestState.PREFILLING:
            record.move(RequestState.DECODING)
            request = record.request
            num_tokens = request.prompt_price
            self._permits.turns.on_first_token(request.flow, record.queue_position, num_tokens)
            rejection = self._conductor.on_prefilled(record.request, now)
            if rejection is not None and record.num_attempts == 1:
                self.counters["requests_shed"] += 1
                failure = spread_retry(rejection, self._ports.ids).failure()
                self._finish(record, FinishReason.ERROR, now, failure=failure)
                return
        self._delivery.deliver(record, event, worker_id, now)

    def _on_finish(
        self, record: RequestRecord, finish: FinishInfo, worker_id: str, now: float
    ) -> None:
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish(
                record, finish.reason, now, stop_token_id=finish.stop_token_id, done=(worker_id,)
            )
            return
        failure = finish.failure
        if failure is not None and failure.status in NOT_RETRIED:
            self._finish(record, FinishReason.ERROR, now, failure=failure, done=(worker_id,))
            return
        text = failure.message if failure is not None else f"it ended with {finish.reason.value}"
        if failure is not None and failure.status == Overloaded.http_status:
            self._on_turned_away(record, f"worker {worker_id}: {text}", now, worker_id)
        else:
            self._requeue(record, f"worker {worker_id} failed: {text}", now, failed_on=worker_id)

    # ---------------------------------------------------------------- ending

    def _expire(self, request_id: str, now: float) -> None:
        record = self._requests.get(request_id)
        if record is None or not record.is_overdue(now):
            return  # it has ended; or this was the deadline of an older one of the same name
        text = f"The request did not finish within its {record.request.timeout_s:g} s."
        self._fail(record, RequestTimeout, text, now)

    def _scan_stalled(self, now: float) -> None:
        for record in list(self._requests.values()):
            reason = record.stall_reason(self._config, now)
            if reason is not None:
                self._requeue(record, reason, now)

    def _finish_if_ended(self, record: RequestRecord, now: float) -> bool:
        """Finish a request whose last token ends it, when its worker was lost after that token and
        before it reported the end.
        """
        ended = request_finish(record.request, record.tokens)
        if ended is not None:
            self._finish(record, ended.reason, now, stop_token_id=ended.stop_token_id)
        return ended is not None

    def _fail(
        self, record: RequestRecord, kind: type[MooncakeError], message: str, now: float
    ) -> None:
        failure = reject(kind, "failed", message, 1.0 if kind.retryable else None).failure()
        self._finish(record, FinishReason.ERROR, now, failure=failure)

    def _finish(
        self,
        record: RequestRecord,
        reason: FinishReason,
        now: float,
        *,
        failure: Failure | None = None,
        stop_token_id: int | None = None,
        done: Collection[str] = (),
    ) -> None:
        """End a request: drop its state here and on its workers, and send its final event."""
        if reason is not FinishReason.ABORT:
            self._delivery.deliver_held(record, now)
            if record.state is RequestState.FINISHED:
                return  # its sink has aborted it
        record.held_first = None
        self._learn_blocks(record)
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._attempts.end(record, done)
        self._conductor.release(record.request_id, record.num_output_tokens if well else None)
        self._pending.remove(record.request_id)
        record.move(RequestState.FINISHED)
        del self._requests[record.request_id]
        self._permits.release(record.request, record.num_output_tokens)
        self.counters[f"requests_{reason.value}"] += 1
        if record.num_conflicts:
            logger.error(
                "request %s: %d tokens were computed again and differed",
                record.request_id,
                record.num_conflicts,
            )
        self._ports.recorder.record(record.finished(reason, failure, now))
        record.sink(record.final_event(reason, stop_token_id, failure))
