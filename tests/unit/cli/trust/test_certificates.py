"""`mooncake certificates`: what it writes, for whom, and what it refuses."""

from __future__ import annotations

import datetime
import json
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from mooncake.cli.main import run
from tests.support.certificates import Host, make_host
from tests.support.waiting import LONG_S

DAY = datetime.timedelta(days=1)


def certificate(path: str | Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(Path(path).read_bytes())


def test_only_their_own_user_reads_the_files(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o755)
    (tmp_path / "host" / "key.pem").write_text("old")
    (tmp_path / "host" / "key.pem").chmod(0o644)
    make_host(tmp_path, "10.0.0.7")
    files = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.pem")}
    assert {str(name) for name in files} == {
        "ca/ca.pem", "ca/ca-key.pem", "host/cert.pem", "host/key.pem", "host/ca.pem"
    }  # fmt: skip
    for path in files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "ca").stat().st_mode) == 0o700
    assert files[Path("host/ca.pem")].read_text() == files[Path("ca/ca.pem")].read_text()


def test_a_host_is_called_what_was_said_and_what_it_calls_itself(tmp_path: Path) -> None:
    host = make_host(tmp_path, "10.0.0.7", "node-7.example")
    own = certificate(host.cert)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = {str(each) for each in names.get_values_for_type(x509.IPAddress)}
    assert addresses == {"10.0.0.7", "127.0.0.1", "::1"}
    assert set(names.get_values_for_type(x509.DNSName)) == {"node-7.example", "localhost"}
    assert own.not_valid_after_utc == certificate(host.ca).not_valid_after_utc
    limits = own.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not limits.ca, "a host makes no certificates"


def shaken(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Shake hands over a socket pair; raises what went wrong at the client, else at the server."""
    ours, theirs = socket.socketpair()
    refused: list[Exception] = []

    def serve() -> None:
        with theirs:
            try:
                with server.wrap_socket(theirs, server_side=True) as wrapped:
                    wrapped.sendall(b"x")
            except OSError as error:
                refused.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, client.wrap_socket(ours, server_hostname=name) as wrapped:
            wrapped.recv(1)
    finally:
        thread.join(LONG_S)
    if refused:
        raise refused[0]


def served_by(host: Host) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(host.cert, host.key)
    context.load_verify_locations(host.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_hosts_of_one_authority_trust_each_other_under_their_names_and_nobody_else(
    tmp_path: Path,
) -> None:
    host, stranger = make_host(tmp_path / "a", "node-7"), make_host(tmp_path / "b", "node-7")
    server = served_by(host)
    for name in ("node-7", "127.0.0.1", "localhost"):
        shaken(server, host.trusting(proven=True), name)
    intruder = ssl.create_default_context(cafile=host.ca)
    intruder.load_cert_chain(stranger.cert, stranger.key)
    refused = [
        (server, host.trusting(proven=True), "node-8"),
        (server, host.trusting(), "node-7"),
        (server, intruder, "node-7"),
        (served_by(stranger), host.trusting(proven=True), "node-7"),
    ]
    for case in refused:
        with pytest.raises(ssl.SSLError):
            shaken(*case)


def test_the_strict_rules_of_x509_hold(tmp_path: Path) -> None:
    """Newer Pythons check them by default."""
    host = make_host(tmp_path)
    client = host.trusting(proven=True)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    shaken(served_by(host), client, "127.0.0.1")


def test_what_was_made_is_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "ca"
    words = ["certificates", "authority", "--out", str(place), "--days", "2", "--name", "ours"]
    assert run([*words, "--json"]) == 0
    printed = capsys.readouterr().out
    facts = json.loads(printed)
    own = certificate(place / "ca.pem")
    assert facts["files"] == [str(place / "ca.pem"), str(place / "ca-key.pem")]
    assert facts["sha256"].replace(":", "").lower() == own.fingerprint(hashes.SHA256()).hex()
    assert datetime.datetime.fromisoformat(facts["expires"]) == own.not_valid_after_utc
    assert abs(own.not_valid_after_utc - datetime.datetime.now(datetime.UTC) - 2 * DAY) < DAY / 24
    assert own.not_valid_before_utc < datetime.datetime.now(datetime.UTC) - DAY / 48
    assert "PRIVATE" not in printed
    assert "ours" in own.subject.rfc4514_string()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has an authority `ca` and a host, and what only looks like authorities."""
    make_host(tmp_path)
    monkeypatch.chdir(tmp_path)
    pairs = {
        "leaf": ("host/cert.pem", "host/key.pem"), "two": ("ca/ca.pem", "host/key.pem"),
        "empty": ("none", "none"), "words": ("said", "said"),
    }  # fmt: skip
    Path("none").write_text("")
    Path("said").write_text("hello")
    for name, (cert, key) in pairs.items():
        Path(name).mkdir()
        Path(name, "ca.pem").write_text(Path(cert).read_text())
        Path(name, "ca-key.pem").write_text(Path(key).read_text())


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("authority --out ca", "ca/ca-key.pem exists already"),
        ("authority --out new --days 0", "must be more than 0"),
        ("authority --out new --days 1e9", "is too large; give fewer days"),
        ("authority --out words/ca.pem/new", "cannot write"),
        ("host --authority nowhere --name h --out new", "has no ca.pem and ca-key.pem"),
        ("host --authority empty --name h --out new", "not a certificate and its unencrypted key"),
        ("host --authority words --name h --out new", "not a certificate and its unencrypted key"),
        ("host --authority leaf --name h --out new", "does not belong to an authority, or"),
        ("host --authority two --name h --out new", "does not belong to an authority, or"),
        ("host --authority ca --name h --out new --days 9999", "itself is valid only until"),
        ("host --authority ca --name h --out new --days -1", "must be more than 0"),
        ("host --authority ca --name hôte --out new", "nor a host name of ASCII letters"),
        ("host --authority ca --out new", "--name is missing"),
    ],
)
def test_what_makes_no_sense_is_refused(
    world: None, capsys: pytest.CaptureFixture[str], command: str, reason: str
) -> None:
    assert run(["certificates", *command.split()]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("new").exists()


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "locked"])
def test_an_authority_that_others_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    key: rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey | ec.EllipticCurvePrivateKey
    key = ec.generate_private_key(ec.SECP256R1())
    if kind == "rsa":
        key = rsa.generate_private_key(65537, 2048)
    elif kind == "ed25519":
        key = ed25519.Ed25519PrivateKey.generate()
    name, now = x509.Name([]), datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now - DAY, now + DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None if kind == "ed25519" else hashes.SHA256())
    )
    lock: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if kind == "locked":
        lock = serialization.BestAvailableEncryption(b"pass")
    pkcs8 = serialization.PrivateFormat.PKCS8
    (tmp_path / "ca.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "ca-key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, pkcs8, lock)
    )
    words = ["certificates", "host", "--authority", str(tmp_path), "--name", "h"]
    code = run([*words, "--out", str(tmp_path / "host")])
    assert code == (0 if kind == "rsa" else 2)
    if kind == "rsa":
        certificate(tmp_path / "host" / "cert.pem").verify_directly_issued_by(made)
    else:
        wanted = (
            "neither an elliptic-curve"
            if kind == "ed25519"
            else "not a certificate and its unencrypted key"
        )
        assert wanted in capsys.readouterr().err
