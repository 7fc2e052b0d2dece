"""`mooncake signer` and `mooncake enrol` over HTTP: what a process gets, and what it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from mooncake.base import ConfigError, MooncakeError, Unavailable
from mooncake.base.rights import CredentialRole
from mooncake.cli.main import run as run_command
from mooncake.identity.credential import (
    check_certificate,
    cluster_keys,
    listening_seed,
    own_credential,
)
from mooncake.launch.enrolment import PLACES, Enrolment, Signer, SignerSettings, enrol
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.telemetry.audit import configure_audit
from tests.support.certificates import Host
from tests.support.waiting import LONG_S, wait_until

NAMES = ("credential", "cert.pem", "key.pem", "ca.pem")


@pytest.fixture
def settings(tmp_path: Path) -> SignerSettings:
    (tmp_path / "secret").write_text("a secret\n")
    (tmp_path / "tokens").mkdir()
    for place in PLACES:
        (tmp_path / "tokens" / place).write_text(f"{place} ".ljust(40, "t"))
    assert run_command(["certificates", "authority", "--out", str(tmp_path / "ca")]) == 0
    return SignerSettings(
        host="127.0.0.1", port=0, cluster_secret_file=str(tmp_path / "secret"),
        tokens=str(tmp_path / "tokens"), authority=str(tmp_path / "ca"), name_prefix="one-",
        hours=1.0,
    )  # fmt: skip


@contextlib.contextmanager
def signing(settings: SignerSettings) -> Iterator[Signer]:
    signer = Signer(settings)
    try:
        yield signer
    finally:
        signer.close()


@pytest.fixture
def signer(settings: SignerSettings) -> Iterator[Signer]:
    with signing(settings) as opened:
        yield opened


def wanted(signer: Signer, tmp_path: Path, place: str, **more: object) -> Enrolment:
    given = {"token_file": str(tmp_path / "tokens" / place), "address": "127.0.0.1", **more}
    return Enrolment(signer=signer.url, place=place, out=str(tmp_path / "own" / place), **given)


@pytest.mark.parametrize("place", PLACES)
def test_each_place_gets_its_role_and_a_certificate_of_its_name(
    place: str, signer: Signer, tmp_path: Path
) -> None:
    own = tmp_path / "own" / place
    words = ["enrol", "--signer", signer.url, "--place", place, "--out", str(own)]
    assert run_command([*words, "--token-file", str(tmp_path / "tokens" / place)]) == 0
    assert {file.name: file.stat().st_mode & 0o777 for file in own.iterdir()} == dict.fromkeys(
        NAMES, 0o600
    )
    credential = own_credential((own / "credential").read_text().strip(), PLACES[place])
    certificate = credential.certificate
    assert certificate.roles == [PLACES[place]]
    assert certificate.name == f"{place} 127.0.0.1"
    assert 3500 < certificate.expires_s - time.time() < 3700
    assert check_certificate(credential.signed, cluster_keys("a secret")) == certificate
    joined = credential.listening_seed
    assert joined == (listening_seed("a secret") if place == "gateway" else None)
    host = Host(*(str(own / name) for name in NAMES[1:]))
    host.trusting(proven=True)
    read = x509.load_pem_x509_certificate((own / "cert.pem").read_bytes())
    names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(names.get_values_for_type(x509.DNSName)) == {f"one-{place}", "localhost"}


def test_a_process_goes_on_with_a_renewed_credential(
    settings: SignerSettings, signer: Signer, tmp_path: Path
) -> None:
    first = enrol(wanted(signer, tmp_path, "decode"))
    own = tmp_path / "own" / "decode"
    key = (own / "key.pem").read_bytes()
    running = own_credential((own / "credential").read_text().strip(), CredentialRole.WORKER)
    following = SecretFollower(own / "credential", running.renew, look_s=0.01)
    (tmp_path / "secret").write_text("new\na secret\n")
    second = enrol(wanted(signer, tmp_path, "decode", renew=True))
    wait_until(lambda: running.signed == second.signed, "the new credential is used")
    following.close()
    assert running.channel_seed == first.channel_seed
    assert check_certificate(running.signed, cluster_keys("new"))
    assert check_certificate(first.signed, running), "both secrets count meanwhile"
    assert (own / "key.pem").read_bytes() == key, "processes hold open what they were given"
    third = enrol(wanted(signer, tmp_path, "decode"))
    assert third.channel_seed != first.channel_seed


def test_another_token_address_or_place_gets_nothing(
    settings: SignerSettings, signer: Signer, tmp_path: Path
) -> None:
    place = tmp_path / "audit.jsonl"
    configure_audit("signer", str(place))
    gateways = str(tmp_path / "tokens" / "gateway")
    for changed, problem in (
        ({"token_file": gateways}, "not made with the token of this role"),
        ({"address": "10.9.9.9"}, "sees this process at 127.0.0.1, but others reach it at 10.9"),
        ({"token_file": str(tmp_path / "none")}, "token-file: cannot read"),
        ({"renew": True}, "out: cannot read"),
    ):
        with pytest.raises(MooncakeError, match=problem):
            enrol(wanted(signer, tmp_path, "prefill", **changed))
    with pytest.raises(ConfigError, match="'operator' is not one of gateway"):
        enrol(wanted(signer, tmp_path, "operator"))
    assert not (tmp_path / "own").exists()
    configure_audit("", None)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert [(each["event"], each["place"], each["whence"]) for each in lines] == [
        ("enrolment_refused", "prefill", "127.0.0.1"), ("enrolled", "prefill", "127.0.0.1"),
    ]  # fmt: skip
    assert "not made with the token" in lines[0]["reason"]


def test_a_changed_token_counts_at_once_and_a_short_one_never(
    settings: SignerSettings, signer: Signer, tmp_path: Path
) -> None:
    old = tmp_path / "old"
    old.write_text((tmp_path / "tokens" / "decode").read_text())
    (tmp_path / "tokens" / "decode").write_text("n" * 40)
    with pytest.raises(MooncakeError, match="not made with the token"):
        enrol(wanted(signer, tmp_path, "decode", token_file=str(old)))
    enrol(wanted(signer, tmp_path, "decode"))
    (tmp_path / "tokens" / "decode").write_text("short")
    with pytest.raises(ConfigError, match="and needs at least 32"):
        enrol(wanted(signer, tmp_path, "decode"))
    with pytest.raises(ConfigError, match="and needs at least 32"):
        Signer(settings)


def test_who_answers_in_place_of_the_signer_is_not_believed(
    settings: SignerSettings, tmp_path: Path
) -> None:
    """Its secret and authority are others, and it has not the token."""
    (tmp_path / "wrong").mkdir()
    for place in PLACES:
        (tmp_path / "wrong" / place).write_text("w" * 40)
    other = dataclasses.replace(settings, tokens=str(tmp_path / "wrong"))
    with signing(other) as false, pytest.raises(MooncakeError, match="not made with the token"):
        enrol(wanted(false, tmp_path, "decode"))


def test_a_signer_that_is_away_is_waited_for_and_files_that_are_wrong_are_named(
    settings: SignerSettings, tmp_path: Path
) -> None:
    with signing(settings) as signer:
        gone = wanted(signer, tmp_path, "decode")
    with pytest.raises(Unavailable, match="no signer answers at http://"):
        enrol(gone)
    (tmp_path / "ca" / "ca-key.pem").rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"authority: .* cannot be read"):
        Signer(settings)


def test_the_commands_serve_and_end_in_good_order(settings: SignerSettings, tmp_path: Path) -> None:
    program = str(Path(sys.executable).parent / "mooncake")
    words = ["--cluster-secret-file", settings.cluster_secret_file, "--tokens", settings.tokens]
    process = subprocess.Popen(
        [program, "signer", *words, "--port", "0", "--hours", "2"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        own = tmp_path / "clear"
        asks = ["enrol", "--signer", url, "--place", "kvstore", "--out", str(own)]
        assert run_command([*asks, "--token-file", str(tmp_path / "tokens" / "kvstore")]) == 0
        assert [file.name for file in own.iterdir()] == ["credential"], "it has no authority"
        process.terminate()
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait(LONG_S)
        process.stdout.close()


def test_probes_are_answered_and_strangers_get_nothing(signer: Signer) -> None:
    host, _, port = signer.url.rpartition("/")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=LONG_S)
    for method, path, body, status in (
        ("GET", "/health/ready", None, 200), ("POST", "/v1/enrol/decode", b"", 403),
        ("POST", "/v1/enrol/decode", b"x" * 100, 403), ("POST", "/v1/enrol/x", b"", 404),
    ):  # fmt: skip
        connection.request(method, path, body)
        response = connection.getresponse()
        assert (response.status, path) == (status, path)
        response.read()
    connection.close()


def test_there_are_the_places_that_have_a_token(settings: SignerSettings, tmp_path: Path) -> None:
    token = tmp_path / "tokens" / "head"
    aside = token.rename(tmp_path / "head")
    with signing(settings) as signer, pytest.raises(MooncakeError, match="refuses"):
        enrol(wanted(signer, tmp_path, "head", token_file=str(aside)))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="put a token into one of gateway, prefill"):
        Signer(dataclasses.replace(settings, tokens=str(empty)))
