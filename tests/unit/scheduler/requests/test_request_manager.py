"""The request manager alone, with a membership table and a Conductor but no gateway machine: every
request ends in exactly one final event, and nothing of it stays.
"""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.base import (
    AbortTask,
    Failure,
    FinishReason,
    GenerateRequest,
    Priority,
    RequestOutput,
    RequestTask,
    Role,
    SeededIds,
    WorkerRef,
)
from mooncake.base.request import FinishInfo
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.membership_table import MembershipTable
from mooncake.scheduler.placement.admission import draining
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.attempt_tracker import GatewayPorts
from mooncake.scheduler.requests.permits import RETRY_WAITING_S
from mooncake.scheduler.requests.request_manager import RequestManager
from mooncake.telemetry.events import EventList, Refused, Requeued
from tests.support.scheduler.scheduling import GATEWAY, Client, Inbox, hello, request


class Bench:
    """A request manager whose workers answer when the test says so."""

    def __init__(self, **config: Any) -> None:
        settings = SchedulerConfig(**config)
        self.channel, self.events = Inbox(), EventList()
        self.conductor = Conductor(settings, SeededIds(0))
        self.membership = MembershipTable(GATEWAY, self.channel, settings.heartbeat_timeout_s)
        ports = GatewayPorts(
            worker=GATEWAY, channel=self.channel, ids=SeededIds(1), recorder=self.events
        )
        self.manager = RequestManager(settings, ports, self.conductor, self.membership)

    def join(self, name: str, role: Role, now: float = 0.0, **changes: Any) -> WorkerRef:
        message = hello(name, role, **changes)
        assert self.conductor.on_hello(message) is None
        self.membership.join(message, now)
        self.manager.worker_joined(message, now)
        return message.worker

    def lose(self, name: str, now: float) -> None:
        self.membership.remove(name, now)
        self.conductor.on_lost(name)
        self.manager.worker_lost(name, now)
        self.manager.check_integrity()

    def submit(self, generate: GenerateRequest, now: float = 0.0) -> Client:
        client = Client()
        self.manager.submit(generate, client, now)
        self.manager.check_integrity()
        return client

    def attempt(self, name: str) -> int:
        """Return the number of the request's latest placement."""
        tasks = self.channel.of(RequestTask)
        return max(task.attempt for task in tasks if task.request.request_id == name)

    def output(
        self,
        worker: WorkerRef,
        name: str,
        start: int,
        tokens: list[int],
        finish: FinishInfo | None = None,
        now: float = 0.0,
    ) -> None:
        attempt = self.attempt(name)
        output = RequestOutput(
            request_id=name, attempt=attempt, start=start, tokens=tokens, finish=finish
        )
        self.manager.on_output(output, worker, now)
        self.manager.check_integrity()

    def fail(self, worker: WorkerRef, name: str, failure: Failure, now: float = 0.0) -> None:
        finish = FinishInfo(reason=FinishReason.ERROR, failure=failure)
        self.output(worker, name, 0, [], finish, now)


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.join("p0", Role.PREFILL)
    made.join("d0", Role.DECODE)
    return made


DONE = FinishInfo(reason=FinishReason.LENGTH)


def worker(name: str) -> WorkerRef:
    return hello(name, Role.DECODE).worker


def test_a_request_ends_once_and_leaves_nothing(bench: Bench) -> None:
    client = bench.submit(request("r"))
    assert bench.manager.states() == {"prefilling": 1}
    bench.output(worker("p0"), "r", 0, [5])
    assert bench.manager.states() == {"decoding": 1}
    bench.output(worker("d0"), "r", 1, [6, 7, 8], DONE)
    assert client.tokens == [5, 6, 7, 8]
    assert client.final.reason is FinishReason.LENGTH
    assert len(bench.manager) == 0
    assert bench.manager.counters["requests_length"] == 1


def test_a_refusal_is_counted_recorded_and_final(bench: Bench) -> None:
    client = Client()
    bench.manager.refuse(request("r"), draining(), client, 1.0)
    assert client.final.reason is FinishReason.REJECTED
    assert client.final.failure is not None
    assert client.final.failure.status == 503
    assert bench.manager.counters["refused_draining"] == 1
    assert [type(event) for event in bench.events.events] == [Refused]


def test_a_refused_request_gives_its_permit_back() -> None:
    bench = Bench(max_inflight=1)
    assert bench.submit(request("early")).final.reason is FinishReason.REJECTED, "no worker"
    bench.join("d0", Role.DECODE)
    first = bench.submit(request("first"))
    refused = bench.submit(request("second")).final.failure
    assert refused is not None
    assert refused.status == 429
    bench.manager.abort("first", 1.0)
    assert first.final.reason is FinishReason.ABORT
    assert not bench.submit(request("third")).finals


