"""How long clients get no token when something is killed: `python -m benchmarks pauses`.

Clients stream from one gateway, while `kill -9` ends one process after another, and at last a host
loses its power. A pause is the longest time between two tokens of a client, also of two requests
that follow each other, from the kill until what was killed is there again and all clients have
ended three more requests. Beside it stand how long all that takes, and the longest time between two
tokens in as many requests just before.

The clusters (`--of`) are `serve`, processes of this machine; `up`, three hosts made of namespaces,
each with its `mooncake up`; `placed`, two such hosts, over which Ray places the engines. Hosts need
root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.support.faults import CLUSTERS, Fault
from benchmarks.support.servers import load, machine
from benchmarks.support.streams import Streams

START_S = 600.0
NUM_AFTER = 3
"""Requests of each client that show that all is well again."""
MODEL = Path(__file__).parents[1] / "mooncake" / "k2-demo"


def measure(clients: Streams, fault: Fault, limit_s: float) -> str:
    """Return what the clients saw of a fault, who already stream: the columns of its row.

    Raises:
        RuntimeError: they get no answers before the fault.
    """
    quiet_s = time.monotonic()
    if not clients.go_on(NUM_AFTER, START_S):
        raise RuntimeError("clients get no answers before the kill")
    begun_s = time.monotonic()
    before_s = clients.pause_s(quiet_s, begun_s)
    fault.begin()
    well = clients.go_on(NUM_AFTER, limit_s, fault.is_over)
    end_s = time.monotonic()
    pause_s, num_failed = clients.pause_s(begun_s, end_s), clients.num_failed(begun_s)
    again = f"{end_s - begun_s:.0f} s" if well else f"not within {limit_s:.0f} s"
    return f"{before_s:.1f} s | {pause_s:.1f} s | {again} | {num_failed}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pauses", description=__doc__)
    parser.add_argument("--of", choices=CLUSTERS, nargs="+", default=[*CLUSTERS])
    parser.add_argument("--killed", nargs="+", default=[], help="only these rows of the tables")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--clients", type=int, default=8, help="how many stream (8)")
    parser.add_argument("--limit-s", type=float, default=180.0, help="how long a fault may last")
    given = parser.parse_args(argv)
    for name in given.of:
        print(f"\n{name}: {machine()}; load {load()}\n")
        print("| killed | longest gap before | pause | all well again | requests that failed |")
        print("|---|---|---|---|---|")
        with (
            tempfile.TemporaryDirectory() as folder,
            CLUSTERS[name](Path(folder), given.model) as (clients, faults),
        ):
            for killed, make in faults.items():
                if given.killed and killed not in given.killed:
                    continue
                fault = make()
                with clients(fault.url, given.clients) as log:
                    row = measure(Streams(log, given.clients), fault, given.limit_s)
                print(f"| {killed} | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
