"""`--colocated`: API server and one engine in one process. The workers are threads of
this process, as for `LLM` and for tests of many workers at once.

Owns one thread for each worker's driver, and in-process channels and copies between them. The
machines are the same as those of workers in processes of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Sequence

from mooncake.base import MonotonicClock, MooncakeError, Role, SystemIds
from mooncake.launch.cluster import report
from mooncake.launch.cluster.facts import GATEWAY_ID
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.cluster.workers import Workers, cluster_workers
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.health import Health, Watchdog
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel
from mooncake.launch.worker.weights.open_model import open_model, read_weights
from mooncake.launch.worker.wiring import build, doze
from mooncake.launch.worker.worker import Worker
from mooncake.rpc.inproc import InprocChannel, InprocNetwork
from mooncake.telemetry.health import Vitals
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.local import InprocFabric
from mooncake.transfer.regions import Progress, no_progress

_log = logging.getLogger(__name__)

END_S = 30.0
"""Seconds after `stop` within which a driver must end; a longer step counts as stuck."""

Lost = Callable[[str], None]
"""Called with the id of a worker whose machine failed."""


class LocalCluster:
    """Starts and stops workers as threads."""

    def __init__(
        self,
        network: InprocNetwork,
        model: HeldModel,
        *,
        lost: Lost,
        progress: Progress = no_progress,
        protocols: Sequence[str] = ("inproc",),
    ) -> None:
        self._network = network
        self._protocols = protocols
        self._secret = SystemIds().hex(16)
        self._fabric = InprocFabric()
        self._model = model
        self._lost = lost
        self._progress = progress
        self._workers: dict[str, Worker] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._healths: dict[str, Health] = {}
        self._watchdog: Watchdog | None = None
        self.broken = ""
        """Why a worker cannot go on: its loop hangs, or its machine failed. Empty: all can."""
        self._num_boots = 0
        self._lock = threading.Lock()
        self._ending: set[str] = set()
        """Ids of workers that are being ended: they do not start again in another role."""

    @property
    def worker_ids(self) -> list[str]:
        """The ids of the running workers, in the order in which they were started."""
        return list(self._workers)

    def vitals(self) -> list[Vitals]:
        """Return the state of each worker, including those that failed. Any thread may call
        this.
        """
        return [health.vitals() for health in list(self._healths.values())]

    def start(self, settings: Sequence[WorkerSettings]) -> None:
        """Build the workers one after the other, then start a thread for each.

        Raises:
            MooncakeError: a worker cannot be built; those built before it are closed.
        """
        built: list[tuple[WorkerSettings, Worker]] = []
        try:
            for each in settings:
                self._progress(f"starting {each.worker_id}", 0, 0)
                built.append((each, self._build(each)))
        except BaseException:
            for _, worker in built:
                worker.close()
            raise
        for each, worker in built:
            self._workers[each.worker_id] = worker
            self._healths[each.worker_id] = health = Health(each.engine.step_timeout_s)
            worker.tell(health)
            thread = threading.Thread(
                target=self._drive, args=(each, worker), name=each.worker_id, daemon=True
            )
            self._threads[each.worker_id] = thread
            thread.start()
        if self._watchdog is None:
            self._watchdog = Watchdog(self.vitals, self._on_stuck)

    def _on_stuck(self, why: str) -> None:
        """Mark the cluster as broken: a thread cannot be ended, so the process has to end."""
        _log.critical("a worker is not live: %s; start this process again", why)
        self.broken = why

    def _build(self, settings: WorkerSettings, gateways: Sequence[str] = ()) -> Worker:
        """Return a worker; `gateways` are those that its former life knew."""
        with self._lock:
            self._num_boots += 1
            boot = f"{settings.worker_id}#{self._num_boots}"
        with contextlib.ExitStack() as opened:
            channel = InprocChannel(self._network, boot)
            opened.callback(channel.close)
            if settings.sleeps:
                return doze(settings, channel, opened, self._model, gateways)
            config = TransferConfig(secret=self._secret, host="local", protocols=self._protocols)
            transfer = open_transfer(config, boot, MonotonicClock(), fabric=self._fabric)
            opened.callback(transfer.close)
            between_processes = [name for name in self._protocols if name != "inproc"]
            return build(
                settings, channel, transfer, opened,
                model=None if settings.role is Role.KVSTORE else self._model.use(settings),
                progress=self._progress,
                rank_transfer=dataclasses.replace(config, protocols=between_processes),
            )  # fmt: skip

    def _drive(self, settings: WorkerSettings, worker: Worker) -> None:
        """Drive a worker to its end; if it was told to come back, drive its successor."""
        try:
            worker.driver.run()
            while (life := worker.next_life) is not None:
                settings = settings.next(life)
                worker.say_goodbye(settings.gateway_address)
                worker.close()  # its memory goes before its successor takes as much
                successor = self._build(settings, worker.gateways)
                with self._lock:
                    if settings.worker_id in self._ending:
                        successor.close()
                        return
                    self._workers[settings.worker_id] = successor
                worker = successor
                worker.tell(self._healths[settings.worker_id])
                worker.driver.run()
        except Exception as error:  # the driver has logged it
            told = error.message if isinstance(error, MooncakeError) else type(error).__name__
            why = f"{settings.worker_id} failed: {told}"
            self._healths[settings.worker_id].fail(why)
            self.broken = why
            self._lost(settings.worker_id)

    def stop(self) -> None:
        """End all workers and free what they hold."""
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        self._end(self.worker_ids)

    def _end(self, worker_ids: Sequence[str]) -> None:
        with self._lock:
            self._ending.update(worker_ids)
            for worker_id in worker_ids:
                self._workers[worker_id].driver.stop()
        for worker_id in worker_ids:
            thread = self._threads.pop(worker_id)
            thread.join(END_S)
            worker = self._workers.pop(worker_id)
            self._healths.pop(worker_id)
            if thread.is_alive():
                raise MooncakeError(f"{worker_id} did not stop within {END_S:.0f} s")
            worker.close()
            self._ending.discard(worker_id)


class ColocatedWorkers(Workers):
    """Runs the workers of one process as threads of it."""

    def __init__(self, config: ServeConfig, plan: ServePlan) -> None:
        self._config = config
        self._plan = plan
        self._network = InprocNetwork()
        self.gateway_channel = InprocChannel(self._network, GATEWAY_ID)
        self._cluster: LocalCluster | None = None
        self._model: HeldModel | None = None
        self._starting: Vitals | None = Vitals(starting="starting", joined=False)

    def start(self, gateway_process: GatewayProcess, show: report.Show) -> list[report.WorkerRow]:
        plan = self._plan

        def progress(what: str, done: int, whole: int) -> None:
            self._starting = Vitals(starting=what, num_done=done, num_whole=whole, joined=False)
            show("engine", what, done, whole)

        progress("importing the tensor library", 0, 0)
        dtype, options = plan.model.dtype, plan.options
        self._model = HeldModel(
            lambda path, _: open_model(path, dtype, options),
            lambda question: read_weights(question.model, options),
        )
        settings = cluster_workers(
            self._config,
            plan,
            self.gateway_channel.address,
            SystemIds().hex(16),
            machine_facts.host_name(),
        )
        self._cluster = LocalCluster(
            self._network,
            self._model,
            lost=gateway_process.worker_lost,
            progress=progress,
            protocols=("inproc", "shm") if plan.options.own_memories else ("inproc",),
        )
        self._cluster.start(settings)
        self._starting = None
        pids = dict.fromkeys(self._cluster.worker_ids, os.getpid())
        return report.worker_rows(plan, settings, pids)

    def stop(self) -> None:
        if self._cluster is not None and self._starting is None:
            self._cluster.stop()
        if self._model is not None:
            self._model.close()

    def gone(self) -> str:
        broken = "" if self._cluster is None else self._cluster.broken
        return broken and f"{broken}; start it again"

    def vitals(self) -> list[Vitals]:
        starting = self._starting
        if starting is not None or self._cluster is None:
            return [starting or Vitals(starting="starting", joined=False)]
        return self._cluster.vitals()
