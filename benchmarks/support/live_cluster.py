"""A cluster of real processes on this machine, without HTTP: workers as `mooncake serve` starts
them, the gateway's machine in a thread here, every token's time kept.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from mooncake.base import (
    CostSample,
    FinalEvent,
    FinishReason,
    GenerateRequest,
    Machine,
    OutputEvent,
    RequestOutput,
    SeededIds,
    SystemIds,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.messages import LoadReport
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment
from mooncake.launch.host.driver import Driver
from mooncake.launch.worker import process
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.worker import Worker
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.scheduler.gateway.gateway import Gateway
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.telemetry.events import EventList, Placed
from mooncake.transfer.regions import no_progress

START_S = 120.0
ANSWER_S = 300.0
POLL_S = 0.02
SEED = 7
"""The Conductor's seed: the simulated one draws the same."""


class Stream:
    """What one request brought, and when (seconds on this process' clock)."""

    def __init__(self) -> None:
        self.submitted_s = 0.0
        self.token_times_s: list[float] = []
        self.final: FinalEvent | None = None
        self.ended = threading.Event()

    def receive(self, event: OutputEvent) -> None:
        """Take in what came for the client."""
        if isinstance(event, RequestOutput):
            self.token_times_s += [time.monotonic()] * len(event.tokens)
        else:
            self.final = event
            self.ended.set()


class Overhearing:
    """The gateway's machine; what workers say of their speed is kept on the way."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.profiles: dict[str, list[CostSample]] = {}
        self.steps: dict[str, list[CostSample]] = {}
        """Worker -> its steps as measured while it served, in order."""
        self.counters: dict[str, dict[str, float]] = {}
        """Each worker's last."""

    def handle(self, event: msgspec.Struct, now: float) -> None:
        if isinstance(event, WorkerHello):
            self.profiles[event.worker.worker_id] = event.profile
        elif isinstance(event, LoadReport):
            self.steps.setdefault(event.worker.worker_id, []).extend(event.samples)
            self.counters[event.worker.worker_id] = event.load.counters
        self.gateway.handle(event, now)

    def tick(self, now: float) -> float | None:
        return self.gateway.tick(now)

    def check_integrity(self) -> None:
        self.gateway.check_integrity()


class LiveCluster:
    """Gateway here, workers in processes of their own."""

    def __init__(self, config: ServeConfig, plan: ServePlan) -> None:
        secret = SystemIds().hex(16)
        channel = ZmqChannel("127.0.0.1", credential=own_credential(secret, *CredentialRole))
        self._channel = channel
        self.events = EventList()
        ids = SeededIds(SEED)
        self.machine = Overhearing(
            Gateway(
                plan.scheduler,
                WorkerRef("gateway", "e0", channel.address),
                Conductor(plan.scheduler, ids),
                channel,
                ids,
                self.events,
            )
        )
        machine: Machine = self.machine
        self._driver = Driver(machine, channel)
        self._thread = threading.Thread(target=self._driver.run, daemon=True)
        self.settings = cluster_workers(config, plan, channel.address, secret, "host")
        self._processes: list[multiprocessing.process.BaseProcess] = []

    def start(self) -> None:
        """Start the workers one after the other: each times its steps on a machine at rest."""
        self._thread.start()
        os.environ.update(environment.missing(environment.COMPUTE, os.environ))
        context = multiprocessing.get_context("spawn")
        for each in self.settings:
            worker = context.Process(target=_work, args=(each,), daemon=True)
            worker.start()
            self._processes.append(worker)
            self._wait_for(each.worker_id)

    def _wait_for(self, worker_id: str) -> None:
        end_s = time.monotonic() + START_S
        while worker_id not in self.machine.profiles:
            if time.monotonic() > end_s or not self._processes[-1].is_alive():
                raise RuntimeError(f"{worker_id} did not come up")
            time.sleep(POLL_S)

    def submit(self, request: GenerateRequest) -> Stream:
        """Send a request; returns at once."""
        stream = Stream()

        def work(machine: Overhearing, now: float) -> None:
            stream.submitted_s = time.monotonic()
            machine.gateway.submit(request, stream.receive, now)

        self._driver.call(work).result(ANSWER_S)
        return stream

    def steps(self) -> dict[str, list[CostSample]]:
        """Return what each worker has measured of its steps while serving, up to now."""
        return {name: list(steps) for name, steps in self.machine.steps.items()}

    def placements(self) -> dict[str, Placed]:
        """Return the first placement of every request so far."""
        placed = [event for event in self.events.events if isinstance(event, Placed)]
        return {event.request_id: event for event in reversed(placed)}

    def stop(self) -> None:
        """End the workers by their pids, then the gateway."""
        for worker in self._processes:
            worker.terminate()
        for worker in self._processes:
            worker.join(ANSWER_S)
        self._driver.stop()
        self._thread.join(ANSWER_S)
        self._channel.close()


@contextmanager
def live_cluster(config: ServeConfig, plan: ServePlan) -> Iterator[LiveCluster]:
    """Run a cluster for the body."""
    cluster = LiveCluster(config, plan)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def finish(streams: list[Stream]) -> None:
    """Wait until all have ended.

    Raises:
        RuntimeError: one failed, or did not end.
    """
    for stream in streams:
        if not stream.ended.wait(ANSWER_S) or stream.final is None:
            raise RuntimeError("a request did not end")
        if stream.final.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            raise RuntimeError(f"a request ended as {stream.final.reason.value}")


def _work(settings: WorkerSettings) -> None:
    process.run(settings, progress=no_progress, started=_ignore)


def _ignore(worker: Worker) -> None:
    del worker
