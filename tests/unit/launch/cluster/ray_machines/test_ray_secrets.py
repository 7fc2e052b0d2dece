"""The cluster secret stays out of Ray's store, of its calls and folders, and of what is printed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import ConfigError
from mooncake.launch.cluster.ray_machines import ray_cluster
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.host.secrets.credentials import write_private
from mooncake.launch.pool_client.session import PoolSessionConfig
from mooncake.launch.worker.settings import WorkerSettings
from tests.support.model.checkpoints import write_config_only

SECRET, TOKEN = "the cluster secret", "an admin token"


@pytest.fixture
def settings(tmp_path: Path) -> list[WorkerSettings]:
    model = write_config_only(tmp_path / "small")
    given = {"model": str(model), "admin_port": 0, "admin_token": TOKEN, "api_key": "a user's"}
    config = resolve(given, None, {})
    return cluster_workers(config, make_plan(config, 4), "tcp://127.0.0.1:1", SECRET, "here")


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("MOONCAKE_CLUSTER_SECRET", "MOONCAKE_CLUSTER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_settings_are_printed_without_secrets(settings: list[WorkerSettings]) -> None:
    session = PoolSessionConfig(
        gateway_address="tcp://pool:1", cluster_secret=SECRET, layout=settings[0].layout
    )
    printed = f"{settings} {session}"
    for secret in (SECRET, TOKEN, "a user's"):
        assert secret not in printed
    assert "decode-0" in printed
    assert "tcp://pool:1" in printed


def test_a_call_that_starts_a_worker_carries_no_secret(settings: list[WorkerSettings]) -> None:
    sent: list[Any] = []
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda *words: sent.extend(words)))
    for each in settings:
        ray_cluster.RayKeepers("a run", Path("/a/file"), 60.0)._run(actor, each)
    all_sent = b"".join(one if isinstance(one, bytes) else str(one).encode() for one in sent)
    for secret in (SECRET, TOKEN, "a user's"):
        assert secret.encode() not in all_sent


def test_a_worker_finds_the_secret_in_the_file_or_in_its_environment(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = private / "secret"
    with pytest.raises(ConfigError, match="was started without it; start Ray there with"):
        ray_cluster._secret_here(file)
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", "given")
    assert ray_cluster._secret_here(file) == ("given", None)
    (private / "mounted").write_text("mounted\n")
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET_FILE", str(private / "mounted"))
    assert ray_cluster._secret_here(file) == ("mounted", private / "mounted")
    write_private(file, "written")
    assert ray_cluster._secret_here(file) == ("written", file)
