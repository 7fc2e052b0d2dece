"""A pool node's HTTP door: who may do what, and what it says of a node that does not answer."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from mooncake.base import ConfigError, Tier, WorkerLoad, WorkerRef
from mooncake.base.pool_messages import PoolState, TenantUse
from mooncake.kvstore.counters import COUNTERS
from mooncake.launch import pool_metrics
from mooncake.launch.pool_admin import MAX_BODY_BYTES, AdminSettings, PoolAdmin

STATE = PoolState(
    ticket=0, store=WorkerRef("kv-0", "e", "tcp://h:1"),
    load=WorkerLoad(num_total_blocks=10, num_free_blocks=4, counters={"puts": 3.0}),
    layout_fingerprint="f", block_bytes=4096, num_ssd_blocks=7, num_hard_pinned=2,
    tenants=(TenantUse("alice", Tier.DRAM, 2, 5), TenantUse("alice", Tier.SSD, 4, 4)),
)  # fmt: skip


class Node:
    """What the driver drives."""

    def __init__(self) -> None:
        self.drained = 0
        self.shown = STATE
        self.joined = True

    def state(self) -> PoolState:
        return self.shown


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
def door(driver: Driver) -> Iterator[PoolAdmin]:
    def drain() -> None:
        driver.node.drained += 1

    settings = AdminSettings(keys=["another", "key"])
    opened = PoolAdmin(settings, driver, {"node_id": "n"}, drain, list)  # type: ignore[arg-type]
    yield opened
    opened.close()


def ask(door: PoolAdmin, path: str, method: str = "GET", **headers: str) -> tuple[int, Any]:
    parts = urllib.parse.urlsplit(door.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
    connection.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    is_json = reply.headers["Content-Type"] == "application/json"
    return reply.status, json.loads(body) if is_json else body.decode()


def test_everybody_may_look_whether_it_is_well(door: PoolAdmin, driver: Driver) -> None:
    assert ask(door, "/health") == (200, {"status": "ok"})
    driver.node.shown = PoolState(
        ticket=0, store=STATE.store, load=STATE.load, layout_fingerprint="f", block_bytes=1,
        draining=True,
    )  # fmt: skip
    assert ask(door, "/health") == (503, {"status": "draining"})


def test_a_node_that_no_pool_knows_yet_is_not_well(door: PoolAdmin, driver: Driver) -> None:
    driver.node.joined = False
    assert ask(door, "/health") == (503, {"status": "joining"})


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/pool/stats"])
def test_a_node_that_has_ended_is_not_well(door: PoolAdmin, driver: Driver, path: str) -> None:
    driver.ended = True
    status, body = ask(door, path, Authorization="Bearer key")
    assert (status, body["error"]["message"]) == (503, "the node does not answer")


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Basic key", "key", "Bearer keykey", "Bearer k\xff"]
)
def test_only_those_with_a_key_may_drain(door: PoolAdmin, driver: Driver, given: str) -> None:
    assert ask(door, "/v1/pool/drain", "POST", Authorization=given)[0] == 401
    assert ask(door, "/v1/pool/stats", Authorization=given)[0] == 401
    assert driver.node.drained == 0


def test_who_has_a_key_may(door: PoolAdmin, driver: Driver) -> None:
    assert ask(door, "/v1/pool/drain?now=1", "POST", Authorization="bearer key")[0] == 202
    assert driver.node.drained == 1
    status, stats = ask(door, "/v1/pool/stats", Authorization="Bearer key")
    assert (status, stats["node_id"], stats["dram_blocks"]) == (200, "n", 10)
    assert stats["dram_blocks_hard_pinned"] == 2


def test_what_is_not_there_is_said_so(door: PoolAdmin) -> None:
    status, body = ask(door, "/v1/pool")
    assert status == 404
    assert "/v1/pool/stats" in body["error"]["message"]
    assert ask(door, "/health", "POST")[0] == 405
    assert ask(door, "/v1/pool/drain", Authorization="Bearer key")[0] == 405


def test_a_long_or_odd_body_is_not_read(door: PoolAdmin, driver: Driver) -> None:
    for length in (str(MAX_BODY_BYTES + 1), "-1", "many"):
        headers = {"Authorization": "Bearer key", "Content-Length": length}
        assert ask(door, "/v1/pool/drain", "POST", **headers)[0] == 202, "and not waited for"
    assert driver.node.drained == 3


def test_a_taken_port_is_an_error_that_names_it(door: PoolAdmin, driver: Driver) -> None:
    port = urllib.parse.urlsplit(door.url).port or 0
    with pytest.raises(ConfigError, match=f"admin-port: cannot listen on 127.0.0.1:{port}"):
        PoolAdmin(AdminSettings(port=port), driver, {}, lambda: None, list)  # type: ignore[arg-type]


def test_every_figure_and_counter_has_a_series(door: PoolAdmin) -> None:
    text = ask(door, "/metrics")[1]
    for name in pool_metrics.GAUGES:
        assert f'mooncake_pool_{name}{{worker="kv-0"}}' in text
    for name in COUNTERS:
        assert f'mooncake_pool_{name}_total{{worker="kv-0"}}' in text
    assert 'mooncake_pool_puts_total{worker="kv-0"} 3.0' in text
    assert set(pool_metrics.figures(STATE)) == set(pool_metrics.GAUGES)
    whose = 'worker="kv-0"'
    assert f'mooncake_pool_tenant_blocks{{tenant="alice",tier="dram",{whose}}} 2.0' in text
    assert f'mooncake_pool_tenant_quota_blocks{{tenant="alice",tier="ssd",{whose}}} 4.0' in text
