"""The desk: every accepted request from its permit to its one final event, whatever happens to
workers.

Owns the request records, permits, queue and deadlines; used by the gateway alone. Who is alive is
the roster's knowledge, where a request goes is the Conductor's choice. No text in here.

    submit ─► permit ─► place ──► tasks sent ─► tokens in order ─► final event
                │         │ ▲                        │
              refused   refused └── wait for a worker ◄─┘ worker lost, full, failed or stalled

Who waits (`waiting`): requests whose worker was lost or full, and batch work until there is
something idle to fill. Batch yields: where another request finds no room on decode, it goes back to
wait, with what it has so far.
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
    TokensEvent,
    Unavailable,
    WorkerRef,
)
from mooncake.base.messages import FinishInfo
from mooncake.scheduler.admission import (
    NO_ROOM_REASONS,
    NOT_IDLE,
    Rejection,
    not_idle,
    reject,
    spread_retry,
)
from mooncake.scheduler.conductor import Conductor, Placement
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.delivery import Delivery
from mooncake.scheduler.dispatch import Dispatch
from mooncake.scheduler.entrance import Entrance
from mooncake.scheduler.fairness import Standing
from mooncake.scheduler.outputs import OutputOrder
from mooncake.scheduler.patience import Deadlines, is_overdue, why_stalled
from mooncake.scheduler.ports import GatewayPorts
from mooncake.scheduler.read_ahead import ReadAhead
from mooncake.scheduler.record import RequestRecord, Sink
from mooncake.scheduler.roster import Roster
from mooncake.scheduler.waiting import WaitingRoom
from mooncake.telemetry.events import (
    Accepted,
    Refused,
    Requeued,
)

SCAN_STALLED_S = 1.0
RETRY_FULL_S = 1.0
"""A worker that has turned a request away twice is not asked again sooner."""
MAX_YIELDING = 8
"""Batch requests that make room for one newcomer, at most."""

NOT_RETRIED = frozenset({400, 401, 403, 404, 413, 422})
"""Failures no other worker would help with."""

logger = logging.getLogger(__name__)


class RequestDesk:
    """Keeps the requests of one gateway."""

    def __init__(
        self, config: SchedulerConfig, ports: GatewayPorts, conductor: Conductor, roster: Roster
    ) -> None:
        self._config = config
        self._ports = ports
        self._conductor = conductor
        self._roster = roster
        self._entrance = Entrance(config.max_inflight)
        self._requests: dict[str, RequestRecord] = {}
        self._dispatch = Dispatch(ports, roster)
        read_ahead = ReadAhead(config, ports.worker, ports.channel, conductor)
        self._waiting = WaitingRoom(config.max_queue, read_ahead)
        self._delivery = Delivery(config, ports.recorder)
        self._deadlines = Deadlines()
        self._next_scan_s = 0.0
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def states(self) -> dict[str, int]:
        """Return how many requests are in each state."""
        return dict(Counter(record.state.value for record in self._requests.values()))

    # ---------------------------------------------------------- coming and going

    def submit(self, request: GenerateRequest, sink: Sink, now: float) -> None:
        """Take a request, or refuse it with a final event (REJECTED) before this returns."""
        standing = self._enter(request, now)
        if isinstance(standing, Rejection):
            self.refuse(request, standing, sink, now)
            return
        record = RequestRecord(
            request=request,
            sink=sink,
            accepted_s=now,
            order=OutputOrder(request.request_id, request.sampling.max_tokens),
            standing=standing,
        )
        may_wait = request.priority is Priority.BATCH
        jumps = may_wait and self._waiting.has_batch
        result = not_idle() if jumps else self._place(record, now)
        if isinstance(result, Rejection) and not (may_wait and result.reason == NOT_IDLE):
            self._entrance.turn_away(request)
            self.refuse(request, result, sink, now)
            return
        self._entrance.stay(request, standing)
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
                ttft_slo_s=request.ttft_slo_s or self._config.ttft_slo_s,
                tbt_slo_s=request.tbt_slo_s or self._config.tbt_slo_s,
            )
        )
        if isinstance(result, Placement):
            self._dispatch.begin(record, result, now)
        else:
            self._waiting.offer(record, now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request at its client's wish; unknown or ended ones are ignored."""
        record = self._requests.get(request_id)
        if record is not None:
            self._finish(record, FinishReason.ABORT, now)

    def worker_lost(self, worker_id: str, now: float) -> None:
        """Place again what needed this worker. Roster and Conductor know of the loss already."""
        for request_id in self._dispatch.forget(worker_id):
            record = self._requests.get(request_id)
            if record is not None and record.needs(worker_id):
                self._requeue(record, f"worker {worker_id} was lost", now)

    def move_from(self, worker_id: str, now: float) -> None:
        """Place elsewhere what needs this worker, which lives and takes nothing new."""
        for request_id in self._dispatch.of(worker_id):
            record = self._requests.get(request_id)
            if record is not None and record.needs(worker_id):
                reason = f"worker {worker_id} changes its role"
                self._requeue(record, reason, now, blameless=True)

    def worker_joined(self, now: float) -> None:
        """Somebody may be able to take over what waits."""
        if len(self._waiting):
            self._place_waiting(now)

    def tick(self, now: float) -> float | None:
        """See to deadlines, waiting requests and stalls. Returns when to come again."""
        while (request_id := self._deadlines.pop_due(now)) is not None:
            self._expire(request_id, now)
        if len(self._waiting) and now >= self._waiting.next_call_s:
            self._place_waiting(now)
        if self._requests and now >= self._next_scan_s:
            self._next_scan_s = now + SCAN_STALLED_S
            self._scan_stalled(now)
        times = [self._deadlines.next_s, self._delivery.tick(now)]
        wakes = [at_s for at_s in times if at_s is not None]
        if len(self._waiting):
            wakes.append(self._waiting.next_call_s)
        if self._requests:
            wakes.append(self._next_scan_s)
        return min(wakes, default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when permits, requests, queues and books disagree."""
        self._entrance.check_integrity([r.request for r in self._requests.values()])
        self._waiting.check_integrity()
        self._delivery.check_integrity(self._requests)
        for name, record in self._requests.items():
            waits = name in self._waiting
            assert record.state is not RequestState.FINISHED, "an ended request was kept"
            assert (record.state is RequestState.QUEUED) == waits
            assert (record.placement is None) == waits
            assert 0 <= record.num_failed <= self._config.max_attempts
        assert set(self._waiting) <= set(self._requests), "an unknown request waits"
        self._conductor.check_integrity(self._dispatch.check_integrity(self._requests.values()))

    # --------------------------------------------------------------- placing

    def _enter(self, request: GenerateRequest, now: float) -> Standing | Rejection:
        if request.request_id in self._requests:
            return reject(
                InvalidRequest, "duplicate_id", f"The request id {request.request_id} is in use."
            )
        return self._entrance.enter(request, now)

    def refuse(
        self, request: GenerateRequest, rejection: Rejection, sink: Sink, now: float
    ) -> None:
        self.counters["requests_refused"] += 1
        self.counters[f"refused_{rejection.reason}"] += 1
        self._ports.recorder.record(
            Refused(
                request_id=request.request_id,
                at_s=now,
                status=rejection.status,
                reason=rejection.reason,
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
        """Choose workers for a request. Where decode has no room for it, batch makes some."""
        result = self._choose(record, now)
        if record.request.priority is Priority.BATCH:
            return result
        for _ in range(MAX_YIELDING):
            yielding = self._who_yields(result)
            if yielding is None:
                break
            if isinstance(result, Placement):
                self._conductor.release(record.request_id)
            self._take_off(yielding, "it yields to others", now)
            yielding.num_paused += 1
            self._waiting.offer(yielding, now)
            self.counters["batch_yielded"] += 1
            result = self._choose(record, now)
        return result

    def _choose(self, record: RequestRecord, now: float) -> Placement | Rejection:
        return self._conductor.place(
            record.request,
            record.block_keys(self._conductor.layout),
            record.num_output_tokens,
            now,
            record.exclude if record.num_attempts else None,
            record.standing,
        )

    def _who_yields(self, result: Placement | Rejection) -> RequestRecord | None:
        """Return the batch request placed last among those in the way, if there is any."""
        if isinstance(result, Placement):
            return self._dispatch.latest_batch(result.decode) if result.must_wait else None
        return self._dispatch.latest_batch(None) if result.reason in NO_ROOM_REASONS else None

    def _take_off(
        self, record: RequestRecord, reason: str, now: float, failed_on: str | None = None
    ) -> None:
        """End an attempt; the request is placed nowhere then."""
        logger.info("request %s, attempt %d: %s", record.request_id, record.attempt, reason)
        self._dispatch.end(record, done=() if failed_on is None else (failed_on,))
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
        """An attempt is lost: place the request again, let it wait for a worker, or fail it."""
        self._take_off(record, reason, now, failed_on)
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
            self._dispatch.begin(record, result, now)
        elif result.permanent:
            self._finish(record, FinishReason.ERROR, now, failure=result.failure())
        else:
            self._wait(record, reason, now)

    def _turned_away(self, record: RequestRecord, reason: str, now: float, worker_id: str) -> None:
        """A worker takes no more, which is no failure: the request waits for room, there or with
        others.
        """
        self._take_off(record, reason, now, worker_id)
        record.num_paused += 1
        if worker_id in record.exclude:
            record.retry_s = now + RETRY_FULL_S
        record.exclude.add(worker_id)
        self.counters["requests_turned_away"] += 1
        self._wait(record, reason, now)

    def _wait(self, record: RequestRecord, reason: str, now: float) -> None:
        if self._waiting.offer(record, now):
            record.wait_until_s = now + self._config.replace_wait_s
        else:
            text = f"Too many requests wait for a worker to take over ({reason}). Retry later."
            self._fail(record, Unavailable, text, now)

    def _place_waiting(self, now: float) -> None:
        """Try those who wait once, in order of their turns; of batch work as much as fits."""
        self._waiting.called(now)
        for request_id in list(self._waiting):
            record = self._requests.get(request_id)
            if record is None:
                continue  # ended by the sink of another one meanwhile
            if now < record.retry_s or self._finish_if_ended(record, now):
                continue
            result = self._place(record, now)
            if isinstance(result, Placement):
                self._waiting.remove(request_id, gone=False)
                self._dispatch.begin(record, result, now)
            elif result.permanent:
                self._finish(record, FinishReason.ERROR, now, failure=result.failure())
            elif record.request.priority is Priority.BATCH:
                break  # who comes after it is batch as well
            elif now >= record.wait_until_s:
                text = (
                    f"Its worker was lost and none could take over within "
                    f"{self._config.replace_wait_s:g} s. {result.message}"
                )
                self._fail(record, Unavailable, text, now)

    # --------------------------------------------------------------- outputs

    def on_output(self, output: RequestOutput, worker: WorkerRef, now: float) -> None:
        record = self._requests.get(output.request_id)
        if record is None:
            if output.finish is None:  # ended here while it was on its way, or by a former gateway
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
        if record.num_cached_tokens is None and output.num_cached_tokens is not None:
            limit = len(record.request.prompt_tokens)
            record.num_cached_tokens = min(output.num_cached_tokens, limit)
        if output.tokens and from_decode:
            record.decode_joined = True
        for event in record.order.offer(output):
            self._deliver(record, event, worker.worker_id, now)
            if record.state is RequestState.FINISHED:
                return  # its sink has aborted it
        finish = record.order.due_finish()
        if finish is not None:
            self._on_finish(record, finish, worker.worker_id, now)
        elif not record.order.has_gap:
            record.gap_since_s = None
        elif record.gap_since_s is None:
            record.gap_since_s = now

    def _deliver(
        self, record: RequestRecord, event: TokensEvent, worker_id: str, now: float
    ) -> None:
        record.last_progress_s = now
        if record.state is RequestState.PREFILLING:
            record.move(RequestState.DECODING)
            self._entrance.began(record.request, record.standing)
            rejection = self._conductor.on_prefilled(record.request, now)
            if rejection is not None and record.num_attempts == 1:
                self.counters["requests_shed"] += 1
                failure = spread_retry(rejection, self._ports.ids).failure()
                self._finish(record, FinishReason.ERROR, now, failure=failure)
                return
        self._delivery.give(record, event, worker_id, now)

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
            self._turned_away(record, f"worker {worker_id}: {text}", now, worker_id)
        else:
            self._requeue(record, f"worker {worker_id} failed: {text}", now, failed_on=worker_id)

    # ---------------------------------------------------------------- ending

    def _expire(self, request_id: str, now: float) -> None:
        record = self._requests.get(request_id)
        if record is None or not is_overdue(record, now):
            return  # it has ended; or this was the deadline of an older one of the same name
        text = f"The request did not finish within its {record.request.timeout_s:g} s."
        self._fail(record, RequestTimeout, text, now)

    def _scan_stalled(self, now: float) -> None:
        for record in list(self._requests.values()):
            reason = why_stalled(record, self._config, now)
            if reason is not None:
                self._requeue(record, reason, now)

    def _finish_if_ended(self, record: RequestRecord, now: float) -> bool:
        """End a request whose tokens so far are all there is: only that word of it was lost."""
        ended = record.ended_by_its_tokens()
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
        """End a request: nothing of it stays here, and no worker keeps anything of it."""
        if reason is not FinishReason.ABORT:
            self._delivery.give_held(record.request_id, now)
            if record.state is RequestState.FINISHED:
                return  # its sink has aborted it
        self._delivery.forget(record.request_id)
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._dispatch.end(record, done)
        self._conductor.release(record.request_id, record.num_output_tokens if well else None)
        self._waiting.remove(record.request_id)
        record.move(RequestState.FINISHED)
        del self._requests[record.request_id]
        self._entrance.leave(record.request, record.num_output_tokens)
        self.counters[f"requests_{reason.value}"] += 1
        if record.order.num_conflicts:
            logger.error(
                "request %s: %d repeated tokens differed", record.request_id,
                record.order.num_conflicts,
            )  # fmt: skip
        self._ports.recorder.record(record.finished(reason, failure, now))
        record.sink(record.final_event(reason, stop_token_id, failure))
