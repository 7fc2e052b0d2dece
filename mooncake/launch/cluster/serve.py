"""`mooncake serve`: it checks everything, runs API server and workers until a signal, then ends
them all.

Owns the order of starting and stopping. Other modules know how workers are made and where they run.
Pool nodes and joining workers start here too, so the API server's imports wait until one opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from mooncake.base import IdSource, Role, SystemIds, Unavailable
from mooncake.base.rights import CredentialRole
from mooncake.launch.cluster import report
from mooncake.launch.cluster.checks import check_start
from mooncake.launch.cluster.facts import GATEWAY_ID
from mooncake.launch.cluster.log_file import new_log_file, start_log, stays_calm
from mooncake.launch.cluster.supervision.kept_run import KeptRun
from mooncake.launch.cluster.workers import Workers, cluster_workers, health_settings
from mooncake.launch.config.config import WILDCARDS
from mooncake.launch.config.plan import ServePlan, make_plan
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.health import Facts
from mooncake.launch.host.http_server import url_of
from mooncake.launch.host.processes.end_signals import EndSignals
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.host.processes.start_phases import StartPhases, importing, process_began_s
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.launch.worker.health_port import HealthPort
from mooncake.launch.worker.native_code import compiled_meanwhile
from mooncake.telemetry.audit import configure_audit

if TYPE_CHECKING:
    from mooncake.api.model import ServedModel
    from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess

    ApiServer = tuple[ServedModel, socket.socket]
    """The model that is served, and the socket at which the API server listens."""

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


OWN_STEPS = ("ray", "engine")
"""The names under which Ray, and workers of this process, show how they start."""
JOIN_POLL_S = 0.02
WATCH_S = 1.0


def dry_run(config: ServeConfig) -> int:
    """Print what `serve` would do and return the exit code.

    Raises:
        MooncakeError: `serve` would refuse.
    """
    machine_facts.check_system()
    if config.engines:
        from mooncake.launch.cluster.gateways import engine_gateway

        return engine_gateway.dry_run(config)
    if not config.model:
        words = f"the cluster at {config.join} decides what this {config.role} does"
        Console(markup=False).print(words, soft_wrap=True, highlight=False)
        return 0
    plan = make_plan(config, machine_facts.num_cores())
    report.print_plan(Console(markup=False), config, plan, machine_facts.available_bytes())
    check_start(config, plan)
    return 0


def serve(config: ServeConfig, forks: ForkServer | None = None) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code. `forks` starts the workers' processes
    on this machine.

    Raises:
        MooncakeError: the cluster cannot be started; nothing is left running.
    """
    machine_facts.check_system()
    if config.engines:
        from mooncake.launch.cluster.gateways import engine_gateway

        return engine_gateway.serve_engines(config)
    if config.role == "gateway":
        return _serve_joined(config)
    if config.role is not None:
        if config.seeds and not (config.role == "kvstore" and config.model):
            from mooncake.launch.cluster import lone_worker

            return lone_worker.serve_worker(config)
        from mooncake.launch.cluster import pool

        return pool.serve_alone(config)
    phases = StartPhases("imports", process_began_s())
    phases.begin("checks")
    plan = make_plan(config, machine_facts.num_cores())
    with contextlib.closing(KeptRun(config)) as kept, contextlib.ExitStack() as meanwhile:
        workers = cluster_workers(config, plan, "", "", machine_facts.host_name())
        check_start(config, plan, adopts=kept.has_workers(each.worker_id for each in workers))
        if not config.headless:
            machine_facts.check_port(config.host, config.port)
        if stays_calm(config) and (file := new_log_file()):
            config = dataclasses.replace(config, log_level="warning", log_file=file)
        start_log("gateway", config.log_level, config.log_format, config.log_file)
        configure_audit("gateway", config.audit_log)
        if plan.num_engines:
            meanwhile.enter_context(compiled_meanwhile(plan.options, plan.model.dtype))
        make = functools.partial(_make, config, plan, SystemIds(), forks, kept)
        return _run(config, plan, make, phases, meanwhile)


def _serve_joined(config: ServeConfig) -> int:
    """Be a gateway that starts no worker."""
    from mooncake.launch.cluster.gateways.joined_gateway import JoinedCluster

    # It may wait for the cluster, and the first process of a pod ignores what it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start_log("gateway", config.log_level, config.log_format, config.log_file)
    cluster = JoinedCluster(config)
    config = cluster.config
    machine_facts.check_port(config.host, config.port)
    start_log(cluster.gateway_id, config.log_level, config.log_format, config.log_file)
    configure_audit(cluster.gateway_id, config.audit_log)
    phases = StartPhases("joining", process_began_s())
    nothing = contextlib.ExitStack()
    return _run(config, cluster.plan, lambda: (cluster, cluster.open()), phases, nothing)


