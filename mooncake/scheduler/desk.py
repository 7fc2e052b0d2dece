"""The desk: every accepted request from its permit to its one final event, whatever happens to
workers.

Owns the request records, permits, queue and deadlines; used by the gateway alone. Who is alive is
the roster's knowledge, where a request goes is the Conductor's choice. No text in here.

    submit ─► permit ─► place ──► tasks sent ─► tokens in order ─► final event
                │         │ ▲                        │
              refused   refused └── wait for a worker ◄─┘ worker lost, failed or stalled

Waiting queue: filled by lost attempts, emptied when a worker joins or on a tick; bound `max_queue`;
when it is full the request fails with 503.
"""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Collection

from mooncake.base import (
    AbortTask,
    BoundedQueue,
    Failure,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    MooncakeError,
    RequestOutput,
    RequestState,
    RequestTimeout,
    TokensEvent,
    Unavailable,
    WorkerRef,
)
from mooncake.base.messages import FinishInfo
from mooncake.scheduler.admission import Permits, Rejection, reject, spread_retry
from mooncake.scheduler.conductor import Conductor, Placement
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.outputs import OutputOrder
from mooncake.scheduler.ports import GatewayPorts
from mooncake.scheduler.record import RequestRecord, Sink
from mooncake.scheduler.roster import Roster
from mooncake.telemetry.events import (
    Accepted,
    Finished,
    FirstToken,
    Placed,
    Refused,
    Requeued,
    Tokens,
)

