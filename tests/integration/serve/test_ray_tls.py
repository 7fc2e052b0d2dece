"""A cluster whose Ray speaks TLS, with certificates of `mooncake certificates`: it serves, those
with a certificate join it, and nobody else does."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mooncake.launch.host.descendants import Descendants
from tests.support.certificates import Host, make_host
from tests.support.serve.server_process import ServerProcess, nano_checkpoint

pytestmark = pytest.mark.timeout(600)

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "32MiB")
PROMPT = "The quick brown fox"
DISTRUST = "do not trust each other's certificates"
IN_CLEAR = "does not answer without TLS: give certificates of its authority"
SETTINGS = b"\x04"
"""Kind of the first frame that a server of HTTP/2 sends."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def flags(host: Host, ca: str = "") -> list[str]:
    return [
        "--ray-ssl-certfile", host.cert, "--ray-ssl-keyfile", host.key,
        "--ray-ssl-ca-certs", ca or host.ca,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A host of another authority."""
    return make_host(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tls_host: Host) -> Iterator[ServerProcess]:
    checkpoint = nano_checkpoint(tmp_path_factory.mktemp("model"))
    words = (*SMALL, "--port", "0", "--kvstore-dram-bytes", "32MiB", *flags(tls_host))
    with ServerProcess(str(checkpoint), *words) as server:
        server.wait_until_serving()
        yield server
        code, left = server.stop()
        assert code == 0, server.output
        assert left == []


@pytest.fixture(scope="module")
def address(server: ServerProcess) -> str:
    return server.wait_for(r"--join (\S+)").group(1)


def test_workers_with_a_certificate_join_and_gateways_need_none(
    server: ServerProcess, address: str, tls_host: Host
) -> None:
    tokens = server.complete(PROMPT, 8)
    join = ("--join", address, *flags(tls_host))
    other = server.wait_for(r"one more gateway: .* --join (\S+)").group(1)
    with (
        ServerProcess("--role", "decode", *SMALL, *join) as worker,
        ServerProcess("--role", "gateway", "--port", "0", "--join", other) as gateway,
    ):
        worker_id = worker.wait_for(r"(decode-\S+) .* has joined").group(1)
        gateway.wait_until_serving()
        gateway.wait_for_workers({"prefill-0", "decode-0", "kvstore-0", worker_id})
        assert gateway.complete(PROMPT, 8) == tokens
    assert server.complete(PROMPT, 8) == tokens


def test_without_a_certificate_of_its_authority_nobody_joins(
    server: ServerProcess, address: str, tls_host: Host, stranger: Host
) -> None:
    """Each is told at once what is wrong; Ray itself would go on asking for minutes."""
    cases: list[tuple[Sequence[str], str]] = [
        ((), IN_CLEAR),
        (flags(stranger), DISTRUST),
        (flags(stranger, tls_host.ca), DISTRUST),
    ]
    for words, reason in cases:
        with ServerProcess("--role", "decode", "--join", address, *words) as refused:
            refused.wait_for(reason, 60)
            assert refused.process.wait(60) == 2
    assert server.complete(PROMPT, 4)


def answer_of(port: int, tls: ssl.SSLContext | None) -> bytes:
    """Return what a port of Ray says to the beginning of HTTP/2; nothing: it hung up."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as plain:
            if tls is None:
                plain.sendall(HTTP2)
                return plain.recv(9)
            tls.set_alpn_protocols(["h2"])
            with tls.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
                wrapped.sendall(HTTP2)
                return wrapped.recv(9)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_ray_itself_talks_to_nobody_else(
    server: ServerProcess, tls_host: Host, stranger: Host
) -> None:
    intruder = ssl.create_default_context(cafile=tls_host.ca)
    intruder.load_cert_chain(stranger.cert, stranger.key)
    with Descendants(server.process.pid) as descendants:
        pids = [p for p in descendants.pids if comm(p) in ("gcs_server", "raylet")]
        ports = listening_ports(pids)
    assert len(pids) == 2
    assert len(ports) >= 3
    for port in ports:
        assert answer_of(port, tls_host.trusting(proven=True))[3:4] == SETTINGS
        for refused in (None, tls_host.trusting(), intruder):
            assert answer_of(port, refused)[3:4] != SETTINGS


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def listening_ports(pids: list[int]) -> set[int]:
    """Return the TCP ports that these processes listen on."""
    inodes = {
        os.readlink(entry) for pid in pids for entry in Path(f"/proc/{pid}/fd").iterdir()
        if entry.is_symlink()
    }  # fmt: skip
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
    }
