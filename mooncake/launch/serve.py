"""`mooncake serve`: checks, then door and workers together until a signal, then all of it down.

Owns the order of starting and stopping. What workers are made of and where they run is elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from rich.console import Console

from mooncake.api import ServedModel, load_served_model
from mooncake.api.event_loop import run_in_loop
from mooncake.base import IdSource, Role, SystemIds, Unavailable
from mooncake.launch import environment, machine_facts, report
from mooncake.launch.front import Front, listen
from mooncake.launch.plan import ServePlan, check_memory, make_plan
from mooncake.launch.settings import ServeConfig
from mooncake.telemetry.log import configure_logging

Result = TypeVar("Result")
Door = tuple[ServedModel, socket.socket]
"""What is served, and where it listens."""


class Workers(Protocol):
    """The workers of one cluster, wherever they run."""

    def start(self, front: Front, show: report.Show) -> list[report.WorkerRow]:
        """Start all workers and return when they are ready; to be called in a thread.

        Raises:
            MooncakeError: one cannot start, or `stop` was called meanwhile.
        """

    def stop(self) -> None:
        """End all workers, also those only half started. Called once, after `start` was."""

    def are_gone(self) -> bool:
        """Whether the cluster has ended without us. Asked every `WATCH_S`, in the loop's thread."""

    @property
    def join_address(self) -> str | None:
        """What `--join` takes, once started; None where nobody can join."""


JOIN_POLL_S = 0.02
WATCH_S = 1.0


def dry_run(config: ServeConfig) -> int:
    """Print what `serve` would do and return the exit code."""
    machine_facts.check_system()
    plan = make_plan(config, machine_facts.num_cores())
    report.print_plan(Console(), config, plan, machine_facts.available_bytes())
    return 0


