"""A pool node's HTTP API server: who may do what, and what it says of a node that does not
answer."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import ConfigError, Drain, MooncakeError, Tier, WorkerLoad, WorkerRef
from mooncake.base.pool_messages import PoolState, TenantUse
from mooncake.base.rights import CredentialRole
from mooncake.base.tls_files import TlsFiles
from mooncake.identity.credential import issue, own_credential
from mooncake.kvstore.node.blocks import COUNTERS
from mooncake.launch.host.families import render
from mooncake.launch.host.health import Facts, Health
from mooncake.launch.host.http_client import Client
from mooncake.launch.host.http_server import MAX_BODY_BYTES, MAX_CONNECTIONS
from mooncake.launch.host.secrets.credentials import sign_request
from mooncake.launch.pool_client.session import locate
from mooncake.launch.pool_node import metrics as pool_metrics
from mooncake.launch.pool_node.admin import AdminSettings, PoolAdmin
from tests.support.certificates import Host
from tests.support.waiting import LONG_S

SECRET = "the cluster secret"
OPERATOR = CredentialRole.OPERATOR
HELD = own_credential(SECRET, OPERATOR)

NODE = WorkerRef("kv-0", "e", "tcp://h:1")
STATE = PoolState(
    asker=NODE, ticket=0, store=NODE,
    load=WorkerLoad(num_total_blocks=10, num_free_blocks=4, counters={"puts": 3.0}),
    layout_fingerprint="f", block_bytes=4096, num_ssd_blocks=7, num_hard_pinned=2,
    tenants=(TenantUse("alice", Tier.DRAM, 2, 5), TenantUse("alice", Tier.SSD, 4, 4)),
)  # fmt: skip


ADDRESS = {"segment": ["boot", {"tcp": "h:2"}, "host"], "block_bytes": 4096}


class Node:
    """What the driver drives."""

    def __init__(self) -> None:
        self.drained = 0
        self.shown = STATE
        self.joined = True

    def state(self) -> PoolState:
        return self.shown

    def handle(self, event: Any, now: float) -> None:
        assert isinstance(event, Drain)
        self.drained += 1


class Driver:
    """Calls at once, or never."""

    def __init__(self) -> None:
        self.node = Node()
        self.ended = False

    def call(self, work: Callable[[Any, float], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.ended:
            future.cancel()
        else:
            future.set_result(work(self.node, 0.0))
        return future


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def api_server(driver: Driver) -> Iterator[PoolAdmin]:
    health = Health(60.0)
    health.watch(lambda: driver.call(lambda node, _: Facts(node.joined, node.shown.draining)))

    def metrics() -> bytes:
        return render(pool_metrics.node_families(driver.node.shown))

    settings = AdminSettings(token_digests=[sha256(key).digest() for key in (b"another", b"key")])
    about = {"node_id": "n", **ADDRESS}
    opened = PoolAdmin(settings, HELD.cluster, driver, about, health, metrics)  # type: ignore[arg-type]
    yield opened
    opened.close()


def ask(api_server: PoolAdmin, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
    parts = urllib.parse.urlsplit(api_server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=LONG_S)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    is_json = reply.headers["Content-Type"] == "application/json"
    return reply.status, json.loads(body) if is_json else body.decode()


def test_health_and_metrics_need_no_credential(api_server: PoolAdmin, driver: Driver) -> None:
    assert ask(api_server, "/health") == (200, {"status": "ok"})
    driver.node.shown = PoolState(
        asker=NODE, ticket=0, store=NODE, load=STATE.load, layout_fingerprint="f", block_bytes=1,
        draining=True,
    )  # fmt: skip
    draining = {"status": "draining", "reason": "it was told to leave"}
    assert ask(api_server, "/health") == (503, draining)
    assert ask(api_server, "/health/ready") == (503, draining)
    assert ask(api_server, "/health/live") == (200, draining)


def test_everybody_may_know_where_the_memory_is_and_nothing_more(api_server: PoolAdmin) -> None:
    assert ask(api_server, "/v1/pool/address") == (200, ADDRESS)
    assert ask(api_server, "/v1/pool/address", "POST")[0] == 405


def test_a_node_that_no_pool_knows_yet_is_not_well(api_server: PoolAdmin, driver: Driver) -> None:
    driver.node.joined = False
    joining = {"status": "joining", "reason": "no gateway knows it yet"}
    assert ask(api_server, "/health") == (503, joining)
    assert ask(api_server, "/health/startup") == (200, joining)


def test_a_node_that_has_ended_is_not_well(api_server: PoolAdmin, driver: Driver) -> None:
    driver.ended = True
    assert ask(api_server, "/health")[0] == 503
    status, body = ask(api_server, "/v1/pool/stats", Authorization="Bearer key")
    assert (status, body["error"]["message"]) == (503, "the node does not answer")


@pytest.mark.parametrize(
    "given",
    [
        "",
        "Bearer",
        "Bearer wrong",
        "Basic key",
        "key",
        "Bearer keykey",
        "Bearer k\xff",
        f"Bearer {SECRET}",
        "Mooncake 1 2",
        "Mooncake 1 2 3",
        "Mooncake a b \xff",
    ],
)
def test_only_those_with_a_key_may_drain(api_server: PoolAdmin, driver: Driver, given: str) -> None:
    assert ask(api_server, "/v1/pool/drain", "POST", Authorization=given)[0] == 401
    assert ask(api_server, "/v1/pool/stats", Authorization=given)[0] == 401
    assert driver.node.drained == 0


def test_an_admin_token_opens_the_guarded_routes(api_server: PoolAdmin, driver: Driver) -> None:
    assert ask(api_server, "/v1/pool/drain?now=1", "POST", Authorization="bearer key")[0] == 202
    assert driver.node.drained == 1
    status, stats = ask(api_server, "/v1/pool/stats", Authorization="Bearer key")
    assert (status, stats["node_id"], stats["dram_blocks"]) == (200, "n", 10)
    assert stats["dram_blocks_hard_pinned"] == 2


def test_a_signed_request_counts_once(api_server: PoolAdmin, driver: Driver) -> None:
    signed = sign_request(HELD, "POST", "/v1/pool/drain", api_server.challenge())
    assert ask(api_server, "/v1/pool/stats", Authorization=signed)[0] == 401
    assert ask(api_server, "/v1/pool/drain", "POST", Authorization=signed)[0] == 202
    assert ask(api_server, "/v1/pool/drain", "POST", Authorization=signed)[0] == 401, "again"
    stranger = own_credential("another secret", OPERATOR)
    other = sign_request(stranger, "POST", "/v1/pool/drain", api_server.challenge())
    assert ask(api_server, "/v1/pool/drain", "POST", Authorization=other)[0] == 401
    assert driver.node.drained == 1


def test_what_is_signed_opens_what_the_role_may(api_server: PoolAdmin, driver: Driver) -> None:
    for role in CredentialRole:
        held = issue(SECRET, "etl", [role])
        signed = sign_request(held, "GET", "/v1/pool/stats", api_server.challenge())
        assert ask(api_server, "/v1/pool/stats", Authorization=signed)[0] == 200
        signed = sign_request(held, "POST", "/v1/pool/drain", api_server.challenge())
        status, body = ask(api_server, "/v1/pool/drain", "POST", Authorization=signed)
        assert status == (202 if role is OPERATOR else 403)
        if role is not OPERATOR:
            assert "'etl' may not do this" in body["error"]["message"]
            assert "--role operator" in body["error"]["message"]
    assert driver.node.drained == 1


def test_a_server_at_a_wrong_url_does_not_learn_the_secret() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asking = threading.Thread(target=_locate_at, args=(listener.getsockname()[1],))
        asking.start()
        connection, _ = listener.accept()
        with connection:
            heard = connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        asking.join()
    assert b"/v1/pool/stats" in heard
    assert SECRET.encode() not in heard


def _locate_at(port: int) -> None:
    with pytest.raises(MooncakeError, match="not a pool node of this version"):
        locate(f"http://127.0.0.1:{port}", SECRET)


def test_a_signing_client_is_let_in(api_server: PoolAdmin) -> None:
    def sign(method: str, path: str, challenge: str) -> str:
        return sign_request(HELD, method, path, challenge)

    assert Client(api_server.url, sign=sign).get("/v1/pool/stats")["node_id"] == "n"


def test_connections_that_are_held_do_not_keep_probes_out(api_server: PoolAdmin) -> None:
    parts = urllib.parse.urlsplit(api_server.url)
    before = threading.active_count()
    with contextlib.ExitStack() as held:
        for _ in range(3 * MAX_CONNECTIONS):
            place = parts.hostname or "", parts.port or 0
            held.enter_context(socket.create_connection(place, timeout=LONG_S))
        assert ask(api_server, "/health")[0] == 200
        assert threading.active_count() - before <= 2 * MAX_CONNECTIONS


def test_a_body_without_a_length_is_the_last_thing_read(
    api_server: PoolAdmin, driver: Driver
) -> None:
    """Else a proxy and this server could see different requests in the same bytes."""
    inner = b"POST /v1/pool/drain HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer key\r\n\r\n"
    parts = urllib.parse.urlsplit(api_server.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=LONG_S) as sent:
        sent.sendall(
            b"GET /health HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" + inner
        )
        while sent.recv(65536):
            pass
    assert driver.node.drained == 0


def test_what_is_not_there_is_said_so(api_server: PoolAdmin) -> None:
    status, body = ask(api_server, "/v1/pool")
    assert status == 404
    assert "/v1/pool/stats" in body["error"]["message"]
    assert ask(api_server, "/health", "POST")[0] == 405
    assert ask(api_server, "/v1/pool/drain", Authorization="Bearer key")[0] == 405


def test_a_long_or_odd_body_is_not_read(api_server: PoolAdmin, driver: Driver) -> None:
    for length in (str(MAX_BODY_BYTES + 1), "-1", "many"):
        headers = {"Authorization": "Bearer key", "Content-Length": length}
        assert ask(api_server, "/v1/pool/drain", "POST", **headers)[0] == 202, "and not waited for"
    assert driver.node.drained == 3


def test_a_taken_port_is_an_error_that_names_it(api_server: PoolAdmin, driver: Driver) -> None:
    port = urllib.parse.urlsplit(api_server.url).port or 0
    with pytest.raises(ConfigError, match=f"admin-port: cannot listen on 127.0.0.1:{port}"):
        PoolAdmin(AdminSettings(port=port), HELD.cluster, driver, {}, Health(1.0), bytes)  # type: ignore[arg-type]


def test_every_figure_and_counter_has_a_series(api_server: PoolAdmin) -> None:
    text = ask(api_server, "/metrics")[1]
    for name in pool_metrics.GAUGES:
        assert f'mooncake_pool_{name}{{worker="kv-0"}}' in text
    for name in COUNTERS:
        assert f'mooncake_pool_{name}_total{{worker="kv-0"}}' in text
    assert 'mooncake_pool_puts_total{worker="kv-0"} 3.0' in text
    whose = 'worker="kv-0"'
    assert f'mooncake_pool_tenant_blocks{{tenant="alice",tier="dram",{whose}}} 2.0' in text
    assert f'mooncake_pool_tenant_quota_blocks{{tenant="alice",tier="ssd",{whose}}} 4.0' in text


@pytest.fixture(params=[False, True], ids=["https", "mutual"])
def secure_server(
    request: pytest.FixtureRequest, tls_host: Host, driver: Driver
) -> Iterator[tuple[PoolAdmin, bool]]:
    files = TlsFiles(
        certfile=tls_host.cert,
        keyfile=tls_host.key,
        ca_certs=tls_host.ca if request.param else None,
    )
    opened = PoolAdmin(
        AdminSettings(tls=files), HELD.cluster, driver, {"node_id": "n"}, Health(60.0), lambda: b""  # type: ignore[arg-type]
    )  # fmt: skip
    yield opened, request.param
    opened.close()


def test_the_admin_port_speaks_https_alone(
    secure_server: tuple[PoolAdmin, bool], tls_host: Host
) -> None:
    server, asks_clients = secure_server
    assert server.url.startswith("https://127.0.0.1:")

    def sign(method: str, path: str, challenge: str) -> str:
        return sign_request(HELD, method, path, challenge)

    trusting = tls_host.trusting(proven=asks_clients)
    strangers = [ssl.create_default_context()]
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))):
        if asks_clients:
            strangers.append(tls_host.trusting())
        client = Client(server.url, sign=sign, tls=trusting)
        assert client.get("/v1/pool/stats")["node_id"] == "n", (
            "one who says nothing holds up nobody"
        )
    for stranger in strangers:
        with pytest.raises(MooncakeError, match="no server answers"):
            Client(server.url, sign=sign, tls=stranger).get("/v1/pool/stats")
    with pytest.raises(MooncakeError, match="no server answers"):
        Client(server.url.replace("https", "http"), sign=sign).get("/v1/pool/stats")


def test_a_wrong_certificate_is_named(driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    for file in ("missing.pem", "empty.pem"):
        settings = AdminSettings(tls=TlsFiles(certfile=str(tmp_path / file)))
        with pytest.raises(ConfigError, match=f"TLS cannot be set up with .*{file}"):
            PoolAdmin(settings, HELD.cluster, driver, {}, Health(60.0), lambda: b"")  # type: ignore[arg-type]
