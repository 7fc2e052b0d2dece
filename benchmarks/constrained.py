"""What following a JSON schema costs: `python -m benchmarks constrained`.

One colocated server, batches of eight streams, free and constrained in turn; the same number of
tokens each, for the schema asks for an array that never gets full. CPU time a token is shown beside
tokens per second: what else runs on the machine changes it less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.servers import ROOT, SERVED_NAME, Server, load, machine, ours, running
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.arrivals import Arrivals, Run
from mooncake.bench.endpoint import Target
from mooncake.bench.samples import PromptSource, RandomShape, random_samples
from mooncake.bench.serve import benchmark, shown_errors

ORDERS = {
    "type": "array",
    "minItems": 10000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0},
            "name": {"type": "string"},
            "state": {"enum": ["open", "paid", "shipped", "returned"]},
            "lines": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"sku": {"type": "string"}, "price": {"type": "number"}},
                    "required": ["sku", "price"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["id", "name", "state", "lines"],
        "additionalProperties": False,
    },
}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "JSON schema": {"structured_outputs": {"json": ORDERS}},
}


@dataclass(frozen=True)
class Round:
    """One load of one kind."""

    tokens_per_s: float
    tpot_ms: float
    cpu_ms_per_token: float


async def _load(server: Server, args: argparse.Namespace, fields: Mapping[str, Any]) -> Round:
    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    shape = RandomShape(input_len=64, output_len=args.output_len)
    samples = random_samples(shape, args.streams, PromptSource(None, vocab), seed=time.time_ns())
    target = Target(
        backend="openai",
        endpoint="/v1/completions",
        model=SERVED_NAME,
        headers={"Content-Type": "application/json"},
        fields={"ignore_eos": True, "temperature": 1.0, "seed": 1, **fields},
    )
    client = HttpClient(server.url)
    before = server.cpu_s()
    run = Run(arrivals=Arrivals(), max_concurrency=args.streams, progress=False)
    metrics, outputs = await benchmark(client, target, samples, run)
    cpu_s = server.cpu_s() - before
    client.close()
    if errors := shown_errors(outputs):
        raise RuntimeError(errors)
    tokens = args.streams * args.output_len
    if metrics.num_output_tokens != tokens:
        raise RuntimeError(f"{metrics.num_output_tokens} tokens came instead of {tokens}")
    tpot_ms = metrics.spreads["tpot"].median
    return Round(metrics.output_throughput, tpot_ms, 1000 * cpu_s / tokens)


def main(argv: Sequence[str]) -> int:
    """See the module."""
    args = _arguments(argv)
    print(f"{machine()}; {args.model.name}, {args.streams} streams of {args.output_len} tokens")
    rounds: dict[str, list[Round]] = {name: [] for name in KINDS}
    with running(ours("colocated", args.model, "--colocated")) as server:
        for number in range(args.rounds + 1):
            for name in sorted(KINDS, reverse=bool(number % 2)):
                found = run_in_loop(_load(server, args, KINDS[name]))
                print(f"{number or 'warm-up'}: {name}: {found.tokens_per_s:.1f} tok/s", flush=True)
                if number:
                    rounds[name].append(found)
    print("| answer | out tok/s | median TPOT ms | CPU ms/token | load |\n|---|---|---|---|---|")
    for name, each in rounds.items():
        print(
            f"| {name} | {statistics.median(r.tokens_per_s for r in each):.1f} "
            f"| {statistics.median(r.tpot_ms for r in each):.1f} "
            f"| {statistics.median(r.cpu_ms_per_token for r in each):.2f} | {load()} |"
        )
    free, bound = rounds["free"], rounds["JSON schema"]
    pairs = list(zip(free, bound, strict=True))
    speed = statistics.median(b.tokens_per_s / f.tokens_per_s for f, b in pairs)
    cpu = statistics.median(b.cpu_ms_per_token / f.cpu_ms_per_token for f, b in pairs)
    print(f"constrained / free: {speed:.3f}x tok/s, {cpu:.3f}x CPU a token (wanted: over 0.95x)")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks constrained", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=128)
    return parser.parse_args(argv)
