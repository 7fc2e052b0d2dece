"""What everything but the model costs: `python -m benchmarks overhead`.

Gateway and workers are the real processes over ZeroMQ; the runner answers at once (`null_worker`).
CPU time of the gateway, not wall time, gives its tokens per second on one core: a busy machine
changes it little.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.support.servers import ROOT, SERVED_NAME, load, machine, process_cpu_s
from mooncake.api.http.client import HttpClient
from mooncake.api.http.event_loop import run_in_loop
from mooncake.bench.arrivals import Arrivals, Run
from mooncake.bench.endpoint import Output, Target
from mooncake.bench.metrics import Metrics
from mooncake.bench.samples import PromptSource, RandomShape, random_samples
from mooncake.bench.serve import benchmark, shown_errors

STREAMS = 64


@dataclasses.dataclass
class Cluster:
    """The processes under test."""

    url: str
    gateway: subprocess.Popen[str]
    workers: list[subprocess.Popen[str]]


@contextlib.contextmanager
def cluster(
    model: Path, *, split: bool, step_s: float = 0.0, traces: Sequence[str] = ()
) -> Iterator[Cluster]:
    """Start a gateway and workers that compute nothing; end them afterwards. traces: the collector
    of traces and the share of calls that are traced.
    """
    command = [sys.executable, "-m", "benchmarks.support.null_gateway"]
    command += [str(model), str(int(split)), *traces]
    gateway = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    workers: list[subprocess.Popen[str]] = []
    dead: list[str] = []
    try:
        assert gateway.stdout is not None
        opened = json.loads(gateway.stdout.readline())
        for settings in opened["workers"]:
            worker = [
                sys.executable,
                "-m",
                "benchmarks.support.null_worker",
                json.dumps(settings),
                str(step_s),
            ]
            workers.append(subprocess.Popen(worker, cwd=ROOT, text=True))
            end_with(workers[-1], gateway, dead)
        if gateway.stdout.readline().strip() != "ready":
            raise RuntimeError("the gateway's workers did not join")
        yield Cluster(opened["url"], gateway, workers)
    except Exception as error:
        if dead:
            raise RuntimeError(dead[0]) from error
        raise
    finally:
        for process in [*workers, gateway]:
            process.kill()
            with process:  # which waits, and closes its pipes
                pass


def end_with(
    worker: subprocess.Popen[str], gateway: subprocess.Popen[str], dead: list[str]
) -> threading.Thread:
    """Kill the gateway when the worker ends, and note that in `dead` before: what waits for an
    answer of the gateway, which would wait for the worker, then fails at once.
    """

    def watch() -> None:
        code = worker.wait()
        dead.append(f"a worker ended with code {code}: see what it printed above")
        gateway.kill()

    thread = threading.Thread(target=watch, name="end-with", daemon=True)
    thread.start()
    return thread


@dataclasses.dataclass(frozen=True)
class Cost:
    """CPU time that a load took, by process."""

    metrics: Metrics
    num_events: int
    gateway_s: float
    workers_s: float


async def _load(
    url: str, model: Path, shape: RandomShape, count: int, streams: int
) -> tuple[Metrics, list[Output]]:
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    samples = random_samples(shape, count, PromptSource(None, vocab), seed=time.time_ns())
    client = HttpClient(url)
    target = Target(
        backend="openai",
        endpoint="/v1/completions",
        model=SERVED_NAME,
        headers={"Content-Type": "application/json"},
        fields={"ignore_eos": True, "temperature": 0},
    )
    run = Run(arrivals=Arrivals(), max_concurrency=streams, progress=False)
    metrics, outputs = await benchmark(client, target, samples, run)
    client.close()
    if errors := shown_errors(outputs):
        raise RuntimeError(errors)
    return metrics, outputs


def cost(servers: Cluster, model: Path, shape: RandomShape, count: int, streams: int) -> Cost:
    """Run one load and return what it took."""
    gateway_s = process_cpu_s([servers.gateway.pid])
    workers_s = process_cpu_s([worker.pid for worker in servers.workers])
    metrics, outputs = run_in_loop(_load(servers.url, model, shape, count, streams))
    return Cost(
        metrics=metrics,
        num_events=sum(1 + len(output.itls_s) for output in outputs),
        gateway_s=process_cpu_s([servers.gateway.pid]) - gateway_s,
        workers_s=process_cpu_s([worker.pid for worker in servers.workers]) - workers_s,
    )


def streaming(servers: Cluster, args: argparse.Namespace) -> str:
    """Return the figures of long answers."""
    shape = RandomShape(input_len=64, output_len=args.output_len)
    rows = [cost(servers, args.model, shape, STREAMS, STREAMS) for _ in range(args.rounds)]
    tokens = STREAMS * args.output_len
    return (
        f"{statistics.median(r.metrics.output_throughput for r in rows):,.0f} "
        f"| {statistics.median(r.num_events / tokens for r in rows):.2f} "
        f"| {statistics.median(1e6 * r.gateway_s / tokens for r in rows):.1f} "
        f"| {statistics.median(tokens / r.gateway_s for r in rows):,.0f} "
        f"| {statistics.median(1e6 * r.workers_s / tokens for r in rows):.1f}"
    )


def requests(servers: Cluster, args: argparse.Namespace) -> str:
    """Return the figures of one-token answers to long prompts: the price of one request."""
    shape = RandomShape(input_len=1024, output_len=1)
    count = 4 * STREAMS
    rows = [cost(servers, args.model, shape, count, STREAMS) for _ in range(args.rounds)]
    alone = [cost(servers, args.model, shape, 16, 1) for _ in range(args.rounds)]
    return (
        f"{statistics.median(1e3 * r.gateway_s / count for r in rows):.2f} "
        f"| {statistics.median(1e3 * r.workers_s / count for r in rows):.2f} "
        f"| {statistics.median(r.metrics.spreads['ttft'].median for r in alone):.1f} "
        f"| {statistics.median(r.metrics.spreads['ttft'].median for r in rows):.0f}"
    )


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    stream_rows, request_rows = [], []
    print(f"{machine()}; gateway, rpc and workers without a model, {STREAMS} streams")
    for name, split in (("decode alone", False), ("1P+1D", True)):
        for step_ms in (0.0, args.step_ms):
            with cluster(args.model, split=split, step_s=step_ms / 1000) as servers:
                warm = RandomShape(input_len=64, output_len=16)
                cost(servers, args.model, warm, STREAMS, STREAMS)
                row = streaming(servers, args)
                stream_rows.append(f"| {name} | {step_ms:.0f} | {row} | {load()} |")
                if not step_ms:
                    request_rows.append(f"| {name} | {requests(servers, args)} | {load()} |")
    print(
        "| layout | ms/step | tok/s through HTTP | events/token | gateway us/token "
        "| tok/s on one core of the gateway | workers us/token | load |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(stream_rows))
    print(
        "\n| layout | gateway CPU ms/request | workers CPU ms/request | TTFT ms alone "
        "| TTFT ms of 64 at once | load |\n|---|---|---|---|---|---|"
    )
    print("\n".join(request_rows))
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks overhead", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=20.0, help="pause of the paced runner")
    return parser.parse_args(argv)
