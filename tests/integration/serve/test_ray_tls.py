"""A cluster on a Ray of its user that speaks TLS, with certificates of `mooncake certificates`: it
serves, and nobody else uses that Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.launch.cluster.ray_machines.ray_node import OwnRaylet
from mooncake.launch.host import environment
from mooncake.launch.host.processes.descendants import Descendants
from mooncake.launch.host.secrets.credentials import keep_ray_token_private
from tests.support.certificates import Host, make_host
from tests.support.ports import free_port
from tests.support.serve.server_process import STOP_S, ServerProcess, nano_checkpoint

pytestmark = pytest.mark.timeout(600)

SMALL = ("--dtype", "float32", "--kv-cache-memory-bytes", "32MiB")
PROMPT = "The quick brown fox"
DISTRUST = "do not trust each other's certificates"
IN_CLEAR = "does not answer without TLS: set RAY_USE_TLS=1"
SETTINGS = b"\x04"
"""Kind of the first frame that a server of HTTP/2 sends."""
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def tls(host: Host, ca: str = "") -> dict[str, str]:
    """Return the variables that have Ray use the certificate of a host."""
    return environment.with_ray_tls({}, host.cert, host.key, ca or host.ca)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A host of another authority."""
    return make_host(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(nano_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def address(tls_host: Host) -> Iterator[str]:
    """The address of a Ray that speaks TLS; the variables that it takes are set."""
    with pytest.MonkeyPatch.context() as patch:
        address = f"127.0.0.1:{free_port()}"
        variables = environment.with_ray(tls(tls_host), here_only=True)
        variables["MOONCAKE_CLUSTER_SECRET"] = "s" * 32  # of a worker's environment in that Ray
        for name, value in variables.items():
            patch.setenv(name, value)
        keep_ray_token_private()
        with contextlib.closing(OwnRaylet(address, "127.0.0.1", lambda: False, head=True)):
            yield address


@pytest.fixture(scope="module")
def server(model: str, address: str) -> Iterator[ServerProcess]:
    words = (*SMALL, "--port", "0", "--kvstore-dram-bytes", "32MiB", "--ray-address", address)
    with ServerProcess(model, *words) as server:
        server.wait_until_serving()
        yield server
        code, _ = server.stop()
        assert code == 0, server.output


def test_a_cluster_on_it_serves(server: ServerProcess) -> None:
    assert len(server.complete(PROMPT, 8)) == 8


def test_without_a_certificate_of_its_authority_nobody_uses_it(
    model: str, address: str, tls_host: Host, stranger: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is told at once what is wrong; Ray itself would go on asking for minutes."""
    cases: list[tuple[dict[str, str], str]] = [
        ({"RAY_USE_TLS": "0"}, IN_CLEAR),
        (tls(stranger), DISTRUST),
        (tls(stranger, tls_host.ca), DISTRUST),
    ]
    for variables, reason in cases:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with ServerProcess(model, *SMALL, "--ray-address", address) as refused:
            refused.wait_for(reason)
            assert refused.process.wait(STOP_S) == 2


def answer_of(port: int, tls: ssl.SSLContext | None) -> bytes:
    """Return what a port of Ray says to the beginning of HTTP/2; nothing: it hung up."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=STOP_S) as plain:
            if tls is None:
                plain.sendall(HTTP2)
                return plain.recv(9)
            tls.set_alpn_protocols(["h2"])
            with tls.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
                wrapped.sendall(HTTP2)
                return wrapped.recv(9)
    except (ssl.SSLError, ConnectionError):
        return b""


def test_ray_itself_talks_to_nobody_else(address: str, tls_host: Host, stranger: Host) -> None:
    intruder = ssl.create_default_context(cafile=tls_host.ca)
    intruder.load_cert_chain(stranger.cert, stranger.key)
    del address
    with Descendants(os.getpid()) as descendants:
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
