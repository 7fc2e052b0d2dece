"""`mooncake credential`: what it writes, for whom, and what it refuses."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from mooncake.base.rights import CredentialRole
from mooncake.cli.main import run
from mooncake.identity.credential import Credential, cluster_keys, own_credential

SECRET = "the cluster secret"
CLIENT = CredentialRole.POOL_CLIENT


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CLUSTER_SECRET", SECRET)
    monkeypatch.delenv("MOONCAKE_CLUSTER_SECRET_FILE", raising=False)


def made(path: Path, *words: str) -> Credential:
    assert run(["credential", *words, "--out", str(path)]) == 0
    return own_credential(path.read_text().strip(), *CredentialRole)


def test_a_pool_client_is_of_one_tenant_for_so_many_days(tmp_path: Path) -> None:
    path = tmp_path / "etl.credential"
    path.write_text("old")
    path.chmod(0o644)
    credential = made(path, "--role", "pool-client", "--tenant", "acme", "--days", "2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    certificate = credential.certificate
    assert (certificate.name, certificate.roles) == ("pool-client-acme", [CLIENT])
    assert certificate.tenant == "acme"
    assert abs(certificate.expires_s - time.time() - 2 * 86_400) < 3600
    assert credential.cluster == cluster_keys(SECRET)
    assert SECRET not in path.read_text()


def test_it_is_printed_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["credential", "--role", "operator", "--name", "ops"]) == 0
    certificate = own_credential(capsys.readouterr().out.strip(), *CredentialRole).certificate
    assert (certificate.name, certificate.tenant) == ("ops", None)


def test_all_tenants_are_asked_for_by_name(tmp_path: Path) -> None:
    both = ("--role", "pool-client", "--role", "operator", "--all-tenants")
    certificate = made(tmp_path / "c", *both).certificate
    assert (certificate.tenant, set(certificate.roles)) == (None, {CLIENT, CredentialRole.OPERATOR})


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--role pool-client", "give --tenant NAME or --all-tenants"),
        ("--role pool-client --tenant a --all-tenants", "give --tenant NAME"),
        ("--role operator --tenant a", "only pool clients belong to a tenant"),
        ("--role pool-client,worker --tenant a", "make two credentials"),
        ("--role operator --days 0", "must be more than 0"),
        ("--role king", "'king' is not one of worker"),
        ("--role operator --out /nowhere/at/all", "cannot write /nowhere/at/all"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["credential", *words.split()]) == 2
    assert reason in capsys.readouterr().err


def test_only_the_secret_makes_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "operator.credential"
    made(path, "--role", "operator")
    monkeypatch.delenv("MOONCAKE_CLUSTER_SECRET")
    words = ["credential", "--role", "worker"]
    assert run([*words, "--cluster-secret-file", str(path)]) == 2
    assert run(words) == 2
    assert capsys.readouterr().err.count("a credential cannot make others") == 2