RETRY_WAITING_S = 0.25
SCAN_STALLED_S = 1.0
STALL_FACTOR = 10.0
"""A first token may take this many times its prediction before the attempt counts as stalled."""
MAX_STALLS = 4.0
"""But no more than so many times `stall_timeout_s`: the prediction may be lost as well."""

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
        self._permits = Permits(config.max_inflight)
        self._requests: dict[str, RequestRecord] = {}
        self._on_worker: dict[str, dict[str, None]] = {}
        """Worker id -> requests placed there."""
        self._waiting: BoundedQueue[str] = BoundedQueue(config.max_queue)
        self._deadlines: list[tuple[float, int, str]] = []
        self._num_submitted = 0
        self._last_attempt = 0
        """Numbers all attempts here, so that a request id used again is never an old attempt's."""
        self._next_retry_s = 0.0
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
        rejection = self._may_enter(request)
        if rejection is not None:
            self.refuse(request, rejection, sink, now)
            return
        record = RequestRecord(
            request=request,
            sink=sink,
            accepted_s=now,
            order=OutputOrder(request.request_id, request.sampling.max_tokens),
        )
        result = self._place(record, now)
        if isinstance(result, Rejection):
            self._permits.give(request.request_id)
            self.refuse(request, result, sink, now)
            return
        self._requests[request.request_id] = record
        self.counters["requests_accepted"] += 1
        self._num_submitted += 1
        if request.timeout_s is not None:
            deadline_s = now + request.timeout_s
            heapq.heappush(self._deadlines, (deadline_s, self._num_submitted, request.request_id))
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
        self._begin(record, result, now)

    def abort(self, request_id: str, now: float) -> None:
        """End a request at its client's wish; unknown or ended ones are ignored."""
        record = self._requests.get(request_id)
        if record is not None:
            self._finish(record, FinishReason.ABORT, now)

    def worker_lost(self, worker_id: str, now: float) -> None:
        """Place again what needed this worker. Roster and Conductor know of the loss already."""
        for request_id in self._on_worker.pop(worker_id, {}):
            record = self._requests.get(request_id)
            if record is None or record.placement is None:
                continue  # ended by the sink of another one meanwhile
            is_decode = record.placement.decode.worker_id == worker_id
            if is_decode or not record.decode_joined or record.order.has_gap:
                self._requeue(record, f"worker {worker_id} was lost", now)

    def worker_joined(self, now: float) -> None:
        """Somebody may be able to take over what waits."""
        if len(self._waiting):
            self._place_waiting(now)

    def tick(self, now: float) -> float | None:
        """See to deadlines, waiting requests and stalls. Returns when to come again."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self._expire(heapq.heappop(self._deadlines)[2], now)
        if len(self._waiting) and now >= self._next_retry_s:
            self._place_waiting(now)
        if self._requests and now >= self._next_scan_s:
            self._next_scan_s = now + SCAN_STALLED_S
            self._scan_stalled(now)
        wakes = [deadline_s for deadline_s, _, _ in self._deadlines[:1]]
        if len(self._waiting):
            wakes.append(self._next_retry_s)
        if self._requests:
            wakes.append(self._next_scan_s)
        return min(wakes, default=None)

    def check_integrity(self) -> None:
        """Raise AssertionError when permits, requests, queues and books disagree."""
        self._permits.check_integrity(set(self._requests))
        waiting = set(self._waiting)
        assert len(waiting) == len(self._waiting), "a request waits twice"
        placed: set[str] = set()
        booked = {(worker, name) for worker, names in self._on_worker.items() for name in names}
        for name, record in self._requests.items():
            assert record.state is not RequestState.FINISHED, "an ended request was kept"
            assert (record.state is RequestState.QUEUED) == (name in waiting)
            assert (record.placement is None) == (name in waiting)
            assert 0 < record.num_attempts <= self._config.max_attempts
            if record.placement is None:
                continue
            placed.add(name)
            assert self._roster.live(record.placement.decode), "decoding on a lost worker"
            for worker in record.workers():
                if self._roster.live(worker):
                    assert (worker.worker_id, name) in booked, "a share was forgotten"
                    booked.remove((worker.worker_id, name))
        assert not booked, "workers hold requests that are not theirs"
        assert waiting <= set(self._requests), "an unknown request waits"
        self._conductor.check_integrity(placed)

    # --------------------------------------------------------------- placing

    def _may_enter(self, request: GenerateRequest) -> Rejection | None:
        if request.request_id in self._requests:
            return reject(
                InvalidRequest, "duplicate_id", f"The request id {request.request_id} is in use."
            )
        return self._permits.take(request.request_id)

    def refuse(
        self, request: GenerateRequest, rejection: Rejection, sink: Sink, now: float
    ) -> None:
        self.counters["requests_refused"] += 1
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
        return self._conductor.place(
            record.request,
            record.block_keys(self._conductor.layout),
            record.num_output_tokens,
            now,
            record.exclude if record.num_attempts else None,
        )

    def _begin(self, record: RequestRecord, placement: Placement, now: float) -> None:
        """Start an attempt: tell decode to reserve (or to do it all), and prefill to compute."""
        self._last_attempt += 1
        record.attempt = self._last_attempt
        record.num_attempts += 1
        record.placement = placement
        record.decode_joined = False
        record.last_progress_s = now
        record.gap_since_s = None
        record.order.forget_held()
        record.move(RequestState.PREFILLING)
        for worker in record.workers():
            self._on_worker.setdefault(worker.worker_id, {})[record.request_id] = None
        prefill, decode = placement.prefill, placement.decode
        self._ports.recorder.record(
            Placed(
                request_id=record.request_id,
                at_s=now,
                attempt=record.attempt,
                prefill=prefill.worker_id if prefill is not None else None,
                decode=decode.worker_id,
                predicted_ttft_s=placement.predicted_ttft_s,
                predicted_tbt_s=placement.predicted_tbt_s,
                num_cached_tokens=placement.num_cached_tokens,
                num_fetch_blocks=placement.num_fetch_blocks,
            )
        )
        for address, task in record.tasks(self._ports.worker):
            self._ports.channel.send(address, task)

    def _requeue(
        self, record: RequestRecord, reason: str, now: float, failed_on: str | None = None
    ) -> None:
        """An attempt is lost: place the request again, let it wait for a worker, or fail it."""
        logger.info("request %s, attempt %d: %s", record.request_id, record.attempt, reason)
        self._detach(record, done=() if failed_on is None else (failed_on,))
        self._conductor.release(record.request_id)
        record.move(RequestState.QUEUED)
        if failed_on is not None:
            record.exclude.add(failed_on)
        self.counters["attempts_lost"] += 1
        self._ports.recorder.record(
            Requeued(
                request_id=record.request_id,
                at_s=now,
                attempt=record.attempt,
                reason=reason,
                num_output_tokens=record.num_output_tokens,
            )
        )
        ended = record.ended_by_its_tokens()
        if ended is not None:
            self._finish(record, ended.reason, now, stop_token_id=ended.stop_token_id)
            return
        if record.num_attempts >= self._config.max_attempts:
            tries = record.num_attempts
            text = f"The request failed {tries} times; the last time {reason}. Retry it."
            self._fail(record, Unavailable, text, now)
            return
        result = self._place(record, now)
        if isinstance(result, Placement):
            self._begin(record, result, now)
        elif result.permanent:
            self._finish(record, FinishReason.ERROR, now, failure=result.failure())
        elif self._waiting.offer(record.request_id):
            record.wait_until_s = now + self._config.replace_wait_s
            self._next_retry_s = now + RETRY_WAITING_S
        else:
            text = f"Too many requests wait for a worker to take over ({reason}). Retry later."
            self._fail(record, Unavailable, text, now)

    def _place_waiting(self, now: float) -> None:
        """Try every waiting request once, oldest first."""
        self._next_retry_s = now + RETRY_WAITING_S
        for request_id in list(self._waiting):
            record = self._requests.get(request_id)
            if record is None:
                continue  # ended by the sink of another one meanwhile
            result = self._place(record, now)
            if isinstance(result, Placement):
                self._waiting.remove(request_id)
                self._begin(record, result, now)
            elif result.permanent:
                self._finish(record, FinishReason.ERROR, now, failure=result.failure())
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
            rejection = self._conductor.on_prefilled(record.request, now)
            if rejection is not None and record.num_attempts == 1:
                self.counters["requests_shed"] += 1
                failure = spread_retry(rejection, self._ports.ids).failure()
                self._finish(record, FinishReason.ERROR, now, failure=failure)
                return
        if event.start == 0:
            self._ports.recorder.record(
                FirstToken(
                    request_id=record.request_id,
                    at_s=now,
                    worker_id=worker_id,
                    num_cached_tokens=record.num_cached_tokens or 0,
                )
            )
        self._ports.recorder.record(
            Tokens(
                request_id=record.request_id,
                at_s=now,
                start=event.start,
                num_tokens=len(event.tokens),
                worker_id=worker_id,
            )
        )
        record.sink(event)

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
        self._requeue(record, f"worker {worker_id} failed: {text}", now, failed_on=worker_id)

    # ---------------------------------------------------------------- ending

    def _expire(self, request_id: str, now: float) -> None:
        record = self._requests.get(request_id)
        if record is None or record.request.timeout_s is None:
            return
        if now - record.accepted_s < record.request.timeout_s:
            return  # an older request of the same name had this deadline
        text = f"The request did not finish within its {record.request.timeout_s:g} s."
        self._fail(record, RequestTimeout, text, now)

    def _scan_stalled(self, now: float) -> None:
        config = self._config
        for record in list(self._requests.values()):
            if record.placement is None:
                continue
            quiet_s = now - record.last_progress_s
            patience_s = config.stall_timeout_s
            if record.state is RequestState.PREFILLING:
                predicted_s = STALL_FACTOR * record.placement.predicted_ttft_s
                patience_s = min(max(patience_s, predicted_s), MAX_STALLS * patience_s)
            if record.gap_since_s is not None and now - record.gap_since_s > config.gap_timeout_s:
                self._requeue(record, "tokens were lost on their way", now)
            elif quiet_s > patience_s:
                self._requeue(record, f"nothing came for {quiet_s:.0f} s", now)

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
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._detach(record, done)
        self._conductor.release(record.request_id, record.num_output_tokens if well else None)
        self._waiting.remove(record.request_id)
        record.move(RequestState.FINISHED)
        del self._requests[record.request_id]
        self._permits.give(record.request_id)
        self.counters[f"requests_{reason.value}"] += 1
        if record.order.num_conflicts:
            logger.error(
                "request %s: %d repeated tokens differed", record.request_id,
                record.order.num_conflicts,
            )  # fmt: skip
        num_cached = record.num_cached_tokens or 0
        self._ports.recorder.record(
            Finished(
                request_id=record.request_id,
                at_s=now,
                reason=reason,
                num_prompt_tokens=len(record.request.prompt_tokens),
                num_output_tokens=record.num_output_tokens,
                num_cached_tokens=num_cached,
                status=failure.status if failure is not None else 200,
            )
        )
        record.sink(record.final_event(reason, stop_token_id, failure))

    def _detach(self, record: RequestRecord, done: Collection[str] = ()) -> None:
        """Take a request off its workers. Those alive are told to forget it, but for those that are
        `done` with it by themselves (as prefill is once decode has joined).
        """
        for worker in record.workers():
            self._on_worker.get(worker.worker_id, {}).pop(record.request_id, None)
            assert record.placement is not None
            finished = worker.worker_id in done or (
                record.decode_joined and worker == record.placement.prefill
            )
            if not finished and self._roster.live(worker):
                self._ports.channel.send(
                    worker.address,
                    AbortTask(request_id=record.request_id, attempt=record.attempt),
                )
        record.placement = None
