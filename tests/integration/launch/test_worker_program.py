"""The process of a worker: it outlives its supervisor, and is adopted by the next one or ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.base import Role
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.cluster.ray_machines import placed_worker
from mooncake.launch.cluster.supervision import worker_handle, worker_program
from mooncake.launch.cluster.supervision.worker_handle import (
    Begin,
    Told,
    WorkerHandle,
    connected,
    fingerprint,
    place_of,
)
from mooncake.launch.cluster.supervision.worker_program import WorkerProgram
from mooncake.launch.host import environment
from mooncake.model.options import ExpertGroup
from tests.support.serve.plain_settings import worker_settings

WAIT_S = 120.0
LONG_S = 600.0
POOL = worker_settings(
    role=Role.KVSTORE, worker_id="kvstore-0", kvstore=KvStoreConfig(dram_bytes=2**20)
)


class Supervisors:
    """Start and adopt the one worker of a run; `ended` waits for its process."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "worker"
        self._handles: list[WorkerHandle] = []
        self._pidfds: dict[int, int] = {}

    def begin(self, orphan_s: float = LONG_S, **changes: Any) -> Begin:
        settings = msgspec.structs.replace(POOL, **changes)
        return Begin(
            settings=settings, secret="hush", secret_file=None, advertise_host=None,
            fingerprint=fingerprint(settings), orphan_s=orphan_s,
        )  # fmt: skip

    def take(self, begin: Begin) -> tuple[WorkerHandle, Told]:
        """Start or adopt it; return it with what it says once it is ready, or cannot start."""
        handle = WorkerHandle(self.place, begin)
        self._handles.append(handle)
        told: Told | None = handle.first
        self._pidfds.setdefault(handle.first.pid, os.pidfd_open(handle.first.pid))
        while told is not None and not told.ready and not told.refusal:
            told = handle.receive()
        assert told is not None, "it has ended"
        return handle, told

    def ended(self, pid: int) -> bool:
        """Wait until a process has ended."""
        ready, _, _ = select.select([self._pidfds[pid]], [], [], WAIT_S)
        return bool(ready)

    def close(self) -> None:
        for descriptor in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
        for handle in self._handles:
            handle.close()


@pytest.fixture
def supervisors(tmp_path: Path) -> Iterator[Supervisors]:
    made = Supervisors(tmp_path)
    yield made
    made.close()


def test_a_ready_worker_is_adopted_by_a_supervisor_with_the_same_settings(
    supervisors: Supervisors,
) -> None:
    first, told = supervisors.take(supervisors.begin())
    first.close()
    moved = supervisors.begin(gateway_address="tcp://127.0.0.1:2", log_file="another")
    second, again = supervisors.take(moved)
    assert again.pid == told.pid, "another gateway and another log make no other worker"
    third, still = supervisors.take(moved)
    assert still.pid == told.pid
    assert second.receive() is None, "the newest supervisor takes the place of the one before"
    third.leave(0.0, waits=False)
    assert third.receive() is None
    assert supervisors.ended(told.pid)
    third.close()
    assert not supervisors.place.exists(), "nothing is left of it"


def test_a_supervisor_with_other_settings_gets_a_new_worker(supervisors: Supervisors) -> None:
    first, told = supervisors.take(supervisors.begin())
    larger = supervisors.begin(kvstore=KvStoreConfig(dram_bytes=2**21))
    second, again = supervisors.take(larger)
    assert again.pid != told.pid
    assert supervisors.ended(told.pid), "it made way"
    first.close()
    second.leave(0.0, waits=False)
    assert supervisors.ended(again.pid)


def test_a_worker_without_a_supervisor_lets_go_of_its_pipe_and_not_of_its_file(
    supervisors: Supervisors, tmp_path: Path
) -> None:
    """Who reads the pipe of a supervisor that was killed need not wait for its workers."""
    log, (reading, writing) = tmp_path / "log", os.pipe()
    kept = os.dup(1), os.dup(2)
    with log.open("ab") as file:
        os.dup2(writing, 1)
        os.dup2(file.fileno(), 2)
        try:
            handle, told = supervisors.take(supervisors.begin())
        finally:
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.close(writing)
    links = [f"/proc/{told.pid}/fd/{number}" for number in (1, 2)]
    assert os.readlink(links[0]).startswith("pipe:")
    handle.close()
    said = b"."
    while said:
        assert select.select([reading], [], [], WAIT_S)[0], "the worker holds the pipe"
        said = os.read(reading, 1 << 16)
    os.close(reading)
    assert [os.readlink(link) for link in links] == [os.devnull, str(log)]


@pytest.mark.parametrize("orphan_s", [0.0, 0.2])
def test_a_worker_that_nobody_adopts_ends(supervisors: Supervisors, orphan_s: float) -> None:
    handle, told = supervisors.take(supervisors.begin(orphan_s))
    handle.close()
    assert supervisors.ended(told.pid)


def test_a_worker_that_leaves_ends_with_its_supervisor(supervisors: Supervisors) -> None:
    """Though it would wait for another one, had it not been told to leave."""
    handle, told = supervisors.take(supervisors.begin())
    handle.leave(LONG_S, waits=True)
    handle.close()
    assert supervisors.ended(told.pid)


