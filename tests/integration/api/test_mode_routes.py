"""The routes by which operators pause a cluster, let it sleep and replace its weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from mooncake.api.http.access import OPERATOR_PATHS
from mooncake.base import InvalidRequest, MooncakeError
from mooncake.base.cluster_mode import ClusterMode, Weights
from mooncake.scheduler.gateway.mode_control import Done
from tests.integration.api.test_access import bearer, key, limited_api_server
from tests.support.api.server import ScriptedBackend, says

OPEN = {"enable_sleep_mode": True}


class Orders:
    """Does as it is told at once, and writes it down."""

    def __init__(self) -> None:
        self.mode = ClusterMode()
        self.given: list[tuple[Any, ...]] = []

    async def order(self, give: Callable[[Orders, Done], None]) -> None:
        ends: list[MooncakeError | None] = []
        give(self, ends.append)
        [error] = ends
        if error is not None:
            raise error

    def pause(self, done: Done, *, aborts: bool) -> None:
        self._do(done, ("pause", aborts), self.mode.changed("g", paused=True, sleep_level=0))

    def resume(self, done: Done) -> None:
        self._do(done, ("resume",), self.mode.changed("g", paused=False, sleep_level=0))

    def sleep(self, level: int, done: Done, *, aborts: bool) -> None:
        mode = self.mode.changed("g", paused=False, sleep_level=level)
        self._do(done, ("sleep", level, aborts), mode)

    def wake(self, done: Done) -> None:
        self._do(done, ("wake",), self.mode.changed("g", paused=False, sleep_level=0))

    def update_weights(self, model: str, done: Done) -> None:
        if model == "/wrong":
            done(InvalidRequest("decode-0: /wrong: no such directory", param="model"))
            return
        self._do(done, ("update", model), ClusterMode(weights=Weights(1, model, "r2", "f2")))

    def _do(self, done: Done, given: tuple[Any, ...], mode: ClusterMode) -> None:
        self.given.append(given)
        self.mode = mode
        done(None)


def run(
    main: Callable[[httpx.AsyncClient, Orders], Awaitable[None]], *keys: Any, **limits: Any
) -> Orders:
    orders = Orders()

    async def serve() -> None:
        backend = ScriptedBackend(says("hello"))
        async with limited_api_server(backend, *keys, limits=limits, control=orders) as client:
            await main(client, orders)

    asyncio.run(serve())
    return orders


def test_each_route_gives_its_order_and_answers_with_the_mode() -> None:
    async def main(client: httpx.AsyncClient, orders: Orders) -> None:
        async def post(path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
            reply = await client.post(path, json=body) if body else await client.post(path)
            assert reply.status_code == 200, reply.text
            answer: dict[str, Any] = reply.json()
            return answer

        assert (await post("/pause"))["is_paused"]
        assert (await client.get("/is_paused")).json()["is_paused"]
        assert (await client.get("/health")).status_code == 200, "the backend says whether it is"
        await post("/pause?mode=wait")
        assert not (await post("/resume"))["is_paused"]
        assert (await post("/sleep"))["sleep_level"] == 1
        assert (await post("/sleep?level=2&mode=wait"))["sleep_level"] == 2
        assert (await client.get("/is_sleeping")).json()["is_sleeping"]
        assert not (await post("/wake_up"))["is_sleeping"]
        changed = await post("/update_weights", {"path": "/new"})
        assert (changed["weights_path"], changed["weights_revision"]) == ("/new", "r2")

    assert run(main, **OPEN).given == [
        ("pause", True), ("pause", False), ("resume",), ("sleep", 1, True), ("sleep", 2, False),
        ("wake",), ("update", "/new"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "says_what"),
    [
        ("/pause?mode=keep", None, "none of abort, wait"),
        ("/sleep?level=3", None, "none of 1, 2"),
        ("/update_weights", {"path": "relative"}, "path"),
        ("/update_weights", {"path": "/wrong"}, "decode-0: /wrong: no such directory"),
    ],
)
def test_a_wrong_order_is_refused_and_says_why(
    path: str, body: dict[str, str] | None, says_what: str
) -> None:
    async def main(client: httpx.AsyncClient, orders: Orders) -> None:
        reply = await client.post(path, json=body) if body else await client.post(path)
        assert reply.status_code == 400
        assert says_what in reply.json()["error"]["message"]

    assert run(main, **OPEN).given == []


def test_only_operators_give_orders() -> None:
    async def main(client: httpx.AsyncClient, orders: Orders) -> None:
        for path in sorted(OPERATOR_PATHS):
            method = "GET" if path.startswith("/is_") else "POST"
            assert (await client.request(method, path)).status_code == 401
            reply = await client.request(method, path, headers=bearer("alice"))
            assert reply.status_code == 403
            assert "use an operator's key" in reply.json()["error"]["message"]
        assert (await client.post("/pause", headers=bearer("root"))).status_code == 200

    orders = run(main, key("alice"), key("root", operator=True), **OPEN)
    assert orders.given == [("pause", True)]


def test_nobody_gives_orders_to_a_server_that_was_not_opened_for_them() -> None:
    async def main(client: httpx.AsyncClient, orders: Orders) -> None:
        for path in sorted(OPERATOR_PATHS):
            method = "GET" if path.startswith("/is_") else "POST"
            reply = await client.request(method, path, json={"path": "/new"})
            assert reply.status_code == 403
            assert "enable-sleep-mode" in reply.json()["error"]["message"]

    assert run(main).given == []


def test_a_page_of_another_site_gives_no_orders() -> None:
    async def main(client: httpx.AsyncClient, orders: Orders) -> None:
        reply = await client.post("/sleep", headers={"Origin": "https://evil.example"})
        assert reply.status_code == 403

    assert run(main, **OPEN).given == []


def test_a_probe_says_that_the_cluster_is_paused() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        backend.is_ready = False
        orders = Orders()
        async with limited_api_server(backend, limits=OPEN, control=orders) as client:
            orders.pause(lambda _: None, aborts=False)
            reply = await client.get("/health")
            assert reply.status_code == 503
            assert "paused (POST /resume)" in reply.json()["error"]["message"]

    asyncio.run(main())
