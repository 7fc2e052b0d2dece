"""`mooncake cluster init` and what `mooncake up` refuses before it starts anything."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.base import ConfigError, Role
from mooncake.base.messages import ClusterTold, WorkerRef
from mooncake.base.rights import CredentialRole
from mooncake.cli import main as cli
from mooncake.identity.certificates import names_in
from mooncake.identity.credential import PREFIX, cluster_keys, issue, listening_seed, own_credential
from mooncake.launch.cluster import up as up_module
from mooncake.launch.cluster.up import Up, own_machine
from mooncake.launch.config.cluster_file import read_cluster_file
from mooncake.launch.host.seeds import Seeds
from tests.support.model.checkpoints import write_config_only

Run = Any


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Run:
    """Makes the folders of a cluster of this machine and another one; types `up` in ours."""
    model = write_config_only(tmp_path / "small")

    def typed(*words: str, **changes: Any) -> tuple[int, str]:
        told = {
            "model": str(model),
            "machines": {
                "here": {"address": "127.0.0.1", "gateway": 1, "decode": 1, "kvstore": 1},
            },
            "settings": {"kv-cache-memory-bytes": "1MiB", "device": "cpu"},
            "kvstore": {"kvstore-dram-bytes": "1MiB"},
            **changes,
        }
        (tmp_path / "k2.yaml").write_text(yaml.safe_dump(told))
        monkeypatch.chdir(tmp_path)
        assert cli.run(["cluster", "init", "k2.yaml"]) == 0
        monkeypatch.chdir(tmp_path / "k2" / next(iter(told["machines"])))
        capsys.readouterr()
        code = cli.run(["up", "k2.yaml", *words])
        return code, capsys.readouterr().err

    return typed


def test_a_dry_run_prints_the_command_of_each_process(run: Run) -> None:
    code, said = run("--dry-run")
    assert code == 0
    first, *commands = said.splitlines()
    assert first == "here: gateway-0, decode-0, kvstore-0", "found by its address"
    assert [line.split("--role=")[1].split()[0] for line in commands] == [
        "gateway", "decode", "kvstore",
    ]  # fmt: skip


def test_a_machine_is_found_by_labels_that_are_typed_or_in_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {"address": "127.0.0.1", "gateway": 1, "decode": 1, "labels": {"rack": "r7"}}
    code, said = run("--dry-run", "--labels", "kind=h200,rack=r7", machines={"here": here})
    assert (code, said.splitlines()[0]) == (0, "here: gateway-0, decode-0")
    monkeypatch.setenv("MOONCAKE_LABELS", "rack=r8")
    code, said = run("--dry-run", machines={"here": here})
    assert code == 2
    assert "none of its machines fits the labels rack=r8: here (rack=r7)" in " ".join(said.split())


@pytest.mark.parametrize(
    ("name", "given", "found"),
    [
        (None, ["rack=r1"], "a"),
        (None, ["rack=r1", "zone=z"], "a"),
        (None, ["kind=h200", "rack=r2"], "none of its machines fits the labels kind=h200,rack=r2"),
        (None, ["kind=h200", "rack=r1"], "several machines fit .*: a .rack=r1., b .kind=h200,rack"),
        ("b", ["rack=r1"], "b"),
    ],
)
def test_the_machine_fits_all_of_whose_labels_are_given(
    tmp_path: Path, name: str | None, given: list[str], found: str
) -> None:
    machines: dict[str, Any] = {
        "a": {"address": "192.0.2.1", "gateway": 1, "decode": 1, "labels": {"rack": "r1"}},
        "b": {"address": "192.0.2.2", "kvstore": 1, "labels": "rack=r1,kind=h200"},
        "c": {"address": "192.0.2.3", "kvstore": 1},
    }
    file = tmp_path / "k2.yaml"
    file.write_text(yaml.safe_dump({"model": "/m", "machines": machines}))
    cluster = read_cluster_file(str(file))
    if found in machines:
        assert own_machine(cluster, name, given).name == found
        return
    with pytest.raises(ConfigError, match=found):
        own_machine(cluster, name, given)


def test_what_is_made_once_stays_and_is_private(run: Run, tmp_path: Path) -> None:
    run("--dry-run")
    place = tmp_path / "k2"
    before = {file: file.read_bytes() for file in place.rglob("*") if file.is_file()}
    more = {"here": {"address": "127.0.0.1", "gateway": 1, "decode": 1}}
    run("--dry-run", machines=more, settings={})
    for file, content in before.items():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0 or file.suffix == ".yaml", file
        assert file.read_bytes() == content or file.suffix == ".yaml", file
    assert set(names_in((place / "here" / "cert.pem").read_text())) >= {"127.0.0.1", "here"}


def test_addresses_of_ipv6_stand_in_brackets_where_something_follows(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--dry-run", machines={"a": {"address": "fd00::7", "gateway": 1, "decode": 1}})
    assert cli.run(["cluster", "init", "k2.yaml", "--out", "all"]) == 0
    copying = " ssh fd00::7 mkdir -pm 700 k2 && scp all/a/* '[fd00::7]:k2'\n"
    assert copying in capsys.readouterr().out
    cluster, said = read_cluster_file("k2.yaml"), list[str]()
    here = [(Role.DECODE, "a"), (Role.GATEWAY, "gateway-a-6400")]
    told = ClusterTold(asker=WorkerRef("up", "e1", ""), ticket=1, facts=b"", members=here)
    Up(cluster, cluster.machines[0], [], said.append)._tell([told])
    assert said == ["all processes of k2.yaml are here: https://[fd00::7]:8000/v1"]


def test_machines_on_which_ray_places_workers_share_a_token(run: Run, tmp_path: Path) -> None:
    machines: dict[str, Any] = {
        "here": {"address": "127.0.0.1", "gateway": 1},
    }
    code, said = run("--dry-run", machines=machines, ray={"decode": 2})
    assert code == 0, said
    node = said.splitlines()[-1]
    assert node == "mooncake up k2.yaml --machine=here --ray-node"
    token = tmp_path / "k2" / "here" / "ray.token"
    assert token.read_text() == (tmp_path / "k2" / "authority" / "ray.token").read_text()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    longer = {"max-model-len": 4096}
    code, said = run("--dry-run", machines=machines, ray={"decode": 2}, decode=longer)
    assert code == 2
    assert "decode-0 of here: " in said, "what Ray may place there has to fit"
    run("--dry-run")
    assert not token.exists(), "nothing is placed any more"


def test_what_ray_has_placed_gets_the_time_of_its_roles_to_end(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def ends_at_once(up: Up, seeds: Seeds, limit_s: float) -> int:
        limits.append(limit_s)
        return 0

    monkeypatch.setattr(Up, "run", ends_at_once)
    code, said = run(
        machines={"here": {"address": "127.0.0.1", "gateway": 1}},
        ray={"prefill": 1, "decode": 1}, decode={"shutdown-timeout": 120},
    )  # fmt: skip
    assert (code, limits) == (0, [120.0]), said


def test_a_machine_with_another_address_gets_another_certificate(run: Run, tmp_path: Path) -> None:
    run("--dry-run")
    credential = (tmp_path / "k2" / "here" / "worker.credential").read_text()
    moved = {"here": {"address": "127.0.0.2", "gateway": 1, "decode": 1}}
    code, said = run("--dry-run", machines=moved)
    assert code == 0, said
    assert "127.0.0.2" in names_in((tmp_path / "k2" / "here" / "cert.pem").read_text())
    assert (tmp_path / "k2" / "here" / "worker.credential").read_text() == credential


def test_a_machine_holds_credentials_of_its_own_roles_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no secret. One of a role that it no longer has goes, and so does one of an old secret."""
    place, gateway, worker = tmp_path / "k2", CredentialRole.GATEWAY, CredentialRole.WORKER
    monkeypatch.chdir(tmp_path)

    def held(**machines: dict[str, Any]) -> dict[str, list[CredentialRole]]:
        told = {
            name: {"address": f"192.0.2.{number}", **counts}
            for number, (name, counts) in enumerate(machines.items(), 1)
        }
        Path("k2.yaml").write_text(yaml.safe_dump({"model": "m", "machines": told}))
        assert cli.run(["cluster", "init", "k2.yaml"]) == 0
        secret = (place / "authority" / "secret").read_text()
        found: dict[str, list[CredentialRole]] = {name: [] for name in machines}
        for name in machines:
            for file in sorted((place / name).iterdir()):
                text = file.read_text()
                assert secret not in text
                if text.startswith(PREFIX):
                    credential = own_credential(text, *CredentialRole)
                    assert credential.cluster == cluster_keys(secret)
                    assert (credential.listening_seed is None) == (file.name[0] == "w")
                    found[name] += credential.certificate.roles
        return found

    api, both, pool = {"gateway": 2}, {"gateway": 1, "decode": 1}, {"kvstore": 1}
    assert held(a=api, b=both, c=pool) == {"a": [gateway], "b": [gateway, worker], "c": [worker]}
    before = (place / "c" / "worker.credential").read_text()
    assert held(a=api, b={"decode": 1}, c=pool) == {"a": [gateway], "b": [worker], "c": [worker]}
    assert (place / "c" / "worker.credential").read_text() == before
    (place / "authority" / "secret").unlink()
    assert held(a=api, b=both, c=pool)["c"] == [worker]
    assert (place / "c" / "worker.credential").read_text() != before