def test_a_worker_leaves_at_the_first_word_of_one_that_takes_it_out(
    supervisors: Supervisors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the worker of a Ray that is gone, which `mooncake up` takes out."""
    handle, told = supervisors.take(supervisors.begin())
    monkeypatch.setattr(placed_worker, "_place", {"here": supervisors.place}.get)
    assert placed_worker.held(["here"]) == {"here": ""}
    placed_worker.leave(["here"], WAIT_S, lambda: False)
    assert supervisors.ended(told.pid)
    assert placed_worker.held(["here"]) == {}
    handle.close()


def test_a_worker_that_does_not_leave_is_killed_when_hurried(
    supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = supervisors.take(supervisors.begin())
    monkeypatch.setattr(placed_worker, "_place", {"here": supervisors.place}.get)
    os.kill(told.pid, signal.SIGSTOP)
    placed_worker.leave(["here"], WAIT_S, lambda: True)
    assert supervisors.ended(told.pid)


@pytest.mark.parametrize("ready", [True, False])
def test_a_worker_that_still_loads_waits_for_no_other_supervisor(
    supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(worker_program, "_end", ended.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = WorkerProgram(listener)
        program._connection, program._begin = socket.socket(), supervisors.begin()
        program._told = Told(ready=ready)
        assert program._let_go() == LONG_S
    assert ended == ([] if ready else [1])


def test_a_worker_that_cannot_start_says_why(supervisors: Supervisors, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        health = msgspec.structs.replace(POOL.health, port=port)
        handle, told = supervisors.take(supervisors.begin(health=health))
    assert told.refusal.startswith("health-port: ")
    assert handle.receive() is None
    assert supervisors.ended(told.pid)


def test_who_started_a_process_that_does_not_listen_yet_is_not_killed(tmp_path: Path) -> None:
    """The kernel names this process, which bound the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "worker"))
        listener.listen()
        connection = connected(tmp_path / "worker")
        assert connection is not None
        with connection:
            worker_handle._kill(connection)


def stop(pid: int) -> None:
    """Stop a process; return when all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(" T " not in (task / "stat").read_text()[:64] for task in tasks.iterdir()):
        time.sleep(0.01)


def test_a_process_that_says_nothing_is_killed_and_replaced(supervisors: Supervisors) -> None:
    handle, told = supervisors.take(supervisors.begin())
    handle.close()
    stop(told.pid)
    connection = connected(supervisors.place)
    assert connection is not None
    assert worker_handle._greeted(connection, supervisors.begin(), 0.5) is None
    assert supervisors.ended(told.pid)
    _, again = supervisors.take(supervisors.begin())
    assert again.ready
    assert again.pid != told.pid


def test_a_worker_that_was_left_behind_ends_when_nobody_is_to_adopt_it(
    supervisors: Supervisors,
) -> None:
    handle, told = supervisors.take(supervisors.begin())
    handle.close()
    worker_handle.end_left(supervisors.place)
    assert supervisors.ended(told.pid)
    assert not supervisors.place.exists()
    worker_handle.end_left(supervisors.place)


def test_who_leaves_without_a_word_changes_nothing(supervisors: Supervisors) -> None:
    """Such as a start that looks whether workers were left behind."""
    handle, told = supervisors.take(supervisors.begin())
    for _ in range(3):
        looking = connected(supervisors.place)
        assert looking is not None
        looking.close()
    _, again = supervisors.take(supervisors.begin())
    assert again.pid == told.pid
    assert handle.receive() is None


def test_what_a_worker_is_depends_on_settings_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    own = fingerprint(POOL)
    elsewhere = {"cluster_secret": "s", "gateway_address": "tcp://a:1", "log_file": "f"}
    assert fingerprint(msgspec.structs.replace(POOL, **elsewhere)) == own
    assert fingerprint(msgspec.structs.replace(POOL, dtype="bfloat16")) != own
    one, again, other = (
        msgspec.structs.replace(POOL, expert_group=ExpertGroup(name=name, number=number, size=2))
        for name, number in (("decode-0 of a", 0), ("decode-0 of b", 0), ("decode-0 of a", 1))
    )
    assert fingerprint(one) == fingerprint(again), "the name has the gateway's address"
    assert len({own, fingerprint(one), fingerprint(other)}) == 3
    monkeypatch.setenv(environment.SEEN_GPUS, "1,2")
    assert fingerprint(POOL) != own


def test_a_worker_sees_the_gpus_that_its_supervisor_names(supervisors: Supervisors) -> None:
    start = partial(worker_handle.start_at, changes={"CUDA_VISIBLE_DEVICES": "5,3"})
    handle = WorkerHandle(supervisors.place, supervisors.begin(orphan_s=0.0), start)
    environ = Path(f"/proc/{handle.first.pid}/environ").read_bytes().split(b"\0")
    assert b"CUDA_VISIBLE_DEVICES=5,3" in environ
    handle.close()


def test_the_place_of_a_worker_is_short_and_its_own() -> None:
    places = {place_of(run, worker) for run in ("a", "b") for worker in ("c", "d" * 200)}
    assert len(places) == 4
    assert all(len(place.name) == len("worker-") + 16 for place in places)
