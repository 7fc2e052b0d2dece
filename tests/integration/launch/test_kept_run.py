"""The name under which workers are left behind: who has one, who finds it again."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from mooncake.launch.cluster.kept_run import KeptRun
from mooncake.launch.cluster.worker_handle import place_of
from mooncake.launch.config.config import resolve
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.credentials import write_private


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def config(**given: object) -> ServeConfig:
    return resolve({"model": "/a/model", "port": 8000, **given}, None, {})


@pytest.mark.parametrize(
    "given", [{"port": 0}, {"colocated": True}, {"orphan_timeout": 0}, {"ray_address": "a:1"}]
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
