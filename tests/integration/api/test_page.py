"""The page's files and the cluster's feed over real sockets; a browser reads them elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig
from mooncake.api.schema.replies import encode
from tests.support.api.server import ScriptedBackend, live_api_server, says
from tests.support.waiting import LONG_S

FEED = "/v1/cluster/events"


async def feed(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of an open feed."""
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def names() -> list[str]:
    """Return the names of the page's files."""
    entries = resources.files("mooncake.api.page").iterdir()
    return [entry.name for entry in entries if not entry.name.startswith("_")]


def test_every_file_that_the_page_names_is_served_with_its_type_and_a_strict_policy() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            page = await client.get("/")
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            assert "default-src 'none'" in page.headers["content-security-policy"]
            assert "unsafe" not in page.headers["content-security-policy"]
            linked = set(re.findall(r'(?:src|href)="(page/[^"]+)"', page.text))
            assert {"page/main.js", "page/style.css", "page/theme.js"} <= linked
            for name in names():
                reply = await client.get(f"/page/{name}")
                assert reply.status_code == 200, name
                assert reply.headers["x-content-type-options"] == "nosniff"
                linked |= {f"page/{at}" for at in re.findall(r'from "\./([^"]+)"', reply.text)}
            assert linked <= {f"page/{name}" for name in names()}
            script = await client.get("/page/main.js")
            assert script.headers["content-type"] == "text/javascript; charset=utf-8"

    asyncio.run(main())


def test_an_unchanged_file_is_not_sent_again_and_no_other_file_is_to_be_had() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            first = await client.get("/page/style.css")
            again = await client.get(
                "/page/style.css", headers={"If-None-Match": first.headers["etag"]}
            )
            assert (again.status_code, again.content) == (304, b"")
            for path in ("__init__.py", "nothing.js", "..%2fapp.py", "%2e%2e/app.py", ""):
                reply = await client.get(f"/page/{path}")
                assert reply.status_code == 404, path
                assert reply.json()["error"]["code"] == 404

    asyncio.run(main())


def test_the_openapi_document_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no key, so a stranger may ask for it again and again."""
    encoded: list[Any] = []

    def counting(value: Any) -> bytes:
        encoded.append(value)
        return encode(value)

    monkeypatch.setattr("mooncake.api.routes.page.encode", counting)

    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            first, *others = [await client.get("/openapi.json") for _ in range(5)]
            assert first.headers["content-type"] == "application/json"
            assert first.json()["info"]["title"] == "Mooncake"
            assert {each.content for each in others} == {first.content}
            same = {"If-None-Match": first.headers["etag"]}
            again = await client.get("/openapi.json", headers=same)
            assert (again.status_code, again.content) == (304, b"")

    asyncio.run(main())
    assert len(encoded) == 1


def test_no_file_turns_text_into_markup_or_asks_another_server() -> None:
    for name in names():
        text = (resources.files("mooncake.api.page") / name).read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, f"{name} uses {word}"
        addresses = set(re.findall(r"https?://[^\s\"')]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_the_feed_repeats_the_status_again_and_again() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        config = ApiConfig(port=0, feed_s=0.01, drain_s=0.2)
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
            client.stream("GET", url + FEED) as reply,
        ):
            assert reply.headers["content-type"].startswith("text/event-stream")
            events = feed(reply)
            first = await anext(events)
            assert first == {"status": {"workers": [], "ready": True}, "recent": {}}
            backend.is_ready = False
            async for event in events:
                if not event["status"]["ready"]:
                    break

    asyncio.run(main())


def test_listeners_are_bounded_and_give_their_place_back_when_they_go() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, feed_s=0.01, max_listeners=2, drain_s=0.2)
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config) as url,
            httpx.AsyncClient(timeout=LONG_S) as client,
        ):
            async with client.stream("GET", url + FEED) as one:
                first = feed(one)  # held on to: an iterator that is dropped closes its reply
                await anext(first)
                async with client.stream("GET", url + FEED) as two:
                    second = feed(two)
                    await anext(second)
                    third = await client.get(url + FEED)
                    assert third.status_code == 429
                    assert third.headers["retry-after"] == "5"
                    assert "2 listeners" in third.json()["error"]["message"]
            for _ in range(3):  # their connections are closed by now, which the server must notice
                async with asyncio.timeout(LONG_S):
                    while not await opens(client, url):
                        await asyncio.sleep(0)

    async def opens(client: httpx.AsyncClient, url: str) -> bool:
        async with client.stream("GET", url + FEED) as reply:
            return reply.status_code == 200

    asyncio.run(main())


def test_a_shutdown_ends_the_feed_at_once() -> None:
    async def main() -> None:
        stop = asyncio.Event()
        config = ApiConfig(port=0, feed_s=3600, drain_s=3600)
        backend = ScriptedBackend(says("x"))
        async with asyncio.timeout(LONG_S):
            async with (
                live_api_server(backend, config=config, stop=stop) as url,
                httpx.AsyncClient(timeout=LONG_S) as client,
                client.stream("GET", url + FEED) as reply,
            ):
                events = feed(reply)
                await anext(events)
                stop.set()
                assert [event async for event in events] == []

    asyncio.run(main())


def test_the_page_is_open_and_the_feed_needs_the_key() -> None:
    async def main() -> None:
        config = ApiConfig(port=0, api_keys=("k",), drain_s=0.2)
        async with (
            live_api_server(ScriptedBackend(says("x")), config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            assert (await client.get("/")).status_code == 200
            assert (await client.get("/page/main.js")).status_code == 200
            assert (await client.get(FEED)).status_code == 401
            headers = {"Authorization": "Bearer k"}
            async with client.stream("GET", FEED, headers=headers) as reply:
                assert reply.status_code == 200

    asyncio.run(main())


def test_the_docs_page_loads_nothing_from_elsewhere() -> None:
    async def main() -> None:
        backend = ScriptedBackend(says("x"))
        async with (
            live_api_server(backend) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            page = await client.get("/docs")
            assert "default-src 'none'" in page.headers["content-security-policy"]
            linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
            assert "page/docs.js" in linked
            for name in linked:
                assert (await client.get(f"/{name}")).status_code == 200, name

    asyncio.run(main())