def test_an_output_of_an_unknown_request_is_answered_with_an_abort(bench: Bench) -> None:
    output = RequestOutput(request_id="gone", attempt=3, start=0, tokens=[1])
    bench.manager.on_output(output, worker("d0"), 0.0)
    address = worker("d0").address
    assert bench.channel.of(AbortTask, address) == [AbortTask(request_id="gone", attempt=3)]


def test_a_lost_worker_s_requests_go_on_elsewhere_with_their_tokens(bench: Bench) -> None:
    client = bench.submit(request("r"))
    bench.output(worker("p0"), "r", 0, [5])
    bench.output(worker("d0"), "r", 1, [6])
    bench.join("d1", Role.DECODE)
    bench.lose("d0", 1.0)
    (task,) = bench.channel.of(RequestTask, worker("d1").address)
    assert (task.attempt, task.output_tokens) == (2, [5, 6])
    bench.output(worker("d1"), "r", 2, [7, 8], DONE, now=1.0)
    assert client.tokens == [5, 6, 7, 8]
    assert bench.manager.counters["attempts_lost"] == 1


def test_without_another_worker_it_waits_and_then_fails(bench: Bench) -> None:
    client = bench.submit(request("r"))
    bench.lose("d0", 1.0)
    assert bench.manager.states() == {"queued": 1}
    wake = bench.manager.tick(1.0)
    assert wake is not None
    assert wake <= 1.0 + RETRY_WAITING_S
    bench.manager.tick(300.0)
    assert not client.finals
    bench.manager.tick(302.0)
    assert client.final.failure is not None
    assert client.final.failure.status == 503


def test_a_full_worker_is_no_failure(bench: Bench) -> None:
    client = bench.submit(request("r"))
    for now in (1.0, 3.0, 5.0, 7.0):
        bench.fail(worker("d0"), "r", Failure.turned_away("full"), now)
        bench.manager.tick(now + 1.5)
    assert not client.finals
    assert bench.manager.counters["requests_turned_away"] == 4
    assert len([e for e in bench.events.events if isinstance(e, Requeued)]) == 4


def test_failures_are_retried_up_to_the_bound(bench: Bench) -> None:
    bench.join("d1", Role.DECODE)
    client = bench.submit(request("r"))
    for _ in range(3):
        assert not client.finals
        decode = next(
            ref
            for ref in (worker("d0"), worker("d1"))
            if any(
                t.attempt == bench.attempt("r") for t in bench.channel.of(RequestTask, ref.address)
            )
        )
        bench.fail(decode, "r", Failure.unavailable("broken"))
    assert client.final.failure is not None
    assert "failed 3 times" in client.final.failure.message


def test_a_failure_that_any_worker_would_repeat_is_final(bench: Bench) -> None:
    client = bench.submit(request("r"))
    failure = Failure(status=400, error_type="BadRequestError", message="no")
    bench.fail(worker("p0"), "r", failure)
    assert client.final.failure == failure


def test_a_deadline_ends_a_request_with_408(bench: Bench) -> None:
    client = bench.submit(request("r", timeout_s=2.0))
    assert bench.manager.tick(1.9) is not None
    assert not client.finals
    bench.manager.tick(2.0)
    assert client.final.failure is not None
    assert client.final.failure.status == 408


def test_batch_work_yields_where_decode_is_full() -> None:
    bench = Bench()
    bench.join("p0", Role.PREFILL)
    bench.join("d0", Role.DECODE, max_num_seqs=1)
    batch = bench.submit(request("b", priority=Priority.BATCH))
    bench.output(worker("p0"), "b", 0, [1])
    bench.submit(request("r"))
    assert bench.manager.counters["batch_yielded"] == 1
    assert bench.manager.states() == {"prefilling": 1, "queued": 1}
    assert not batch.finals


def test_requests_move_away_from_a_worker_that_changes_its_role(bench: Bench) -> None:
    client = bench.submit(request("r"))
    bench.join("d1", Role.DECODE)
    bench.conductor.on_draining("d0")
    bench.manager.move_requests_from("d0", 1.0)
    bench.manager.check_integrity()
    assert bench.manager.counters["requests_moved"] == 1
    assert len(bench.channel.of(RequestTask, worker("d1").address)) == 1
    assert not client.finals
