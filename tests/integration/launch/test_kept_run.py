"""The name under which workers are left behind: who has one, who finds it again."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import ConfigError, Unreachable
from mooncake.launch.cluster import serve
from mooncake.launch.cluster.supervision import kept_run, process_workers
from mooncake.launch.cluster.supervision.kept_run import KeptRun
from mooncake.launch.cluster.supervision.process_workers import ProcessWorkers
from mooncake.launch.cluster.supervision.worker_handle import place_of
from mooncake.launch.config.config import resolve
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.secrets.credentials import private_dir, write_private
from tests.support.serve.plain_settings import worker_settings


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a short name, because the path of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="kept-") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield


def config(**given: object) -> ServeConfig:
    return resolve({"model": "/a/model", "port": 8000, **given}, None, {})


@pytest.mark.parametrize(
    "given",
    [{"port": 0}, {"colocated": True}, {"orphan_timeout": 0}, {"port": 0, "ray_address": "a:1"}],
)
def test_where_nobody_could_find_workers_again_they_have_no_name(given: dict[str, object]) -> None:
    with contextlib.closing(KeptRun(config(**given))) as run:
        assert (run.name, run.secret_file, run.secret()) == ("", None, None)
        assert not run.has_workers(["decode-0"])


def test_the_same_command_has_the_same_name_and_one_that_runs_keeps_it() -> None:
    first = KeptRun(config())
    assert first.name
    with contextlib.closing(KeptRun(config())) as second:
        assert second.name == "", "the first one runs"
    with contextlib.closing(KeptRun(config(port=8001))) as other:
        assert other.name not in ("", first.name)
    with contextlib.closing(KeptRun(config(headless=True))) as headless:
        assert headless.name not in ("", first.name)
    name = first.name
    first.close()
    with contextlib.closing(KeptRun(config(decode=2))) as again:
        assert again.name == name, "settings may differ: what does not fit makes way"


def test_on_a_ray_that_machines_share_each_machine_has_names_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Workers of both may be on a third one."""

    def name(**given: object) -> str:
        with contextlib.closing(KeptRun(config(**given))) as run:
            return run.name

    own = name(ray_address="a:1")
    assert name(ray_address="a:1") == own
    others = [name(), name(ray_address="a:2"), name(ray_address="a:1", port=8001)]
    monkeypatch.setattr(kept_run.machine_facts, "host_name", lambda: "another")
    others.append(name(ray_address="a:1"))
    assert len({"", own, *others}) == 6


def test_the_next_start_finds_secret_and_workers() -> None:
    run = KeptRun(config())
    assert run.secret_file is not None
    assert run.secret() is None
    write_private(run.secret_file, "hush")
    assert run.secret() == "hush"
    assert not run.has_workers(["decode-0"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as worker:
        worker.bind(str(place_of(run.name, "decode-0")))
        assert not run.has_workers(["decode-0"]), "its process has ended"
        worker.listen()
        assert run.has_workers(["prefill-0", "decode-0"])
        assert not run.has_workers(["prefill-0"])
    run.close()


def test_a_file_that_was_removed_while_its_lock_was_awaited_gives_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a third start would have the same name."""

    def removed(lock: int, how: int) -> None:
        del lock, how
        next(private_dir().glob("run-*")).unlink()

    monkeypatch.setattr(kept_run.fcntl, "flock", removed)
    with contextlib.closing(KeptRun(config())) as run:
        assert run.name == ""


def test_a_start_that_is_refused_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        assert list(private_dir().iterdir()), "it has a name"
        raise ConfigError("no memory")

    monkeypatch.setattr(serve.machine_facts, "check_system", lambda: None)
    for name in ("make_plan", "cluster_workers"):
        monkeypatch.setattr(serve, name, lambda *_: [])
    monkeypatch.setattr(serve, "check_start", refuse)
    with pytest.raises(ConfigError):
        serve.serve(config())
    assert list(private_dir().iterdir()) == []


def test_a_start_that_fails_ends_the_workers_that_it_has_not_adopted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would wait for another start."""
    ended: list[Path] = []

    class Fails:
        """A supervisor whose first worker cannot start."""

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self, *_: object) -> None:
            raise ConfigError("decode-0: no room")

        stop = give_up = lambda *_: None

    def start(workers: ProcessWorkers, supervisor: Fails, *_: object) -> None:
        workers._settings = [worker_settings(worker_id="decode-0")]
        supervisor.start()

    monkeypatch.setattr(process_workers, "end_left", ended.append)
    monkeypatch.setattr(process_workers, "Supervisor", Fails)
    monkeypatch.setattr(ProcessWorkers, "_start", start)
    monkeypatch.setattr(ProcessWorkers, "_end_processes", lambda _: None)
    nothing: Any = SimpleNamespace(worker_lost=None)
    with contextlib.closing(KeptRun(config())) as run:
        workers = ProcessWorkers(config(), nothing, "hush", nothing, kept=run)
        with pytest.raises(ConfigError, match="no room"):
            workers.start(nothing, lambda *_: None)
        workers.stop()
        assert ended == [place_of(run.name, "decode-0")]


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_start_that_fails_leaves_the_secret_that_it_has_found_and_no_other(
    monkeypatch: pytest.MonkeyPatch, *, was_killed: bool
) -> None:
    """Workers on other machines still wait, and the next start looks for them."""
    given = config(ray_address="127.0.0.1:1", bind_host="10.0.0.1")  # no Ray is there
    monkeypatch.setattr(process_workers, "cluster_workers", lambda *_: [])
    monkeypatch.setattr(ProcessWorkers, "_end_processes", lambda _: None)
    nothing: Any = SimpleNamespace(worker_lost=None)
    gateway: Any = SimpleNamespace(
        worker_lost=None, channel=SimpleNamespace(address="tcp://10.0.0.1:6400#KEY")
    )
    with contextlib.closing(KeptRun(given)) as run:
        assert run.secret_file is not None
        if was_killed:
            write_private(run.secret_file, "hush")
        workers = ProcessWorkers(given, nothing, "hush", nothing, kept=run)
        with pytest.raises(Unreachable, match="no Ray cluster"):
            workers.start(gateway, lambda *_: None)
        workers.stop()
        assert run.secret() == ("hush" if was_killed else None)
        left = [run.secret_file] if was_killed else []
        assert list(private_dir().glob("*.secret")) == left
