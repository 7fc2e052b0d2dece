"""`--access-log`: one line a request, whatever became of it, without keys and query strings."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from mooncake.api.config import ApiConfig
from mooncake.telemetry.log import TextFormatter
from tests.support.api.server import ScriptedBackend, answer, live_api_server, says
from tests.support.waiting import LONG_S

ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
LOGGER = "mooncake.api.http.tracing"
KEY = "secret-of-alice"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(logging.getLogger("mooncake"), "propagate", True)
    caplog.set_level(logging.INFO, LOGGER)
    formatter = TextFormatter("gateway")
    return lambda: [
        formatter.format(record).partition(f"{LOGGER}: ")[2]
        for record in caplog.records
        if record.name == LOGGER
    ]


def ask(config: ApiConfig, *paths: str) -> None:
    """Send one request to each path: a chat, or else a GET."""

    async def main() -> None:
        backend = ScriptedBackend(says("hello"))
        async with (
            live_api_server(backend, config=config) as url,
            httpx.AsyncClient(base_url=url, timeout=LONG_S) as client,
        ):
            for number, path in enumerate(paths):
                headers = {"X-Request-Id": f"r{number}", "Authorization": f"Bearer {KEY}"}
                if path == CHAT:
                    await client.post(path, json=ASK, headers=headers)
                else:
                    await client.get(path, headers=headers)

    asyncio.run(main())


def test_every_request_has_one_line(lines: Any) -> None:
    config = ApiConfig(port=0, drain_s=0.2, access_log=True, api_keys=(KEY,))
    ask(config, CHAT, "/health", "/no%0Asuch?token=hidden")
    chat, health, missing = lines()
    assert chat.startswith(f"POST {CHAT} 200 in 0.")
    assert chat.endswith(" s request_id=r0 key=key 1")
    assert health.startswith("GET /health 200 in 0.")
    assert health.endswith(" s request_id=r1 key=None")
    assert missing.startswith("GET /no%0Asuch 404 in 0.")
    assert not any(KEY in line or "hidden" in line for line in lines())


def test_refusals_have_theirs(lines: Any) -> None:
    ask(ApiConfig(port=0, drain_s=0.2, access_log=True, api_keys=("other",)), CHAT)
    ask(ApiConfig(port=0, drain_s=0.2, access_log=True), "/v1/models/no")
    assert [line.split()[2] for line in lines()] == ["401", "404"]


def test_so_has_a_client_that_left(lines: Any) -> None:
    async def main() -> None:
        backend = ScriptedBackend(lambda request: [*answer(request, [97, 98])[:1], None])
        config = ApiConfig(port=0, drain_s=0.2, access_log=True)
        async with live_api_server(backend, config=config) as url:
            async with httpx.AsyncClient(base_url=url, timeout=LONG_S) as client:
                asked = asyncio.create_task(client.post(CHAT, json=ASK))
                while not backend.num_hanging:
                    await asyncio.sleep(0)
                asked.cancel()
            await backend.abort_seen.wait()

    asyncio.run(main())
    assert [line.split()[2] for line in lines()] == ["499"]


def test_without_it_nothing_is_logged(lines: Any) -> None:
    ask(ApiConfig(port=0, drain_s=0.2), CHAT)
    assert lines() == []
