"""`mooncake doctor`: what it finds on machines that are made up, and a bundle without secrets."""

from __future__ import annotations

import json
import resource
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.cli import main as cli
from mooncake.launch.cluster import doctor
from mooncake.launch.config import cluster_file
from tests.support.ports import free_port

MACHINES = {"here": {"address": "127.0.0.1", "gateway": 1, "decode": 1, "kvstore": 1}}


@pytest.fixture
def join_port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The port of the gateway, at which nobody listens."""
    port = free_port()
    monkeypatch.setattr(cluster_file, "JOIN_PORT", port)
    return port


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join_port: int) -> Path:
    """The bundle of this machine, whose cluster does not run."""
    del join_port
    (tmp_path / "disk").mkdir()
    told = {
        "model": "/m", "machines": MACHINES,
        "gateway": {"api-key": ["k3y-of-the-api"]},
        "kvstore": {"ssd": f"{tmp_path}/disk:1GiB", "admin-token": ["t0ken"],
                    "ssd-encryption": True, "ssd-key-command": "kms --token c0mmand-token"},
    }  # fmt: skip
    (tmp_path / "k2.yaml").write_text(yaml.safe_dump(told))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOONCAKE_API_KEY", "from-the-environment")
    monkeypatch.setenv("OTHER_PROGRAM", "of-no-setting")
    monkeypatch.setattr(doctor, "DISK_BYTES", 2**20)
    assert cli.run(["cluster", "init", "k2.yaml"]) == 0
    monkeypatch.chdir(tmp_path / "k2" / "here")
    return tmp_path / "k2" / "here"


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    capsys.readouterr()
    code = cli.run(["doctor", *words, "--json"])
    return code, {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_a_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _, findings = found(capsys)
    assert {"system", "open files", "locked memory", "huge pages", "clock"} <= findings.keys()
    for each in findings.values():
        assert each["state"] in ("ok", "warn", "fail")
        assert bool(each["todo"]) == (each["state"] != "ok")


def test_what_the_system_says_is_shown_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = doctor.Finding(name="huge pages", state="ok", found="always [madvise] never")
    monkeypatch.setattr(doctor, "examine", lambda *_: [said])
    assert cli.run(["doctor"]) == 0
    assert "always [madvise] never" in capsys.readouterr().out


def test_a_cluster_that_does_not_run(
    folder: Path, join_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, findings = found(capsys, "k2.yaml")
    assert code == 1
    assert findings["certificate"]["state"] == findings["address"]["state"] == "ok"
    gateway = findings[f"gateway tcp://127.0.0.1:{join_port}"]
    assert (gateway["state"], gateway["found"]) == ("fail", "Connection refused")
    assert findings["members"]["found"] == (
        f"not there: decode@here, kvstore@here, gateway-here-{join_port}"
    )
    [disk] = [each for name, each in findings.items() if name.startswith("disk ")]
    assert "/s written, " in disk["found"]
    assert list(folder.parent.parent.joinpath("disk").iterdir()) == []


def test_a_disk_whose_directory_the_pool_will_make(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, disk = (folder / "k2.yaml").read_text(), folder.parent.parent / "disk"
    for directory, works in ((disk / "new", True), (disk / "not" / "mounted", False)):
        (folder / "k2.yaml").write_text(text.replace(f"{disk}:", f"{directory}:"))
        _, findings = found(capsys, "k2.yaml")
        assert (findings[f"disk {directory}"]["state"] != "fail") == works
        assert list(disk.iterdir()) == []


def test_a_bundle_of_another_machine_or_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "k2.yaml").read_text()
    (folder / "k2.yaml").write_text(text.replace("127.0.0.1", "127.0.0.9"))
    _, findings = found(capsys, "k2.yaml")
    assert findings["certificate"]["todo"] == "it is another machine's: copy the folder of here"
    (folder / "key.pem").write_text((folder.parent / "authority" / "ca-key.pem").read_text())
    _, findings = found(capsys, "k2.yaml")
    assert findings["certificate"]["state"] == "fail"
    (folder / "key.pem").unlink()
    _, findings = found(capsys, "k2.yaml")
    assert findings["certificate"]["found"].startswith("key.pem not in ")


def test_a_support_bundle_holds_no_secret(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["doctor", "k2.yaml", "--bundle", "support.tar.gz"])
    with tarfile.open("support.tar.gz") as bundle:
        content = {
            entry.name: opened.read().decode()
            for entry in bundle
            if (opened := bundle.extractfile(entry)) is not None
        }
    assert {"mooncake/doctor.json", "mooncake/cluster.json"} <= content.keys()
    assert json.loads(content["mooncake/cluster.json"])["gateway"] == {"api_key": "(set)"}
    keys = [
        line
        for file in (folder / "key.pem", folder.parent / "authority" / "ca-key.pem")
        for line in file.read_text().splitlines()[1:-1]
    ]
    secrets = [
        *(
            (folder / f"{role}.credential").read_text().partition(":")[2][:60]
            for role in ("gateway", "worker")
        ),
        (folder.parent / "authority" / "secret").read_text().strip(),
        "k3y-of-the-api", "t0ken", "c0mmand-token",
        "from-the-environment", "of-no-setting", *keys,
    ]  # fmt: skip
    assert all(secrets)
    for name, text in content.items():
        assert not [each for each in secrets if each in text], name
    assert cli.run(["doctor", "--bundle", "support.tar.gz"]) == 2, "no file is written over"


def system_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


PORT = "class/infiniband/mlx5_0/ports/1"


REACHED = "0000:0000:0000:0000:0000:ffff:0a00:0007"
UP, DOWN = "4: ACTIVE", "1: DOWN"


@pytest.mark.parametrize(
    ("state", "layer", "gid", "kind", "wanted"),
    [
        (UP, "Ethernet", REACHED, "RoCE v2", "ok, its link is up, peers reach GID 3 (10.0.0.7)"),
        (UP, "InfiniBand", "fe80" + 6 * ":0000" + ":0001", "",
         "ok, its link is up, peers reach GID 3 (fe80::1)"),
        (DOWN, "Ethernet", REACHED, "RoCE v2",
         "warn, its link is down, peers reach GID 3 (10.0.0.7)"),
        (UP, "Ethernet", REACHED, "IB/RoCE v1", "warn, its link is up, no GID that peers reach"),
        (UP, "Ethernet", "0000" + 7 * ":0000", "", "warn, its link is up, no GID that peers reach"),
    ],
)  # fmt: skip
def test_nics(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    layer: str,
    gid: str,
    kind: str,
    wanted: str,
) -> None:
    files = {"state": state, "link_layer": layer, "gids/3": gid, "gid_attrs/types/3": kind}
    sysfs = system_files(tmp_path, {f"{PORT}/{name}": text for name, text in files.items()})
    monkeypatch.setattr(doctor, "has_pyverbs", lambda: True)
    [finding] = doctor.nics(sysfs)
    assert f"{finding.state}, {finding.found}" == wanted
    monkeypatch.setattr(doctor, "has_pyverbs", lambda: False)
    first, *_ = doctor.nics(sysfs)
    assert (first.state, first.todo) == ("fail", "pip install 'mooncake-serve[rdma]'")


def test_no_huge_pages(tmp_path: Path) -> None:
    files = {"kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}
    [finding] = doctor.huge_pages(system_files(tmp_path, files))
    assert finding.state == "warn"


def test_memory_that_nics_cannot_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setattr(doctor, "list_rdma_devices", lambda: ["mlx5_0"])
    states = {each.name: each.state for each in doctor.limits()}
    assert (states["open files"], states["locked memory"]) == ("warn", "fail")
    monkeypatch.setattr(doctor, "list_rdma_devices", list)
    states = {each.name: each.state for each in doctor.limits()}
    assert states["locked memory"] == "ok"
