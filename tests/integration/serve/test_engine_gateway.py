"""A real gateway over other engines, which are scripted, and their block events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.base.block_events.kv_events import BlockStored, KvEventsConfig
from mooncake.cli.main import run
from mooncake.rpc.kv_events import KvEventPublisher
from tests.support.api.scripted_engine import ScriptedEngine
from tests.support.serve.server import Server, serving
from tests.support.waiting import wait_until

BLOCK = 16


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    """Two engines, in a loop of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    made = [ScriptedEngine(), ScriptedEngine()]
    for each in made:
        asyncio.run_coroutine_threadsafe(each.start(), loop).result(60)
    yield made
    for each in made:
        asyncio.run_coroutine_threadsafe(each.stop(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def are_up(server: Server) -> bool:
    is_well = server.client.get("/health").status_code == 200
    return is_well and all(each["state"] == "up" for each in server.status()["engines"])


def test_prompts_go_where_events_say_their_prefix_is(
    engines: list[ScriptedEngine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = engines
    tokens = list(range(10 * BLOCK))
    config = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    stored = BlockStored(
        block_hashes=list(range(10)), parent_block_hash=None, token_ids=tokens, block_size=BLOCK,
        medium="GPU",
    )  # fmt: skip
    words = [
        "--role", "gateway", "--engines", f"{first.url},{second.url}",
        "--engine-events", f"{second.url}={config.endpoint},{config.replay_endpoint}",
    ]  # fmt: skip
    assert run(["serve", *words, "--dry-run"]) == 0
    assert f"{second.url}: prefixes by block events" in capsys.readouterr().out
    with contextlib.ExitStack() as opened:
        publisher = KvEventPublisher(config, lambda: 0.0)
        opened.callback(publisher.close)
        publisher.publish([stored])  # before the gateway is there
        server = opened.enter_context(serving(*words, log=tmp_path / "log"))
        wait_until(lambda: are_up(server), "both engines are up")
        known = "the second one's events are known"
        wait_until(lambda: server.status()["engines"][1]["num_blocks"] == 10, known)
        body = {"model": "m", "prompt": tokens, "max_tokens": 2}
        got = server.client.post("/v1/completions", json=body)
        assert got.status_code == 200
        assert [len(each.calls) for each in engines] == [0, 1]
        assert second.calls[0].fields == body
        assert run(["status", "--url", server.url]) == 0
        assert "10 blocks" in capsys.readouterr().out
        assert run(["status", "--url", server.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["engines"][0]["prefixes"] == "sent"
