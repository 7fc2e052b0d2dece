"""The health port of workers: what probes hear while weights load, once it has joined, and when a
step or the loop hangs."""

from __future__ import annotations

import asyncio
import base64
import gc
import http.client
import json
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mooncake.base import ConfigError, Role
from mooncake.launch.worker import process
from mooncake.launch.worker.health_port import HealthPort
from mooncake.launch.worker.metrics import GAUGES
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.worker import Worker
from mooncake.transfer.regions import no_progress
from tests.support.certificates import Host
from tests.support.model.checkpoints import write_config_only
from tests.support.serve.local_world import HashModel, request
from tests.support.serve.local_world import SocketWorld as World
from tests.support.waiting import LONG_S, wait_until


def ask(url: str, path: str, tls: ssl.SSLContext | None = None) -> tuple[int, Any]:
    """GET and return (status, body); JSON is read."""
    try:
        with urllib.request.urlopen(url + path, timeout=LONG_S, context=tls) as reply:
            body = reply.read()
            is_json = reply.headers["Content-Type"] == "application/json"
            return reply.status, json.loads(body) if is_json else body.decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config_only(tmp_path / "hash-model", max_position_embeddings=1024))


class SlowModel(HashModel):
    """Stops in the middle of its weights until it is told to go on."""

    def __init__(self, revision: str) -> None:
        super().__init__(revision)
        self.is_loading = threading.Event()
        self.may_go_on = threading.Event()

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        assert progress is not None
        progress(1, 3)
        self.is_loading.set()
        assert self.may_go_on.wait(LONG_S)


@contextmanager
def running(settings: WorkerSettings) -> Iterator[list[Worker]]:
    """Do in a thread what a worker's process does."""
    started: list[Worker] = []
    thread = threading.Thread(
        target=process.run,
        args=(settings,),
        kwargs={"progress": no_progress, "started": started.append},
        daemon=True,
    )
    thread.start()
    try:
        yield started
    finally:
        wait_until(lambda: started, "the worker has started")
        started[-1].leave(0.0)
        thread.join(LONG_S)
        gc.unfreeze()
    assert not thread.is_alive()


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> list[HealthPort]:
    """Return the ports that processes open, as they do."""
    opened: list[HealthPort] = []

    class Seen(HealthPort):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            opened.append(self)

    monkeypatch.setattr(process, "HealthPort", Seen)
    return opened


def test_a_worker_starts_joins_serves_and_drains(
    model: str, monkeypatch: pytest.MonkeyPatch, ports: list[HealthPort]
) -> None:
    world = World(model, prefill=0, decode=1, kvstore=0)
    slow = SlowModel(world.plan.model.revision)
    monkeypatch.setattr(process, "open_model", lambda *_: slow)

    async def serve(url: str, started: list[Worker]) -> None:
        async with world.driven():
            await world.until(lambda: ask_ready(url))
            assert world.health_urls() == {"decode-0": url}
            await world.generate(request(1, [1, 2, 3]))
            status, text = await asyncio.to_thread(ask, url, "/metrics")
            check_metrics(status, text)
            started[-1].driver.call(lambda machine, _: setattr(machine.instance, "draining", True))
            assert (await asyncio.to_thread(ask, url, "/health/ready"))[0] == 503
            assert (await asyncio.to_thread(ask, url, "/health/live"))[0] == 200

    with running(world.settings_of(Role.DECODE)) as started:
        assert slow.is_loading.wait(LONG_S)
        [port] = ports
        url = port.url
        loading = {"status": "starting", "reason": "loading weights, 1 of 3"}
        assert ask(url, "/health/startup") == (503, loading)
        assert ask(url, "/health/ready") == ask(url, "/health") == (503, loading)
        assert ask(url, "/health/live") == (200, loading)
        assert 'mooncake_health{probe="startup",role="decode"' in ask(url, "/metrics")[1]
        slow.may_go_on.set()
        joining = {"status": "joining", "reason": "no gateway knows it yet"}
        wait_until(lambda: ask(url, "/health/startup") == (200, joining), "it has started")
        assert ask(url, "/health/ready") == (503, joining)
        asyncio.run(serve(url, started))
    with pytest.raises(urllib.error.URLError):
        ask(url, "/health")
    world.gateway_process.channel.close()


def ask_ready(url: str) -> bool:
    return ask(url, "/health/ready") == (200, {"status": "ok"})


