"""Tracks the attempts of requests: it sends the tasks of a placement to its workers, and takes them
back.

Owned by the request manager. It knows which requests each worker has; the Conductor decides where a
request goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from mooncake.base import AbortTask, IdSource, Priority, RequestState, WorkerRef
from mooncake.base.large_settings import SentSettings
from mooncake.rpc.channel import Channel
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.admission import Placement
from mooncake.scheduler.requests.record import RequestRecord
from mooncake.telemetry.events import Placed, Recorder


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayPorts:
    """What a gateway needs from outside: its own reference, its channel, source of identifiers and
    event recorder.
    """

    worker: WorkerRef
    channel: Channel
    ids: IdSource
    recorder: Recorder


class AttemptTracker:
    """Follows the requests that are placed on workers now."""

    def __init__(self, ports: GatewayPorts, membership: MembershipTable) -> None:
        self._ports = ports
        self._membership = membership
        self._on_worker: dict[str, dict[str, None]] = {}
        """Worker id -> requests placed there."""
        self._batch: dict[str, RequestRecord] = {}
        """Placed batch requests, the latest last."""
        self._settings = SentSettings()
        self._last_attempt = 0
        """The number of the last attempt. All attempts of this gateway share one count, so a
        request id that is used again never matches an attempt of its predecessor.
        """

    def begin(self, record: RequestRecord, placement: Placement, now: float) -> None:
        """Start an attempt: send the task, to decode first, so that it reserves pages early."""
        self._last_attempt += 1
        facts = placement.facts
        if facts is not None:  # they are large where workers are many, and only recorders want them
            placement = replace(placement, facts=None)
        record.begin_attempt(self._last_attempt, placement, now)
        if record.request.priority is Priority.BATCH:
            self._batch[record.request_id] = record
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
                facts=facts,
            )
        )
        task = record.task(self._ports.worker)
        for worker in record.workers():
            self._ports.channel.send(worker.address, self._settings.shortened(task, worker))

    def end(
        self, record: RequestRecord, done: Collection[str] = (), *, failed: bool = False
    ) -> None:
        """End an attempt. Its workers that are not lost are told to abort it, except those in
        `done` and a prefill worker whose decode worker has joined: these have finished with it.

        `failed`: the attempt did not end normally. Its task may have been lost, or refused for a
        setting that it named, so settings are sent again.
        """
        for worker in record.workers():
            self._on_worker.get(worker.worker_id, {}).pop(record.request_id, None)
            assert record.placement is not None
            finished = worker.worker_id in done or (
                record.decode_joined and worker == record.placement.prefill
            )
            # A worker that is only cut off from here may still get it.
            if not finished and not self._membership.is_fenced(worker):
                self._ports.channel.send(
                    worker.address,
                    AbortTask(request_id=record.request_id, attempt=record.attempt),
                )
            if failed:
                self._settings.forget(worker.worker_id)
        self._batch.pop(record.request_id, None)
        record.placement = None

    def latest_patient(self, decode: WorkerRef | None) -> RequestRecord | None:
        """Return the patient request that was placed last (on this decode worker), or None."""
        for record in reversed(self._batch.values()):
            assert record.placement is not None, "a pending request would yield"
            is_there = decode in (None, record.placement.decode)
            if is_there and record.queue_position.is_patient:
                return record
        return None

    def requests_on(self, worker_id: str) -> list[str]:
        """Return the ids of the requests placed on this worker, in the order they were placed."""
        return list(self._on_worker.get(worker_id, {}))

    def remove_worker(self, worker_id: str) -> list[str]:
        """Drop a lost worker and return the ids of the requests it had."""
        self._settings.forget(worker_id)
        return list(self._on_worker.pop(worker_id, {}))

    def check_integrity(self, records: Iterable[RequestRecord]) -> set[str]:
        """Raise AssertionError when the requests recorded per worker differ from the placements of
        `records`; return the ids of the placed requests.
        """
        booked = {(worker, name) for worker, names in self._on_worker.items() for name in names}
        placed: set[str] = set()
        for record in records:
            if record.placement is None:
                continue
            assert record.state in (RequestState.PREFILLING, RequestState.DECODING)
            placed.add(record.request_id)
            assert self._membership.is_live(record.placement.decode), "decoding on a lost worker"
            for worker in record.workers():
                if self._membership.is_live(worker):
                    share = worker.worker_id, record.request_id
                    assert share in booked, "a worker of a placed request was forgotten"
                    booked.remove(share)
        assert not booked, "workers have requests that are not placed on them"
        assert set(self._batch) <= placed, "a request that is not placed would yield"
        return placed