def _run(
    config: ServeConfig,
    plan: ServePlan,
    make: Callable[[], tuple[Workers, GatewayProcess]],
    phases: StartPhases,
    meanwhile: contextlib.ExitStack,
) -> int:
    """Take the port, open the API server in front of the workers, and serve. There is no port if
    there is no API server. `meanwhile` is closed once the workers have started; only their start
    needs it.
    """
    phases.begin("opening the API server")
    with importing():
        from mooncake.api.http.event_loop import run_in_loop
        from mooncake.api.model import load_served_model
        from mooncake.launch.cluster.gateways.gateway_process import check_traces, listen

    check_traces(config)
    end_with_vital_threads()
    with contextlib.ExitStack() as opened:
        api_server: ApiServer | None = None
        if not config.headless:
            listener = opened.enter_context(contextlib.closing(listen(config)))
            model = load_served_model(
                plan.model.path, names=config.names, max_model_len=plan.model.max_model_len
            )
            api_server = model, listener
        workers, gateway_process = make()
        opened.callback(gateway_process.channel.close)
        serving = _Serving(config, gateway_process, workers, api_server, phases, meanwhile)
        return run_in_loop(serving.run())


def _make(
    config: ServeConfig, plan: ServePlan, ids: IdSource, forks: ForkServer | None, kept: KeptRun
) -> tuple[Workers, GatewayProcess]:
    from mooncake.launch.cluster.gateways.gateway_process import GatewayProcess

    if config.colocated:
        from mooncake.launch.cluster.colocated import ColocatedWorkers

        local = ColocatedWorkers(config, plan)
        return local, GatewayProcess(plan, local.gateway_channel, config.names[0], ids=ids)
    if config.ray_address is not None:
        environment.prepare_ray(
            environment.variables(), here_only=config.stays_here,
            bare_lines=config.log_format == "json",
        )  # fmt: skip
    with importing():
        from mooncake.identity.credential import own_credential
        from mooncake.launch.cluster.supervision.process_workers import ProcessWorkers
        from mooncake.rpc.zmq_channel import ZmqChannel

    secret = config.cluster_secret or kept.secret() or ids.hex(16)
    credential = own_credential(secret, CredentialRole.GATEWAY, name=GATEWAY_ID)
    port = config.join_port
    own = None  # workers on other machines must reach it
    if config.ray_address is not None and config.bind_host in WILDCARDS:
        own = machine_facts.address_towards(config.ray_address)
    channel = ZmqChannel(
        config.bind_host, credential=credential, is_typed=bool(port), tells_ends=True,
        ports=(port, port) if port else config.bind_ports, advertise_host=own,
    )  # fmt: skip
    return ProcessWorkers(config, plan, secret, credential, forks, kept), GatewayProcess(
        plan, channel, config.names[0], ids=ids, has_api=not config.headless
    )


