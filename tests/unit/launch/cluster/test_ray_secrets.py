"""The cluster secret stays out of Ray's store, of its calls and folders, and of what is printed."""

from __future__ import annotations

import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.base import ConfigError, Forbidden
from mooncake.base.rights import CredentialRole
from mooncake.identity import cluster_keys, own_credential
from mooncake.launch.cluster import facts as facts_module
from mooncake.launch.cluster import ray_cluster
from mooncake.launch.cluster.facts import ClusterFacts, NotUp, sealed_facts, when_up
from mooncake.launch.cluster.workers import cluster_workers
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import make_plan
from mooncake.launch.host.credentials import secret_file, write_private
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
def told(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What workers in Ray say."""
    found: list[bytes] = []
    monkeypatch.setattr(ray_cluster, "_told", lambda: iter(found))
    return found


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in ("MOONCAKE_CLUSTER_SECRET", "MOONCAKE_CLUSTER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write_facts(
    told: list[bytes], settings: list[WorkerSettings], role: CredentialRole = CredentialRole.GATEWAY
) -> None:
    config = resolve({"model": settings[0].model}, None, {})
    facts = ClusterFacts(
        gateway_address="tcp://127.0.0.1:1", worker=settings[-1],
        scheduler=make_plan(config, 4).scheduler, names=["small"],
    )  # fmt: skip
    told[:] = [sealed_facts(facts, own_credential(SECRET, role))]


def test_facts_hold_no_secret_and_are_read_only_with_it(
    settings: list[WorkerSettings], told: list[bytes]
) -> None:
    write_facts(told, settings)
    assert SECRET.encode() not in told[0]
    found = ray_cluster.read_facts(cluster_keys(SECRET))
    assert (found.worker.cluster_secret, found.worker.model) == ("", settings[0].model)
    with pytest.raises(Forbidden, match="not the secret of that cluster"):
        ray_cluster.read_facts(cluster_keys("another"))


def test_facts_of_a_workers_credential_do_not_count(
    settings: list[WorkerSettings], told: list[bytes]
) -> None:
    write_facts(told, settings, CredentialRole.WORKER)
    with pytest.raises(Forbidden, match="is of no gateway"):
        ray_cluster.read_facts(cluster_keys(SECRET))


def test_settings_are_printed_without_secrets(settings: list[WorkerSettings]) -> None:
    session = PoolSessionConfig(
        gateway_address="tcp://pool:1", cluster_secret=SECRET, layout=settings[0].layout
    )
    printed = f"{settings} {session}"
    for secret in (SECRET, TOKEN, "a user's"):
        assert secret not in printed
    assert "decode-0" in printed
    assert "tcp://pool:1" in printed


def test_altered_facts_are_refused(settings: list[WorkerSettings], told: list[bytes]) -> None:
    write_facts(told, settings)
    told[0] = told[0].replace(b"tcp://127.0.0.1:1", b"tcp://127.0.0.9:1")
    with pytest.raises(Forbidden, match="or the answer of its first process was altered"):
        ray_cluster.read_facts(cluster_keys(SECRET))


def test_a_call_that_starts_a_worker_carries_no_secret(settings: list[WorkerSettings]) -> None:
    sent: list[Any] = []
    actor = SimpleNamespace(run=SimpleNamespace(remote=lambda *words: sent.extend(words)))
    for each in settings:
        ray_cluster._call_run(actor, each, "/a/file", "a run", 60.0)
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


def test_a_joining_process_must_have_the_secret_or_be_of_the_same_user_here(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del private
    monkeypatch.setattr(ray_cluster, "reach", lambda _: None)
    with pytest.raises(ConfigError, match="cluster-secret: the cluster at h:1"):
        ray_cluster.cluster_secret("h:1", None)
    assert ray_cluster.cluster_secret("h:1", "given") == "given"
    write_private(secret_file("h:1"), "kept")
    assert ray_cluster.cluster_secret("h:1", None) == "kept"


def test_ray_runs_in_a_folder_of_this_user_alone(
    private: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, Any]] = []
    monkeypatch.setenv("HOME", str(private))
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **options: started.append(options))
    ray_cluster.connect(None, "127.0.0.1")
    [options] = started
    place = Path(options["_temp_dir"])
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    longest = "/session_2026-11-22_06-42-33_123456_1234567/sockets/plasma_store"
    monkeypatch.delenv("RAY_TMPDIR")
    assert len(str(ray_cluster.private_dir()) + longest) < 107, "the limit of a socket's path"


def test_a_cluster_that_is_not_up_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, told: list[bytes], private: Path,
    settings: list[WorkerSettings],
) -> None:  # fmt: skip
    monkeypatch.setattr(facts_module, "ASK_AGAIN_S", 0.0)
    cluster = cluster_keys(SECRET)
    asked = 0

    def ask() -> ClusterFacts:
        nonlocal asked
        asked += 1
        if asked == 3:
            write_facts(told, settings)
        return ray_cluster.read_facts(cluster)

    assert when_up(ask, 600).names == ["small"]
    assert asked == 3
    told.clear()
    with pytest.raises(NotUp, match="no server in this Ray cluster"):
        when_up(lambda: ray_cluster.read_facts(cluster), 0)
    stop = threading.Event()
    stop.set()
    with pytest.raises(NotUp):
        when_up(lambda: ray_cluster.read_facts(cluster), 600, stop)


def test_another_clusters_secret_is_no_reason_to_wait(
    told: list[bytes], private: Path, settings: list[WorkerSettings]
) -> None:
    write_facts(told, settings)
    with pytest.raises(Forbidden, match="it is not the secret of that cluster") as refusal:
        when_up(lambda: ray_cluster.read_facts(cluster_keys("another")), 600)
    assert not isinstance(refusal.value, NotUp)
