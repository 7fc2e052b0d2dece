"""What traces cost the gateway: `python -m benchmarks tracing`.

Two gateways, one of which traces a share of the calls, with workers that compute nothing, as in
`overhead`. They get the same loads in turn. The collector takes everything and keeps nothing; its
own CPU time is not counted. What counts is the CPU time of the gateways, of which a trace takes
more for each request than for each token.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.overhead import STREAMS, cluster, cost
from benchmarks.support.servers import ROOT, load, machine
from mooncake.bench.samples import RandomShape

LOADS = {"1 token": 1, "32 tokens": 32, "256 tokens": 256}
"""Name -> length of answers."""


class _Collector(BaseHTTPRequestHandler):
    """Takes traces."""

    protocol_version = "HTTP/1.1"
    num_bytes = 0

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.rfile.read(length)
        _Collector.num_bytes += length
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def _collector() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    print(f"{machine()}; gateway CPU ms for each request, without traces and with {args.share:.0%}")
    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in LOADS}
    with (
        _collector() as url,
        cluster(args.model, split=True) as plain,
        cluster(args.model, split=True, traces=(url, str(args.share))) as traced,
    ):
        for servers in (plain, traced):
            cost(servers, args.model, RandomShape(input_len=64, output_len=16), STREAMS, STREAMS)
        for turn in range(args.rounds):
            for name, output_len in LOADS.items():
                pair = list(zip((plain, traced), seconds[name], strict=True))
                for servers, found in pair if turn % 2 else pair[::-1]:
                    shape = RandomShape(input_len=1024, output_len=output_len)
                    taken = cost(servers, args.model, shape, args.requests, STREAMS)
                    found.append(1e3 * taken.gateway_s / args.requests)
            print(f"round {turn + 1} of {args.rounds}", flush=True)
    print("| answer | without | with | ratio of each round, median (least to most) | load |")
    print("|---|---|---|---|---|")
    for name, (without, with_traces) in seconds.items():
        ratios = sorted(b / a for a, b in zip(without, with_traces, strict=True))
        print(
            f"| {name} | {statistics.median(without):.2f} | {statistics.median(with_traces):.2f} "
            f"| {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) | {load()} |"
        )
    print(f"the collector got {_Collector.num_bytes:,} bytes")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tracing", description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "checkpoints" / "k2-small")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--requests", type=int, default=4 * STREAMS)
    parser.add_argument("--share", type=float, default=0.1, help="of the calls that are traced")
    return parser.parse_args(argv)
