"""The workers of `mooncake serve` in processes of their own: on this machine, or where a Ray
cluster places them.

Owns the supervisor.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.base import SystemIds
from mooncake.identity.credential import Credential
from mooncake.launch.cluster import report
from mooncake.launch.cluster.facts import encode_facts
from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess
from mooncake.launch.cluster.supervision.followed_load import LoadFollower, first_workers
from mooncake.launch.cluster.supervision.kept_run import KeptRun
from mooncake.launch.cluster.supervision.local_keeper import LocalKeepers
from mooncake.launch.cluster.supervision.supervisor import Make, Supervisor
from mooncake.launch.cluster.supervision.worker_handle import end_left, place_of, running
from mooncake.launch.cluster.workers import Workers, cluster_workers, own_facts
from mooncake.launch.config.plan import ServePlan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.launch.host.processes.descendants import Descendants
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.host.secrets.credentials import secret_file, write_private
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.telemetry.health import Vitals

if TYPE_CHECKING:
    from mooncake.launch.cluster.ray_machines.ray_cluster import Held

END_S = 0.5
"""Processes that are left at the end, such as Ray's helpers, get this long to end by themselves."""


class ProcessWorkers(Workers):
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
        self._supervisor: Supervisor | None = None
        self._thread: threading.Thread | None = None
        self._secret_files: list[Path] = []
        """The files in which processes of this user on this machine find the secret."""
        self._found_files: set[Path] = set()
        """Those that were there before this start. Workers of an earlier one may follow them."""
        self._own_file = Path()
        """The one that the workers follow."""
        self._settings: list[WorkerSettings] = []
        """The settings of all workers that there may be."""
        self._follower: LoadFollower | None = None
        self._held: dict[str, Held] = {}
        """Where workers of a killed start run, by Ray."""

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
        """Start, watch and end the workers, all in the supervisor's one thread."""
        try:
            supervisor = self._new_supervisor(gateway_process)
            try:
                self._started.set_result(self._start(supervisor, gateway_process, show))
            except BaseException as error:
                self._started.set_exception(error)
            else:
                supervisor.watch(self._follower)
                self._found_files.clear()
            supervisor.stop()
            self._end_left()
            # After a failed start, workers on other machines may still wait for the next one. It
            # looks for them if their secret is there.
            for file in {*self._secret_files} - self._found_files:
                file.unlink(missing_ok=True)
        finally:
            if self._following is not None:
                self._following.close()
            self._end_processes()

    def _end_processes(self) -> None:
        """End what is left of the processes that were started here."""
        with Descendants() as descendants:
            if self._config.ray_address is not None:
                from mooncake.launch.cluster.ray_machines import ray_cluster

                ray_cluster.disconnect()
            if self._forks is not None:
                self._forks.close()
            descendants.end(END_S)

    def _end_left(self) -> None:
        """End the workers of an earlier start that no supervisor has adopted, such as when this
        start fails: they would wait for one.
        """
        name = "" if self._kept is None else self._kept.name
        for each in self._settings if name else ():
            end_left(place_of(name, each.worker_id))

    def _new_supervisor(self, gateway_process: GatewayProcess) -> Supervisor:
        config = self._config
        self._supervisor = Supervisor(
            gateway_process.worker_lost,
            config.shutdown_timeout * config.headless,
            waits=config.headless,
            forks=self._forks,
            orphan_s=self._orphan_s,
        )
        if self._stopping.is_set():
            self._supervisor.give_up()
        return self._supervisor

    @property
    def _orphan_s(self) -> float:
        """How long workers wait for another supervisor: not at all if none could find them."""
        return self._config.orphan_timeout if self._kept is not None and self._kept.name else 0.0

    def _keepers(self, show: report.Show, workers: list[WorkerSettings], *, may_run: bool) -> Make:
        """Return what makes the workers' keepers: threads here, or actors of a Ray cluster.
        `may_run`: a killed start may have left some of them.
        """
        config = self._config
        name = "" if self._kept is None else self._kept.name
        run = name or SystemIds().hex(8)
        if config.ray_address is None:
            return LocalKeepers(run, self._own_file, self._orphan_s, self._forks)
        from mooncake.launch.cluster.ray_machines import ray_cluster

        show("ray", "connecting", 0, 0)
        ray_cluster.connect(config.ray_address)
        if may_run and (not config.stays_here or any(each.num_gpus for each in workers)):
            show("ray", "looking for workers", 0, 0)
            names = [each.worker_id for each in workers]
            self._held = ray_cluster.holders(running, run, names)
        groups = ray_cluster.groups_of_held(workers, self._held)
        keepers = ray_cluster.RayKeepers(
            run, self._own_file, self._orphan_s, here_only=config.stays_here,
            cpus_aside=config.follows_load and not config.stays_here, groups=groups,
        )  # fmt: skip
        show("ray", report.READY, 1, 1)
        return keepers.spread_over(workers, self._held, [*ray_cluster.nodes()])

    def _start(
        self, supervisor: Supervisor, gateway_process: GatewayProcess, show: report.Show
    ) -> list[report.WorkerRow]:
        config, plan = self._config, self._plan
        own_address = gateway_process.channel.address
        kept_file = None if self._kept is None else self._kept.secret_file
        self._own_file = kept_file or secret_file(own_address)
        self._secret_files = list({self._own_file, secret_file(own_address)})
        self._found_files = {file for file in self._secret_files if file.exists()}
        was_killed = kept_file in self._found_files
        self._keep(self._secret)
        host = machine_facts.host_name()
        every = cluster_workers(config, plan, own_address, self._secret, host)
        keepers = self._keepers(show, every, may_run=was_killed)
        self._settings = every
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
        return report.worker_rows(plan, settings, supervisor.start(settings, show, keepers))

    def _was_left(self, worker_id: str) -> bool:
        here = self._kept is not None and self._kept.has_workers([worker_id])
        return here or worker_id in self._held

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
