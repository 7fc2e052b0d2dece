"""How long `mooncake serve` takes until it is ready, and where the time goes: `python -m benchmarks
startup [MODEL]`.

Kinds of start take turns, beside one `import torch, ray`: a first start (nothing cached), a second
one, `--colocated`. CPU seconds are those of the server and all its processes. Phases are those that
each process logs; the wall time of a phase less its CPU time is what it waits, or what others that
use the machine take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.servers import Layout, family, load, machine, process_cpu_s, running
from mooncake.launch.cluster.supervision.worker_handle import PROGRAM
from mooncake.launch.host.processes.start_phases import Phase, phases_said

POLL_S = 0.02
LOG_S = 5.0
"""A server that is ready has said so in its log by then."""
BASE = "import torch, ray"
FIRST, SECOND, COLOCATED = "first start", "second start", "--colocated"
CACHE = "XDG_CACHE_HOME"


@dataclasses.dataclass(frozen=True)
class Start:
    """One start, measured."""

    wall_s: float
    cpu_s: float
    processes: dict[str, float] = dataclasses.field(default_factory=dict)
    """CPU seconds by kind of process."""
    phases: dict[str, list[Phase]] = dataclasses.field(default_factory=dict)
    """Process -> its phases."""


def kind_of(pid: int, server: int, forks: set[int]) -> str:
    """Return what a process of the server is, by its words."""
    if not (words := _words(pid)):
        return "ended"
    if pid == server:
        return "gateway"
    if pid in forks:
        return "fork server"
    return "workers" if PROGRAM in words else "what compiles"


def serve(cache: Path, *flags: str) -> Start:
    """Start `mooncake serve` once, its cache in `cache`."""
    program = (sys.executable, "-m", "mooncake.cli.main", "serve", "--log-format", "json", *flags)
    layout = Layout(name="startup", command=program, environment={CACHE: str(cache)})
    began_s = time.perf_counter()
    with running(layout, compared={}, poll_s=POLL_S) as server:
        wall_s = time.perf_counter() - began_s
        pids = family(server.pid)
        took = {pid: process_cpu_s([pid]) for pid in pids}
        forks = {pid for pid in pids if "fork_server" in _words(pid) and _parent(pid) == server.pid}
        processes: dict[str, float] = defaultdict(float)
        for pid, cpu_s in took.items():
            processes[kind_of(pid, server.pid, forks)] += cpu_s
        end_s = time.monotonic() + LOG_S
        while "gateway" not in (phases := dict(_phases(server.log))) and time.monotonic() < end_s:
            time.sleep(POLL_S)
    return Start(wall_s, sum(took.values()), dict(processes), phases)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


def _phases(log: Path) -> Iterator[tuple[str, list[Phase]]]:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{") and (found := phases_said(json.loads(line)["message"])):
            yield json.loads(line)["worker"], found


def imports() -> Start:
    """Import torch and Ray in a new process."""
    began_s, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, "-c", BASE], check=True)
    after = os.times()
    cpu_s = after.children_user + after.children_system
    cpu_s -= before.children_user + before.children_system
    return Start(time.perf_counter() - began_s, cpu_s)


def kinds(model: list[str], cache: Path) -> dict[str, Callable[[], Start]]:
    """Return what is started, by its name."""

    def first() -> Start:
        with tempfile.TemporaryDirectory() as empty:
            return serve(Path(empty), *model)

    return {
        BASE: imports,
        FIRST: first,
        SECOND: lambda: serve(cache, *model),
        COLOCATED: lambda: serve(cache, *model, "--colocated"),
    }


def middle(starts: list[Start]) -> Start:
    """Return the start of median CPU time, with the median wall time."""
    ordered = sorted(starts, key=lambda start: start.cpu_s)
    wall_s = statistics.median(start.wall_s for start in starts)
    return dataclasses.replace(ordered[len(ordered) // 2], wall_s=wall_s)


def table(found: dict[str, Start]) -> Iterator[str]:
    """Yield the lines of the tables."""
    base = found[BASE]
    yield "| start | ready, s | times the import | CPU s |"
    yield "|---|---|---|---|"
    for name, start in found.items():
        ratio = f"{start.wall_s / base.wall_s:.1f}"
        yield f"| {name} | {start.wall_s:.1f} | {ratio} | {start.cpu_s:.1f} |"
    for name, start in found.items():
        if not start.processes:
            continue
        yield ""
        yield f"| {name} | phase | wall s | CPU s |"
        yield "|---|---|---|---|"
        for kind, cpu_s in sorted(start.processes.items()):
            yield f"| {kind} | all, until ready |  | {cpu_s:.2f} |"
        for process, phases in sorted(start.phases.items()):
            for phase in phases:
                yield f"| {process} | {phase.name} | {phase.wall_s:.2f} | {phase.cpu_s:.2f} |"


def as_json(found: dict[str, Start]) -> str:
    """Return the same for programs."""
    rows: dict[str, Any] = {name: dataclasses.asdict(start) for name, start in found.items()}
    for name, start in found.items():
        rows[name]["phases"] = {
            process: [phase._asdict() for phase in phases]
            for process, phases in start.phases.items()
        }
    return json.dumps({"machine": machine(), "load": load(), "starts": rows}, indent=1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=__doc__)
    parser.add_argument("model", nargs="?", help="k2-demo if none is given")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    model = [] if args.model is None else [args.model]
    measured: dict[str, list[Start]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as cache:
        starts = kinds(model, Path(cache))
        starts[SECOND]()  # which is the first one, with this cache
        for _ in range(args.rounds):
            for name, start in starts.items():
                measured[name].append(start())
    found = {name: middle(each) for name, each in measured.items()}
    if args.json:
        print(as_json(found))
    else:
        print(f"{machine()}, load {load()}; medians of {args.rounds}")
        print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