class _Serving:
    """One run: the API server opens first, workers start behind it, and a signal ends both."""

    def __init__(
        self,
        config: ServeConfig,
        gateway_process: GatewayProcess,
        workers: Workers,
        api_server: ApiServer | None,
        phases: StartPhases,
        meanwhile: contextlib.ExitStack,
    ) -> None:
        self._config = config
        self._gateway_process = gateway_process
        self._workers = workers
        self._api_server = api_server
        self._phases = phases
        self._meanwhile = meanwhile
        self._console = Console(stderr=True, quiet=config.log_format == "json", markup=False)
        self._stop = asyncio.Event()
        self._signals = EndSignals()
        self._url = ""

    async def run(self) -> int:
        """Serve until a signal. Raises what went wrong otherwise."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        starting = _in_thread(self._start)
        # When a signal comes first, the result of the start is not needed.
        starting.add_done_callback(lambda future: future.exception())
        api_server = asyncio.create_task(self._open_api_server())
        serving = asyncio.create_task(self._until_stopped(starting))
        watching = asyncio.create_task(self._until_gone())
        try:
            await asyncio.wait({serving, api_server, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            try:
                await api_server
                await serving
                await watching
            finally:
                await _in_thread(self._workers.stop)
        return 0

    async def _until_gone(self) -> None:
        """Return when told to stop. Raises Unavailable when the workers are gone before that."""
        while not self._stop.is_set():
            if why := self._workers.gone():
                raise Unavailable(why)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stop.wait()

    async def _open_api_server(self) -> None:
        if self._api_server is None:
            with contextlib.closing(self._headless_port()):
                await self._gateway_process.attend(self._stop)
        else:
            await self._gateway_process.serve(
                self._config, *self._api_server, self._stop, self._on_open, self._workers.vitals
            )

    def _headless_port(self) -> HealthPort:
        """Open the health port of a process without an API. If its loop hangs, that is only logged:
        the workers that it looks after serve on.
        """
        loop, config, own = asyncio.get_running_loop(), self._config, self._gateway_process

        def ask() -> Future[Facts]:
            answer: Future[Facts] = Future()
            facts = Facts(joined=True, draining=self._stop.is_set())
            loop.call_soon_threadsafe(answer.set_result, facts)
            return answer

        def on_stuck(why: str) -> None:
            _log.critical("%s is not live: %s; start it again", own.gateway_id, why)

        port = HealthPort(
            health_settings(config), own.gateway_id, Role.GATEWAY, limit_s=config.step_timeout,
            own_host=config.bind_host, others=self._workers.vitals, on_stuck=on_stuck,
            series=lambda: own.backend.metrics(for_operator=False),
        )  # fmt: skip
        port.health.watch(ask)
        _log.info("health at %s", port.url)
        return port

    async def _until_stopped(self, starting: asyncio.Future[list[report.WorkerRow]]) -> None:
        """Wait for the workers, report that they serve, then wait for the signal."""
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            rows = starting.result()
            self._meanwhile.close()
            self._phases.begin("meeting the workers")
            while not (stopped.done() or self._has_met(rows)):
                await asyncio.sleep(JOIN_POLL_S)
            self._phases.begin("ready")
            _log.info(self._phases.text())
            self._announce(rows)
            # What was made so far stays: full collections hold up all streams, and skip it now.
            gc.collect()
            gc.freeze()
            await stopped
        if self._signals.has_come and self._api_server is not None:
            self._say("stopping; running requests may finish, Ctrl-C again ends them")

    def _start(self) -> list[report.WorkerRow]:
        self._phases.begin("workers")
        with report.StartProgress(self._console) as show:

            def told(who: str, what: str, done: int, whole: int) -> None:
                if who in OWN_STEPS:
                    self._phases.begin(f"{who}: {what}" if what != report.READY else "workers")
                show(who, what, done, whole)

            return self._workers.start(self._gateway_process, told)

    def _on_open(self, host: str, port: int) -> None:
        self._url = url_of(host, port, "http" if self._config.ssl_certfile is None else "https")

    def _has_met(self, rows: list[report.WorkerRow]) -> bool:
        """Return whether the workers are known here. If there is an API server, it must also be
        open and need no other workers.
        """
        if not self._gateway_process.knows([row.worker_id for row in rows]):
            return False
        return self._api_server is None or (bool(self._url) and self._gateway_process.backend.ready)

    def _announce(self, rows: list[report.WorkerRow]) -> None:
        own = report.WorkerRow(
            self._gateway_process.gateway_id,
            Role.GATEWAY,
            os.getpid(),
            machine_facts.host_name(),
            f"API at {self._url}" if self._api_server is not None else "no API",
        )
        if not self._console.quiet:
            self._console.print(report.started_table([own, *rows]))
        if self._workers.can_be_joined:
            address = self._gateway_process.channel.address
            self._say(f"one more worker or gateway: mooncake serve --role ROLE --join {address}")
        if self._config.log_file:
            self._say(f"logs of these processes: {self._config.log_file}")
        if self._api_server is None:
            return
        self._say(f"talk to it: open {self._url}/ in a browser, or mooncake chat --url {self._url}")
        self._say(f"serving {self._config.names[0]} on {self._url}/v1 - Ctrl-C stops")

    def _say(self, text: str) -> None:
        """Print a line for people, or log it if machines read all lines."""
        if self._console.quiet:
            _log.info(text)
        else:
            self._console.print(text, soft_wrap=True)  # so that an address can be copied whole

    def _on_signal(self, number: int) -> None:
        self._stop.set()
        if self._signals.hurries(number):
            self._gateway_process.end_calls()
            self._workers.hurry()


def _in_thread(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Run `work` in a thread that does not delay the end of the process."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="launch", daemon=True).start()
    return asyncio.wrap_future(future)