def serve(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM and return the exit code.

    Raises:
        MooncakeError: it cannot be started; nothing is left running.
    """
    machine_facts.check_system()
    if config.role == "gateway":
        return _serve_joined(config)
    if config.joins_by_ray:
        return _join(config)
    if config.role is not None:
        from mooncake.launch import pool

        return pool.serve_alone(config)
    plan = make_plan(config, machine_facts.num_cores())
    check_memory(plan, machine_facts.available_bytes())
    if not config.headless:
        machine_facts.check_port(config.host, config.port)
    if config.colocated:
        environment.restart_with(os.environ)
    configure_logging("gateway", sys.stderr, level=config.log_level.upper())
    return _run(config, plan, lambda: _make(config, plan, SystemIds()))


def _serve_joined(config: ServeConfig) -> int:
    """Be one more gateway of a running cluster."""
    environment.prepare_ray(config.bind_host)
    from mooncake.launch.joined_gateway import JoinedCluster

    cluster = JoinedCluster(config)
    config = cluster.config
    machine_facts.check_port(config.host, config.port)
    configure_logging(cluster.gateway_id, sys.stderr, level=config.log_level.upper())
    return _run(config, cluster.plan, lambda: (cluster, cluster.open()))


def _run(config: ServeConfig, plan: ServePlan, make: Callable[[], tuple[Workers, Front]]) -> int:
    """Take the port, open the door in front of the workers, serve; no port without a door."""
    with contextlib.ExitStack() as opened:
        door: Door | None = None
        if not config.headless:
            listener = opened.enter_context(contextlib.closing(listen(config)))
            model = load_served_model(
                plan.model.path, names=config.names, max_model_len=plan.model.max_model_len
            )
            door = model, listener
        workers, front = make()
        opened.callback(front.channel.close)
        return run_in_loop(_Serving(config, front, workers, door).run())


def _make(config: ServeConfig, plan: ServePlan, ids: IdSource) -> tuple[Workers, Front]:
    if config.colocated:
        from mooncake.launch.colocated import ColocatedWorkers

        local = ColocatedWorkers(config, plan)
        return local, Front(plan, local.gateway_channel, config.names[0], ids=ids)
    environment.prepare_ray(config.bind_host)
    from mooncake.launch.ray_workers import RayWorkers
    from mooncake.rpc.zmq_channel import ZmqChannel

    secret = config.cluster_secret or ids.hex(16)
    channel = ZmqChannel(config.bind_host, secret=secret)
    return RayWorkers(config, plan, secret), Front(plan, channel, config.names[0], ids=ids)


def _join(config: ServeConfig) -> int:
    environment.prepare_ray(config.bind_host)
    configure_logging("join", sys.stderr, level=config.log_level.upper())
    from mooncake.launch import ray_workers

    return ray_workers.join(config)


class _Serving:
    """One run: door open first, workers started behind it, a signal ends both."""

    def __init__(
        self, config: ServeConfig, front: Front, workers: Workers, door: Door | None
    ) -> None:
        self._config = config
        self._front = front
        self._workers = workers
        self._door = door
        self._console = Console(stderr=True)
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._url = ""

    async def run(self) -> int:
        """Serve until a signal; raises what went wrong otherwise."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        starting = _in_thread(loop, self._start)
        # When a signal comes first, how the start ends is nobody's concern any more.
        starting.add_done_callback(lambda future: future.exception())
        door = asyncio.create_task(self._open_door())
        serving = asyncio.create_task(self._until_stopped(starting))
        watching = asyncio.create_task(self._until_gone())
        try:
            await asyncio.wait({serving, door, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stop.set()
            try:
                await door
                await serving
                await watching
            finally:
                await _in_thread(loop, self._workers.stop)
        return 0

    async def _until_gone(self) -> None:
        """Return when told to stop; raises Unavailable when the cluster has ended meanwhile."""
        while not self._stop.is_set():
            if self._workers.are_gone():
                raise Unavailable(
                    f"the cluster of {self._config.join} is gone; start again to join another"
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._stop.wait()

    async def _open_door(self) -> None:
        if self._door is None:
            await self._front.attend(self._stop)
        else:
            await self._front.serve(self._config, *self._door, self._stop, self._on_open)

    async def _until_stopped(self, starting: asyncio.Future[list[report.WorkerRow]]) -> None:
        """Wait for the workers, tell that they serve, wait for the signal."""
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not stopped.done():
            rows = starting.result()
            while not (stopped.done() or self._has_met(rows)):
                await asyncio.sleep(JOIN_POLL_S)
            self._announce(rows)
            # What was made so far stays: full collections hold up all streams, and skip it now.
            gc.collect()
            gc.freeze()
            await stopped
        if self._num_signals and self._door is not None:
            self._console.print("stopping; running requests may finish, Ctrl-C again ends them")

    def _start(self) -> list[report.WorkerRow]:
        with report.StartProgress(self._console) as show:
            return self._workers.start(self._front, show)

    def _on_open(self, host: str, port: int) -> None:
        scheme = "http" if self._config.ssl_certfile is None else "https"
        self._url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _has_met(self, rows: list[report.WorkerRow]) -> bool:
        """Whether the workers are known here and, where there is a door, it is open and they are
        all it needs.
        """
        if not self._front.knows([row.worker_id for row in rows]):
            return False
        return self._door is None or (bool(self._url) and self._front.backend.ready)

    def _announce(self, rows: list[report.WorkerRow]) -> None:
        own = report.WorkerRow(
            self._front.gateway_id,
            Role.GATEWAY,
            os.getpid(),
            machine_facts.host_name(),
            f"API at {self._url}" if self._door is not None else "no door",
        )
        self._console.print(report.started_table([own, *rows]))
        joining = self._workers.join_address
        if joining is not None:
            self._console.print(f"one more worker: mooncake serve --role ROLE --join {joining}")
        if self._door is None:
            self._console.print(f"a door: mooncake serve --role gateway --join {joining}")
            return
        self._console.print(f"a page to chat in and to watch the cluster: {self._url}/")
        self._console.print(f"serving {self._config.names[0]} on {self._url}/v1 - Ctrl-C stops")

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            self._front.end_calls()


def _in_thread(
    loop: asyncio.AbstractEventLoop, work: Callable[[], Result]
) -> asyncio.Future[Result]:
    """Run `work` in a thread that does not hold up the end of the process."""
    future: asyncio.Future[Result] = loop.create_future()

    def succeed(result: Result) -> None:
        if not future.done():
            future.set_result(result)

    def fail(error: BaseException) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(fail, error)
        else:
            loop.call_soon_threadsafe(succeed, result)

    threading.Thread(target=run, name="launch", daemon=True).start()
    return future
