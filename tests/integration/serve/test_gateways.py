"""Two gateways of one cluster, each a process of its own, over workers that neither has started:
what one caches the other finds, and either may be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from mooncake.api.http.repeats import seed_of
from tests.support.relay import Relay
from tests.support.serve import deaf_gateway
from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.waiting import LONG_S, wait_until

pytestmark = pytest.mark.timeout(600)

SMALL = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB", "--kvstore-dram-bytes", "32MiB",
)  # fmt: skip
WORKERS = {"prefill-0", "decode-0", "decode-1", "kvstore-0"}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
CHAT = "/v1/chat/completions"
EXAMPLES = Path(__file__).parents[3] / "examples"
ENDLESS = 20_000
"""Output tokens that take longer than it takes to notice that their gateway is dead."""


class Cluster:
    """Workers and the process that looks after them."""

    def __init__(self, head: ServerProcess) -> None:
        self.head = head
        self.address = head.wait_for(r"--role ROLE --join (\S+)").group(1)

    @contextlib.contextmanager
    def gateway(self, module: str = "mooncake.cli.main") -> Iterator[ServerProcess]:
        """Run one more gateway for the body."""
        words = ("--role", "gateway", "--join", self.address, "--port", "0")
        with ServerProcess(*words, module=module) as gateway:
            gateway.wait_until_serving()
            yield gateway


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    checkpoint = nano_checkpoint(tmp_path_factory.mktemp("model"))
    with ServerProcess(str(checkpoint), *SMALL, "--headless", "--decode", "2") as head:
        yield Cluster(head)
        own = head.wait_for(r"gateway mooncake\S+ health at (http://\S+)").group(1)
        for probe in ("startup", "ready", "live"):
            assert httpx.get(f"{own}/health/{probe}", timeout=LONG_S).json() == {"status": "ok"}
        series = httpx.get(f"{own}/metrics", timeout=LONG_S).text
        assert 'mooncake_health{probe="live",role="gateway",worker="gateway"} 1.0' in series
        assert "mooncake:workers_up" in series
        code, left = head.stop(signal.SIGTERM)
        assert (code, left) == (0, []), head.output
        assert "Traceback" not in head.output


def stream(
    gateway: ServerProcess, num_tokens: int, begun: threading.Semaphore
) -> tuple[list[int], str]:
    """Stream a greedy answer to the prompt; return its tokens and how it ended: "length", "error",
    or "cut" where the connection broke. `begun` is released with the first token.
    """
    body = {
        "prompt": PROMPT, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    ids: list[int] = []
    try:
        with httpx.stream(
            "POST", f"{gateway.url}/v1/completions", json=body, timeout=LONG_S
        ) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    return ids, "error"
                for choice in chunk["choices"]:
                    fresh = choice.get("token_ids") or []
                    if fresh and not ids:
                        begun.release()
                    ids += fresh
                    if choice["finish_reason"]:
                        return ids, choice["finish_reason"]
    except httpx.TransportError:
        return ids, "cut"
    return ids, "never ended"


def begin(
    pool: ThreadPoolExecutor, asked: list[tuple[ServerProcess, int]]
) -> list[Future[tuple[list[int], str]]]:
    """Start these streams and return when all have brought a token."""
    begun = threading.Semaphore(0)
    futures = [pool.submit(stream, gateway, count, begun) for gateway, count in asked]
    for _ in futures:
        assert begun.acquire(timeout=LONG_S)
    return futures


def states(gateway: ServerProcess) -> dict[str, str]:
    """Return what a gateway knows of all."""
    return {one["id"]: one["state"] for one in gateway.get("/v1/cluster/status")["gateways"]}


def id_of(gateway: ServerProcess) -> str:
    return str(gateway.get("/v1/cluster/status")["gateways"][0]["id"])


def is_idle(gateway: ServerProcess) -> bool:
    """Whether no worker computes or holds anything for anybody."""
    status = gateway.get("/v1/cluster/status")
    return {worker["id"] for worker in status["workers"]} == WORKERS and all(
        num_held(worker) == 0 and worker["load"].get("num_running", 0) == 0
        for worker in status["workers"]
    )


def num_held(worker: dict[str, Any]) -> int:
    load = worker["load"]
    cached = load.get("num_cached_blocks", 0) if worker["role"] == "kvstore" else 0
    return int(load["num_total_blocks"] - load.get("num_free_blocks", 0) - cached)


def test_two_gateways_of_one_cluster(cluster: Cluster) -> None:
    with cluster.gateway() as first, cluster.gateway() as second:
        wait_until(lambda: len(states(first)) == len(states(second)) == 3, "they have met")
        assert set(states(first)) == {"gateway", id_of(first), id_of(second)}
        assert set(states(first).values()) == set(states(second).values()) == {"up"}
        assert first.worker_pids() == second.worker_pids()

        cold = first.complete(PROMPT, 40)
        assert second.complete(PROMPT, 40) == cold
        usage = second.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 400, "warmed through the other"

        prompts = [f"{number} bottles" for number in range(8)]
        alone = [first.complete(prompt, 30) for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            replies = list(pool.map(named_the_same, [first, second] * 4, prompts))
        assert replies == alone, "one id, eight requests at two gateways"

        metrics = second.text("/metrics")
        assert 'mooncake:workers_up{model_name="k2-nano",role="gateway"} 3.0' in metrics
        shown = subprocess.run(
            [sys.executable, "-m", "mooncake.cli.main", "status", "--url", first.url],
            capture_output=True, text=True, check=True, timeout=LONG_S,
        ).stdout  # fmt: skip
        assert id_of(second) in shown
        assert "decode-0" in shown

        gone = id_of(second)
        code, left = second.stop(signal.SIGTERM)
        assert (code, left) == (0, []), second.output
        wait_until(lambda: gone not in states(first), "it has said goodbye")
        assert "Traceback" not in first.output + second.output


def named_the_same(gateway: ServerProcess, prompt: str) -> list[int]:
    """Complete a prompt under the one id that all clients have chosen."""
    body = {
        "prompt": prompt, "max_tokens": 30, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    reply = httpx.post(
        f"{gateway.url}/v1/completions", json=body, headers={"X-Request-Id": "mine"}, timeout=LONG_S
    )
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def test_either_may_be_killed(cluster: Cluster) -> None:
    """Requests of the other go on, what the dead one asked for is let go of, and one that is
    started in its place serves at once.
    """
    with cluster.gateway() as first, ThreadPoolExecutor(4) as pool:
        expected = first.complete(PROMPT, 300)
        with cluster.gateway() as victim:
            wait_until(lambda: len(states(first)) == 3, "they have met")
            name = id_of(victim)
            asked = [(victim, ENDLESS), (victim, ENDLESS), (first, 300)]
            *cut, lives = begin(pool, asked)
            victim.process.kill()
            assert lives.result(LONG_S) == (expected, "length")
            assert {future.result(LONG_S)[1] for future in cut} == {"cut"}
            wait_until(lambda: is_idle(first), "workers let go of the dead one's requests")
            wait_until(lambda: states(first)[name] == "silent", "the dead one is missed")
        with cluster.gateway() as second:
            assert second.complete(PROMPT, 300) == expected
            wait_until(lambda: len(states(second)) >= 3, "the new one has met the others")
            *cut, lives = begin(pool, [(first, ENDLESS), (second, 300)])
            pids = second.worker_pids()
            first.process.kill()
            os.kill(pids["decode-0"], signal.SIGKILL)
            assert lives.result(LONG_S) == (expected, "length")
            assert [future.result(LONG_S)[1] for future in cut] == ["cut"]
            second.wait_for_workers(WORKERS, without=[pids["decode-0"]])
            assert second.complete(PROMPT, 40) == expected[:40]
            wait_until(lambda: is_idle(second), "nothing is left")
            second.text("/health")
            assert "Traceback" not in second.output


@pytest.mark.slow
def test_a_killed_gateway_s_streams_go_on_at_another(cluster: Cluster) -> None:
    """The example program asks for a broken stream again, with its `Idempotency-Key`, and shows the
    text that the dead gateway would have given. So do the retries of the openai client itself; they
    find the prompt's KV where the workers have it.
    """
    retries = runpy.run_path(str(EXAMPLES / "retries.py"))
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 600, "temperature": 1.0,
    }  # fmt: skip
    plain = {"extra_body": {"ignore_eos": True}}
    with cluster.gateway() as other:
        model = other.get("/v1/models")["data"][0]["id"]
        whole: list[str] = []
        for key in ("streamed", "whole"):
            body = asked | {"ignore_eos": True, "seed": seed_of(None, key)}
            whole.append(other.post(CHAT, body)["choices"][0]["message"]["content"])
        assert whole[0] != whole[1]
        with cluster.gateway() as victim, ThreadPoolExecutor(1) as pool:
            texts = retries["stream"](
                [victim.url, other.url], "streamed", model=model, **asked, **plain
            )
            ports = [urlsplit(each.url).port or 0 for each in (victim, other)]
            lives = [victim, other]
            with Relay(lambda: ("127.0.0.1", ports[lives[0] is other])) as relay:
                client = openai.OpenAI(base_url=f"http://127.0.0.1:{relay.port}/v1", api_key="x")
                asking = pool.submit(
                    client.chat.completions.create,
                    model=model, extra_headers={"Idempotency-Key": "whole"}, **asked, **plain,
                )  # fmt: skip
                shown = [next(texts) for _ in range(5)]
                wait_until(lambda: num_running(victim) == 2, "both answers are being given")
                lives.pop(0)
                victim.process.kill()
                assert "".join([*shown, *texts]) == whole[0]
                reply = asking.result(LONG_S)
                client.close()
        assert reply.choices[0].message.content == whole[1]
        assert reply.usage.prompt_tokens_details.cached_tokens > 400
        wait_until(lambda: is_idle(other), "workers let go of the dead ones' requests")


def num_running(gateway: ServerProcess) -> int:
    """Return how many requests decode has, as a gateway knows."""
    workers = gateway.get("/v1/cluster/status")["workers"]
    return sum(worker["load"].get("num_running", 0) for worker in workers)


def test_a_worker_that_one_gateway_does_not_hear_lives_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that loses messages one way costs its gateway that worker, and others nothing."""
    unheard = tmp_path / "unheard"
    monkeypatch.setenv(deaf_gateway.DEAF_TO, str(unheard))
    with cluster.gateway() as well, cluster.gateway(deaf_gateway.__name__) as deaf:
        wait_until(lambda: len(states(well)) >= 3 and len(states(deaf)) >= 3, "they have met")
        pids = well.wait_for_workers(WORKERS)
        assert deaf.wait_for_workers(WORKERS) == pids
        expected = well.complete(PROMPT, 40)
        unheard.write_text("decode-1")
        deaf.wait_for_workers(WORKERS - {"decode-1"})
        with ThreadPoolExecutor(4) as pool:
            asked = [(gateway, 40) for gateway in (well, deaf, well, deaf)]
            ends = [future.result(LONG_S) for future in begin(pool, asked)]
        assert ends == [(expected, "length")] * 4
        assert well.worker_pids() == pids, "the other gateway hears it: it is not lost"
        unheard.unlink()
        assert deaf.wait_for_workers(WORKERS) == pids, "it is heard again, and has not restarted"
        assert deaf.complete(PROMPT, 40) == expected
