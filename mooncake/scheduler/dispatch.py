"""Attempts: what workers are told when a request is placed on them, and when it is taken off.

Owned by the desk. Knows which requests each worker has; where they go is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from mooncake.base import AbortTask, Priority, RequestState, WorkerRef
from mooncake.scheduler.conductor import Placement
from mooncake.scheduler.ports import GatewayPorts
from mooncake.scheduler.record import RequestRecord
from mooncake.scheduler.roster import Roster
from mooncake.telemetry.events import Placed


class Dispatch:
    """The requests at workers."""

    def __init__(self, ports: GatewayPorts, roster: Roster) -> None:
        self._ports = ports
        self._roster = roster
        self._on_worker: dict[str, dict[str, None]] = {}
        """Worker id -> requests placed there."""
        self._batch: dict[str, RequestRecord] = {}
        """Batch requests that are placed somewhere, the latest last."""
        self._last_attempt = 0
        """Numbers all attempts here, so that a request id used again is never an old attempt's."""

    def begin(self, record: RequestRecord, placement: Placement, now: float) -> None:
        """Start an attempt: tell decode to reserve (or to do it all), and prefill to compute."""
        self._last_attempt += 1
        record.begin(self._last_attempt, placement, now)
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
            )
        )
        for address, task in record.tasks(self._ports.worker):
            self._ports.channel.send(address, task)

    def end(self, record: RequestRecord, done: Collection[str] = ()) -> None:
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
        self._batch.pop(record.request_id, None)
        record.placement = None

    def latest_batch(self, decode: WorkerRef | None) -> RequestRecord | None:
        """Return the batch request placed last (on this decode worker), if there is any."""
        for record in reversed(self._batch.values()):
            assert record.placement is not None, "waits and would yield"
            if decode is None or record.placement.decode == decode:
                return record
        return None

    def of(self, worker_id: str) -> list[str]:
        """Return the requests that have a share of this worker, in the order they came."""
        return list(self._on_worker.get(worker_id, {}))

    def forget(self, worker_id: str) -> list[str]:
        """The worker is gone: return what it had."""
        return list(self._on_worker.pop(worker_id, {}))

    def check_integrity(self, records: Iterable[RequestRecord]) -> set[str]:
        """Raise AssertionError when a share was forgotten or is nobody's; return who is placed."""
        booked = {(worker, name) for worker, names in self._on_worker.items() for name in names}
        placed: set[str] = set()
        for record in records:
            if record.placement is None:
                continue
            assert record.state in (RequestState.PREFILLING, RequestState.DECODING)
            placed.add(record.request_id)
            assert self._roster.live(record.placement.decode), "decoding on a lost worker"
            for worker in record.workers():
                if self._roster.live(worker):
                    share = worker.worker_id, record.request_id
                    assert share in booked, "a share was forgotten"
                    booked.remove(share)
        assert not booked, "workers hold requests that are not theirs"
        assert set(self._batch) <= placed, "who is placed nowhere would yield"
        return placed
