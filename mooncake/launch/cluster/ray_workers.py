"""The workers of `mooncake serve` on Ray.

Owns the supervisor; `ray_cluster` owns Ray itself.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from pathlib import Path

from mooncake.base import MooncakeError
from mooncake.identity import Credential
from mooncake.launch.cluster import ray_cluster, report
from mooncake.launch.cluster.facts import encode_facts
from mooncake.launch.cluster.followed_load import LoadFollower, first_workers
from mooncake.launch.cluster.gateway_process import GatewayProcess
from mooncake.launch.cluster.kept_run import KeptRun
from mooncake.launch.cluster.worker_handle import end_left, place_of
from mooncake.launch.cluster.workers import Workers, cluster_workers, own_facts
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.credentials import secret_file, write_private
from mooncake.launch.host.fork_server import ForkServer
from mooncake.launch.host.secret_file import SecretFollower
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.telemetry.health import Vitals

RAY_AGAIN_S = 1.0
"""Seconds before a Ray that has ended is started again, and between two tries."""

_log = logging.getLogger(__name__)


class RayWorkers(Workers):
    """Starts and watches the workers of a cluster whose gateway is this process."""

    can_be_joined = True

    def __init__(
        self,
        config: ServeConfig,
        plan: ServePlan,
        secret: str,
        credential: Credential,
        forks: ForkServer | None = None,
        kept: KeptRun | None = None,
    ) -> None:
        """`credential` is the gateway's, made from `secret`; both follow the file of the secret.
        `forks` starts the processes of this machine and is ended at `stop`. `kept` names the
        workers, so that a later start finds them.
        """
        self._forks = forks
        self._kept = kept
        self._config = config
        self._plan = plan
        self._secret = secret
        self._credential = credential
        self._following: SecretFollower | None = None
        self._started: Future[list[report.WorkerRow]] = Future()
        self._stopping = threading.Event()
        self._supervisor: ray_cluster.Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._secret_files: list[Path] = []
        """The files in which processes of this user on this machine find the secret."""
        self._own_file = Path()
        """The one that the workers follow."""
        self._settings: list[WorkerSettings] = []
        """The settings of all workers that there may be."""
        self._follower: LoadFollower | None = None
        self._here_only = config.stays_here

    def start(self, gateway_process: GatewayProcess, show: report.Show) -> list[report.WorkerRow]:
        self._thread = threading.Thread(
            target=self._run, args=(gateway_process, show), name="supervisor", daemon=True
        )
        self._thread.start()
        return self._started.result()

    def stop(self) -> None:
        self._stopping.set()
        if self._supervisor is not None:
            self._supervisor.give_up()
        if self._thread is not None:
            self._thread.join()

    def hurry(self) -> None:
        if self._supervisor is not None:
            self._supervisor.hurry()

    def _run(self, gateway_process: GatewayProcess, show: report.Show) -> None:
        """Run the supervisor's whole life in one thread, because Ray's processes end with their
        thread.
        """
        try:
            supervisor = self._new_supervisor(gateway_process)
            try:
                self._started.set_result(self._start(supervisor, gateway_process, show))
            except BaseException as error:
                self._started.set_exception(error)
            else:
                supervisor.watch(self._follower)
                while supervisor.ray_is_gone and not self._stopping.is_set():
                    _log.error("Ray has ended here and is started again; workers serve on")
                    held = supervisor.forget()
                    ray_cluster.leave_dead_ray()
                    supervisor = self._new_supervisor(gateway_process)
                    self._resume(supervisor, held)
            supervisor.stop()
            self._end_left()
        finally:
            if self._following is not None:
                self._following.close()
            for file in self._secret_files:
                file.unlink(missing_ok=True)
            ray_cluster.disconnect(self._forks)

    def _end_left(self) -> None:
        """End the workers that no supervisor has adopted, such as when Ray does not start again:
        they would wait for one.
        """
        name = "" if self._kept is None else self._kept.name
        for each in self._settings if name else ():
            end_left(place_of(name, each.worker_id))

    def _new_supervisor(self, gateway_process: GatewayProcess) -> ray_cluster.Supervisor:
        config, kept = self._config, self._kept
        self._supervisor = ray_cluster.Supervisor(
            gateway_process.worker_lost,
            config.shutdown_timeout * config.headless,
            waits=config.headless,
            forks=self._forks,
            own_ray=config.ray_address is None,
            cpus_aside=config.follows_load and not self._here_only,
            run="" if kept is None else kept.name,
            orphan_s=config.orphan_timeout,
        )
        if self._stopping.is_set():
            self._supervisor.give_up()
        return self._supervisor

    def _resume(self, supervisor: ray_cluster.Supervisor, held: list[WorkerSettings]) -> None:
        """Start Ray again, have the supervisor adopt the workers that it held, and watch them.
        Where Ray does not start, it is tried again until `stop`.
        """
        while not self._stopping.wait(RAY_AGAIN_S):
            try:
                self._connect()
            except MooncakeError as error:
                _log.error("%s; it is tried again", error.message)
                ray_cluster.leave_dead_ray()
                continue
            supervisor.resume(held, here_only=self._here_only, secret_file=self._own_file)
            _log.info("Ray runs again")
            supervisor.watch(self._follower)
            return

    def _connect(self) -> None:
        """Start Ray, or attach to it."""
        config = self._config
        ray_cluster.connect(config.ray_address, forks=self._forks)

    def _start(
        self, supervisor: ray_cluster.Supervisor, gateway_process: GatewayProcess, show: report.Show
    ) -> list[report.WorkerRow]:
        config, plan = self._config, self._plan
        show("ray", "starting", 0, 0)
        own_address = gateway_process.channel.address
        kept_file = None if self._kept is None else self._kept.secret_file
        self._own_file = kept_file or secret_file(own_address)
        self._secret_files = list({self._own_file, secret_file(own_address)})
        self._keep(self._secret)
        self._connect()
        show("ray", report.READY, 1, 1)
        host = machine_facts.host_name()
        self._settings = cluster_workers(config, plan, own_address, self._secret, host)
        settings = first_workers(config, self._settings, self._was_left)
        if config.follows_load:
            scaling = gateway_process.gateway.scaling
            self._follower = LoadFollower(
                self._settings, lambda: scaling.advice, config.shutdown_timeout
            )
        gateway_process.gateway.facts = encode_facts(own_facts(config, plan, own_address))

        def renew(secret: str) -> None:
            self._credential.renew(secret)
            self._secret = secret
            self._keep(secret)

        self._following = SecretFollower(config.cluster_secret_file, renew)
        pids = supervisor.start(
            settings, show, here_only=self._here_only, secret_file=self._own_file
        )
        return [
            report.WorkerRow(
                each.worker_id,
                each.role,
                pids[each.worker_id],
                each.node_id,
                report.holdings(plan, each.role),
            )
            for each in settings
        ]

    def _was_left(self, worker_id: str) -> bool:
        return self._kept is not None and self._kept.has_workers([worker_id])

    def _keep(self, secret: str) -> None:
        for file in self._secret_files:
            write_private(file, secret)

    def gone(self) -> str:
        """Return why nobody watches the workers any more, or an empty text. If nobody does, they
        end with this process.
        """
        if self._stopping.is_set() or not self._started.done() or self._started.exception():
            return ""
        alive = self._thread is not None and self._thread.is_alive()
        return "" if alive else "the workers' supervisor has ended; its log says why"

    def vitals(self) -> list[Vitals]:
        if not self._started.done():
            return [Vitals(starting="the workers start")]
        return [Vitals(failure=self.gone())]
