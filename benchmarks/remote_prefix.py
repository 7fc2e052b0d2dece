"""TTFT with the prefix in another node's pool: `python -m benchmarks remote-prefix`.

Two nodes, each a prefill worker and a kvstore worker, take turns (--policy round-robin): the first
time a prompt is computed on one of them, the second time the other fetches its blocks. Both come in
pairs, so that they meet the same load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.servers import ROOT, SERVED_NAME, Server, load, machine, ours, running
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.endpoint import Target, ask
from mooncake.bench.samples import Sample

SETTLE_S = 1.5
"""Until the blocks of a finished prompt, and the counters of a fetch, are known to the gateway."""
BLOCK_TOKENS = 64


async def _ttft_ms(client: HttpClient, tokens: list[int]) -> float:
    target = Target(
        backend="openai",
        endpoint="/v1/completions",
        model=SERVED_NAME,
        headers={"Content-Type": "application/json"},
        fields={"ignore_eos": True, "temperature": 0},
    )
    sample = Sample(prompt=tokens, num_prompt_tokens=len(tokens), num_output_tokens=2)
    output = await ask(client, target, sample, 0)
    if not output.success:
        raise RuntimeError(output.error)
    await asyncio.sleep(SETTLE_S)
    return 1000 * output.ttft_s


def blocks_fetched(server: Server) -> int:
    """Return how many blocks workers have fetched from pools so far."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if "blocks_fetched" in line and not line.startswith("#")]
    return int(sum(float(line.rpartition(" ")[2]) for line in found if "_created" not in line))


async def _pairs(server: Server, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return (computed, fetched) TTFTs in milliseconds; the first pair, a warm-up, is left out."""
    source = random.Random(args.seed)
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    client = HttpClient(server.url)
    pairs = []
    for number in range(args.pairs + 1):
        before = blocks_fetched(server)
        tokens = source.choices(range(1, vocab), k=args.prompt_len)
        computed_ms = await _ttft_ms(client, tokens)
        # Another end, so that the prefix is shared and no more.
        tail = source.choices(range(1, vocab), k=args.prompt_len - args.prefix_len)
        fetched_ms = await _ttft_ms(client, tokens[: args.prefix_len] + tail)
        num_blocks = blocks_fetched(server) - before
        print(
            f"{'warm-up' if not number else f'pair {number}'}: computed {computed_ms:7,.0f} ms, "
            f"prefix fetched {fetched_ms:7,.0f} ms ({num_blocks} blocks), load {load()}",
            flush=True,
        )
        if number:
            pairs.append((computed_ms, fetched_ms))
    client.close()
    return pairs


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    flags = ("--prefill", "2", "--decode", "1", "--kvstore", "2", "--policy", "round-robin")
    memory = ("--kv-cache-memory-bytes", "256MiB", "--kvstore-dram-bytes", "256MiB")
    layout = ours("2P+1D+2kvstore", args.model, *flags, *memory, "--num-threads", "1")
    print(f"{machine()}; {args.model.name}, prompts of {args.prompt_len} tokens, prefix of "
          f"{args.prefix_len // BLOCK_TOKENS * BLOCK_TOKENS} in the other node's pool")  # fmt: skip
    with running(layout) as server:
        pairs = run_in_loop(_pairs(server, args))
    computed = statistics.median(pair[0] for pair in pairs)
    fetched = statistics.median(pair[1] for pair in pairs)
    ratio = statistics.median(pair[1] / pair[0] for pair in pairs)
    print("| prefix of 2,000-token prompt | median TTFT ms |\n|---|---|")
    print(f"| recomputed | {computed:,.0f} |\n| in another node's pool | {fetched:,.0f} |")
    print(f"fetched / recomputed: {ratio:.2f} (median of pairs; target: under 0.5)")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks remote-prefix", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=2000)
    parser.add_argument("--prefix-len", type=int, default=1920)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    return parser.parse_args(argv)
