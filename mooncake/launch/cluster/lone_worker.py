"""Runs one worker in this process, or has a group that shares its experts run. What runs the
command starts it again: systemd, a kubelet, `mooncake up` or a person.

Owns signals and the order of ending. `joining` makes the worker's settings, or `pool` those of a
pool node.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from mooncake.base import InternalError, MooncakeError, Role
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import own_credential
from mooncake.launch.cluster import report
from mooncake.launch.cluster.facts import facts_of_seeds, joining_secret
from mooncake.launch.cluster.log_file import start_log
from mooncake.launch.cluster.supervision.local_keeper import LocalKeepers
from mooncake.launch.cluster.supervision.supervisor import Supervisor
from mooncake.launch.cluster.workers import await_stages, joining_workers
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.processes.end_signals import EndSignals
from mooncake.launch.host.processes.vital_threads import end_with_vital_threads
from mooncake.launch.pool_node import node_lock
from mooncake.launch.worker import process
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.worker import Worker
from mooncake.scheduler.gateway.status import shown_address
from mooncake.telemetry.audit import configure_audit
from mooncake.transfer.regions import Progress


def serve_worker(config: ServeConfig) -> int:
    """Be one worker of the cluster at `config.seeds`, or several that share their experts, until a
    signal; return the exit code. On the first signal the worker leaves once others do its work; on
    the second it leaves at once.

    Raises:
        MooncakeError: no gateway answers, the worker cannot start, or the cluster gave it up.
    """
    assert config.role is not None
    start_log(config.role, config.log_level, config.log_format, config.log_file)
    configure_audit(config.role, config.audit_log)
    # It may wait for the cluster, and the first process of a pod ignores what it does not handle.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    secret = joining_secret(config)
    credential = own_credential(secret, CredentialRole.WORKER)
    facts = facts_of_seeds(config, credential)
    settings, *sharers = joining_workers(config, facts, secret)
    await_stages(settings, credential, config.join_timeout, threading.Event())
    console = Console(stderr=True, markup=False)
    with contextlib.ExitStack() as opened:
        if settings.role is Role.KVSTORE:
            settings = msgspec.structs.replace(settings, worker_id=f"kvstore-{settings.node_id}")
            lock = node_lock.lock_name(settings.worker_id, settings.node_id, config.seeds[0])
            opened.enter_context(contextlib.closing(lock))
        bars = opened.enter_context(contextlib.ExitStack())
        show = bars.enter_context(report.StartProgress(console))

        def say(worker_id: str, pid: int, does: str) -> None:
            bars.close()
            console.print(
                f"{worker_id} (pid {pid}) {does}; Ctrl-C takes it out",
                soft_wrap=True, highlight=False,
            )  # fmt: skip

        seeds = ", ".join(map(shown_address, config.seeds))

        if sharers:
            run_group(config, [settings, *sharers], show, say)
            return 0

        def started(worker: Worker) -> None:
            name, does = settings.worker_id, "sleeps" if worker.sleeps else "serves"
            say(name, os.getpid(), f"waits for a gateway at {seeds}")
            worker.once_joined(lambda: say(name, os.getpid(), does))

        run_worker(config, settings, lambda *progress: show(settings.worker_id, *progress), started)
    return 0


def run_group(
    config: ServeConfig,
    group: Sequence[WorkerSettings],
    show: report.Show,
    say: Callable[[str, int, str], None],
) -> None:
    """Be these workers, which share their experts, each in a process of its own, until a signal.
    Then they leave, which takes `shutdown_timeout` at most; a second signal ends them now. What
    they do is told to `say` once all have started.

    Raises:
        MooncakeError: one cannot start, or has ended by itself; then all end.
    """
    ended: list[str] = []
    stops = threading.Event()
    signals = EndSignals()
    supervisor = Supervisor(ended.append, config.shutdown_timeout, waits=True)

    def on_signal(number: int, _frame: object) -> None:
        if signals.hurries(number):
            supervisor.hurry()
        stops.set()
        supervisor.give_up()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    file = config.cluster_secret_file
    own_file = None if file is None else Path(file).absolute()
    keepers = LocalKeepers(f"group {os.getpid()}", own_file, 0.0, None)
    try:
        for worker_id, pid in supervisor.start([*group], show, keepers).items():
            say(worker_id, pid, "has started")
        ended.clear()  # who died while it was starting has come again
        supervisor.watch(go_on=lambda: not ended)
        if ended:
            supervisor.hurry()  # the others cannot serve without it
    except MooncakeError:
        if not stops.is_set():
            raise
    finally:
        supervisor.stop()
    if ended:
        raise InternalError(f"{ended[0]} has ended, and with it those that share its experts")


def run_worker(
    config: ServeConfig,
    settings: WorkerSettings,
    progress: Progress,
    started: Callable[[Worker], None],
) -> None:
    """Run the worker in this process until a signal arrives. The worker then leaves the cluster,
    within `shutdown_timeout`: an engine serves until others have taken its place, and a pool node
    hands its blocks on. A second signal ends it at once.

    Raises:
        MooncakeError: the worker cannot start, or the cluster gave it up.
    """
    end_with_vital_threads()
    signals = EndSignals()

    def begun(worker: Worker) -> None:
        def on_signal(number: int, _frame: object) -> None:
            is_first, hurries = not signals.has_come, signals.hurries(number)
            if not (is_first or hurries):
                return
            limit_s = 0.0 if hurries else config.shutdown_timeout
            if limit_s:
                print(f"{settings.worker_id} leaves; Ctrl-C again ends it at once", file=sys.stderr)
            # A thread calls `leave`: the interrupted loop may hold the lock that it takes.
            leave = threading.Thread(
                target=worker.leave, args=(limit_s,), kwargs={"waits": True}, daemon=True
            )
            leave.start()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        started(worker)

    process.run(settings, progress=progress, started=begun, secret_file=config.cluster_secret_file)