def test_processes_that_run_take_the_credentials_of_a_new_secret(run: Run, tmp_path: Path) -> None:
    """`cluster init` makes them for the same keys, and also those that have expired."""
    run("--dry-run")
    folder, file = tmp_path / "k2" / "here", tmp_path / "k2" / "authority" / "secret"
    held = {
        path: own_credential(path.read_text(), *CredentialRole)
        for path in folder.glob("*.credential")
    }
    old, new = file.read_text(), "new"
    for secrets in ((old, new), (new, old), (new,)):
        file.write_text("\n".join(secrets))
        run("--dry-run")
        for path, credential in held.items():
            credential.renew(path.read_text())
            assert list(credential.clusters) == [cluster_keys(each) for each in secrets]
            if path.name.startswith("gateway"):
                assert credential.listening_seed == listening_seed(secrets[0])
    [(path, credential), (other, _)] = held.items()
    [role] = credential.certificate.roles
    over = issue(new, "over", [role], expires_s=1.0, keys=credential.keys)
    path.write_text(over.text)
    other.unlink()
    run("--dry-run")
    credential.renew(path.read_text())
    assert credential.certificate.expires_s > 1.0
    assert own_credential(other.read_text(), *CredentialRole).keys.seed != held[other].keys.seed


def test_up_follows_the_credential_of_its_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else gateways refuse it once the old secret is gone, and it says that everything is away."""
    followed: list[tuple[str, Callable[[str], None]]] = []

    class Follower:
        def __init__(self, file: str, use: Callable[[str], None]) -> None:
            followed.append((file, use))

        def close(self) -> None:
            closed.append(self)

    closed: list[Follower] = []

    def rotate(up: Up, seeds: Seeds, limit_s: float) -> int:
        [(name, use)] = followed
        file = tmp_path / "k2" / "here" / name
        before = own_credential(file.read_text(), *CredentialRole)
        own = issue("another", "here", before.certificate.roles, keys=before.keys)
        use(own.text)
        proven.append(list(seeds._credential.clusters) == [cluster_keys("another")])
        return 0

    proven: list[bool] = []
    monkeypatch.setattr(up_module, "SecretFollower", Follower)
    monkeypatch.setattr(Up, "run", rotate)
    code, said = run()
    assert (code, proven, len(closed)) == (0, [True], 1), said


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        (["--machine", "x"], {}, "x is none of its machines: here (127.0.0.1)"),
        (
            [],
            {"machines": {"far": {"address": "192.0.2.1", "gateway": 1, "decode": 1}}},
            "none of their addresses is one of this machine",
        ),
        ([], {"model": "nowhere"}, "model: nowhere is not a directory on here; copy"),
        ([], {"kvstore": {"kvstore-dram-bytes": "90TiB"}}, "kvstore-0 90 TiB): run fewer there"),
        ([], {"decode": {"max-model-len": "9999k"}}, "decode-0 of here: max-model-len: "),
        ([], {"decode": {"all2all-backend": "deepep_low_latency"}}, "here: all2all-backend=deep"),
        ([], {"decode": {"device": "cuda"}}, "here has 0 GPUs, and the ranks of its"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Run, words: list[str], changes: dict[str, Any], message: str
) -> None:
    code, said = run(*words, **changes)
    assert code == 2
    assert message in " ".join(said.split())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_takes_the_unit_of_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "several-machines.md").read_text()
    [unit] = re.findall(r"(?:^    .*\n)*^    \[Service\]\n(?:^    .*\n)*", page, re.MULTILINE)
    program = "/usr/local/bin/mooncake"
    assert program in unit
    here = Path(sys.executable).parent / "mooncake"
    for wrong in ("", "LimitMEMLOKC=1\n"):  # a word that systemd does not know is a complaint
        file = tmp_path / f"mooncake{len(wrong)}.service"
        file.write_text(textwrap.dedent(unit.replace(program, str(here))) + wrong)
        told = subprocess.run(
            ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
        )
        assert (told.returncode, told.stderr + told.stdout) == (0, "") or wrong
        assert not wrong or "LimitMEMLOKC" in told.stderr


def test_a_folder_without_its_credential_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--dry-run")
    (tmp_path / "k2" / "here" / "worker.credential").unlink()
    assert cli.run(["up", "k2.yaml"]) == 2
    assert "worker.credential: it is not beside k2.yaml" in capsys.readouterr().err