def check_metrics(status: int, text: str) -> None:
    assert status == 200
    samples = {
        (sample.name, sample.labels.get("name") or sample.labels.get("probe", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name in GAUGES:
        assert (f"mooncake_worker_{name}", "") in samples
    assert samples["mooncake_health", "ready"] == samples["mooncake_health", "live"] == 1
    assert samples["mooncake_worker_events_total", "steps"] > 0
    assert samples["process_resident_memory_bytes", ""] > 0


def test_only_probes_and_metrics_are_answered(
    model: str, monkeypatch: pytest.MonkeyPatch, ports: list[HealthPort]
) -> None:
    world = World(model, prefill=0, decode=1, kvstore=1, cluster_secret="a-secret")
    with running(world.settings_of(Role.KVSTORE)) as started:
        wait_until(lambda: started, "the worker has started")
        [port] = ports
        url = port.url
        assert url.startswith("http://127.0.0.1:")
        for path in ("/", "/v1/pool/stats", "/health/", "/v1/pool/drain", "/debug"):
            assert ask(url, path)[0] == 404
        refused = urllib.request.Request(url + "/health", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(refused, timeout=LONG_S)
        text = ask(url, "/metrics")[1]
        assert 'mooncake_pool_dram_blocks{worker="kvstore-0"}' in text
        assert "a-secret" not in text
    world.gateway_process.channel.close()


@pytest.mark.parametrize("mutual", [False, True], ids=["https", "mutual"])
def test_it_speaks_https_alone_where_it_has_a_certificate(
    model: str, ports: list[HealthPort], tls_host: Host, mutual: bool
) -> None:
    """Also the URL that the gateway shows; a client that says nothing holds up nobody."""
    files = {"health_ssl_certfile": tls_host.cert, "health_ssl_keyfile": tls_host.key}
    if mutual:
        files["health_ssl_ca_certs"] = tls_host.ca
    world = World(model, prefill=0, decode=1, kvstore=1, **files)
    strangers = [ssl.create_default_context(), *([tls_host.trusting()] if mutual else [])]

    async def serve() -> None:
        async with world.driven():
            await world.until(lambda: world.gateway_process.knows(["kvstore-0"]))
            assert world.health_urls() == {"kvstore-0": ports[0].url}

    with running(world.settings_of(Role.KVSTORE)) as started:
        wait_until(lambda: started, "the worker has started")
        [port] = ports
        assert port.url.startswith("https://127.0.0.1:")
        asyncio.run(serve())
        with socket.create_connection(("127.0.0.1", int(port.url.rpartition(":")[2]))):
            known = tls_host.trusting(proven=mutual)
            assert ask(port.url, "/health/live", known)[0] == 200
            assert 'mooncake_health{probe="live"' in ask(port.url, "/metrics", known)[1]
            for stranger in strangers:
                with pytest.raises((OSError, http.client.HTTPException)):
                    ask(port.url, "/health/live", stranger)
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(port.url.replace("https", "http"), "/health/live")
    world.gateway_process.channel.close()


def test_a_taken_port_is_an_error_that_names_it(model: str) -> None:
    world = World(model, prefill=0, decode=1, kvstore=1)
    settings = world.settings_of(Role.KVSTORE)
    address, _, _ = world.gateway_process.channel.address.partition("#")
    port = int(address.rpartition(":")[2])
    health = msgspec.structs.replace(settings.health, port=port)
    with pytest.raises(ConfigError, match=f"health-port: cannot listen on 127.0.0.1:{port}"):
        process.run(
            msgspec.structs.replace(settings, health=health),
            progress=no_progress,
            started=lambda _: None,
        )
    world.gateway_process.channel.close()


@contextmanager
def hanging(how: str, settings: WorkerSettings) -> Iterator[subprocess.Popen[str]]:
    """Run a real process whose first step hangs; kill it at the end if it is still there."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.serve.hanging_worker", how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    child.stdin.write(base64.b64encode(msgspec.msgpack.encode(settings)).decode() + "\n")
    child.stdin.flush()
    with child:
        try:
            yield child
        finally:
            child.kill()


def submit_to(world: World) -> None:
    """Have the gateway place a request; what becomes of it is not waited for."""
    asked = request(1, [1, 2, 3], 20)
    world.gateway_process.backend.submit(asked, lambda _: None)


def test_a_process_whose_step_hangs_is_not_live_and_ends(model: str) -> None:
    async def serve() -> None:
        world = World(model, prefill=0, decode=1, kvstore=0, step_timeout=1)
        with hanging("step", world.settings_of(Role.DECODE)) as child:
            async with world.driven():
                await world.until(lambda: world.gateway_process.knows(["decode-0"]))
                url = world.health_urls()["decode-0"]
                assert (await asyncio.to_thread(ask, url, "/health/live"))[0] == 200
                submit_to(world)
                assert child.stdout is not None
                told = await asyncio.to_thread(child.stdout.readline)
                assert told.strip() == "step 0 made no progress for 10 s"
                failed = {"status": "failed", "reason": told.strip()}
                for probe in ("startup", "ready", "live"):
                    answer = await asyncio.to_thread(ask, url, f"/health/{probe}")
                    assert answer == (503, failed)
                _, text = await asyncio.to_thread(ask, url, "/metrics")
                assert 'mooncake_health{probe="live",role="decode",worker="decode-0"} 0.0' in text
                assert child.stdin is not None
                child.stdin.close()
                assert await asyncio.to_thread(child.wait, LONG_S) == 1
        world.gateway_process.channel.close()

    asyncio.run(serve())


def test_a_process_whose_loop_no_longer_turns_ends_with_its_stacks(model: str) -> None:
    async def serve() -> None:
        world = World(model, prefill=0, decode=1, kvstore=0, step_timeout=1)
        with hanging("loop", world.settings_of(Role.DECODE)) as child:
            async with world.driven():
                await world.until(lambda: world.gateway_process.knows(["decode-0"]))
                submit_to(world)
                assert await asyncio.to_thread(child.wait, LONG_S) == 1
                assert child.stderr is not None
                written = child.stderr.read()
                assert "decode-0: its loop has not turned for" in written
                assert "in submit" in written, "the stack says where"
        world.gateway_process.channel.close()

    asyncio.run(serve())
