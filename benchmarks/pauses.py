"""For how long clients get no token when a process is killed: `python -m benchmarks pauses`.

`mooncake serve --headless` looks after the workers, and two gateways join it. Clients stream from
one of them, while `kill -9` ends one process after another. A pause is the longest time between two
tokens of a client, also of two requests that follow each other, from the kill until all clients
have ended three more requests. Beside it stands the longest one of as many requests just before.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.support.servers import birth, family, load, machine

START_S = 240.0
POLL_S = 0.05
NUM_CLIENTS = 3
NUM_TOKENS = 64
NUM_AFTER = 3
"""Requests of each client that show that all is well again."""
RAY_S = 90.0
"""Ray's processes look for a head that is gone for a minute, and then end."""
MODEL = Path(__file__).parents[1] / "mooncake" / "k2-demo"
SMALL = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--kvstore-dram-bytes", "64MiB",
)  # fmt: skip


@dataclasses.dataclass
class Program:
    """A `mooncake serve`, and what it has said."""

    process: subprocess.Popen[bytes]
    log: Path
    known: dict[int, str | None] = dataclasses.field(default_factory=dict)
    """Its processes and when they began, as `note` has seen them: others may outlive the first."""

    def note(self) -> None:
        pids = set(family(self.process.pid)) - {self.process.pid}
        self.known |= {pid: birth(pid) for pid in pids}

    def wait_for(self, pattern: str) -> str:
        """Return the first group of what it says that matches. Raises RuntimeError: it ended, or
        says nothing such.
        """
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s and self.process.poll() is None:
            if found := re.search(pattern, self.log.read_text(errors="replace")):
                return found.group(1)
            time.sleep(POLL_S)
        raise RuntimeError(f"never said {pattern!r}:\n{self.log.read_text(errors='replace')}")


@contextlib.contextmanager
def serve(folder: Path, name: str, *words: str) -> Iterator[Program]:
    """Run `mooncake serve` for the body; all its processes end with it."""
    log = folder / name
    command = [sys.executable, "-m", "mooncake.cli.main", "serve", *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    program = Program(process, log)
    try:
        yield program
    finally:
        program.note()
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid, began in program.known.items():
            if began is not None and birth(pid) == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Client:
    """Streams answers from one gateway, one after another, and notes when tokens come."""

    def __init__(self, url: str, number: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._host, self._port = str(parts.hostname), parts.port
        self._prompt = f"Story {number}: once upon a time there was a moon. " * 10
        self.token_s: list[float] = []
        self.ended_s: list[float] = []
        """When requests have ended well."""
        self.failed_s: list[float] = []
        """When requests were refused or broke off."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                good = self._ask()
            except (OSError, http.client.HTTPException):
                good = False
            (self.ended_s if good else self.failed_s).append(time.monotonic())
            if not good:
                self._stop.wait(0.1)

    def _ask(self) -> bool:
        body = {
            "prompt": self._prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection(self._host, self._port, timeout=120)
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            reply = connection.getresponse()
            if reply.status != 200:
                return False
            for line in reply:
                if self._stop.is_set():
                    return True
                if line.startswith(b"data: [DONE]"):
                    return True
                if line.startswith(b'data: {"error"'):
                    return False
                if line.startswith(b"data: "):
                    self.token_s.append(time.monotonic())
        return False

    def pause_s(self, begin_s: float, end_s: float) -> float:
        """Return the longest time without a token that ends in this span."""
        times = [at for at in list(self.token_s) if at <= end_s]
        pairs = zip(times, [*times[1:], end_s], strict=True)
        return max((late - early for early, late in pairs if late > begin_s), default=0.0)


@dataclasses.dataclass
class Cluster:
    """The processes under test, and the clients of one gateway."""

    head: Program
    gateway: Program
    other: Program
    url: str
    clients: list[Client]

    def worker(self, role: str) -> int:
        """Return the process of the first worker of a role."""
        with urllib.request.urlopen(f"{self.url}/v1/cluster/status", timeout=60) as reply:
            workers = json.load(reply)["workers"]
        return next(int(one["pid"]) for one in workers if one["id"] == f"{role}-0")

    def ray_head(self) -> int:
        """Return the process of Ray's head (GCS)."""
        return next(
            pid
            for pid in family(self.head.process.pid)
            if b"gcs_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        )


@contextlib.contextmanager
def cluster(model: Path, num_workers: int) -> Iterator[Cluster]:
    """Start the processes and the clients; end them after the body."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        number = str(num_workers)
        head = stack.enter_context(
            serve(
                folder, "head", str(model), *SMALL, "--headless", "--prefill", number,
                "--decode", number,
            )
        )  # fmt: skip
        address = head.wait_for(r"one more gateway: .* --join (\S+)")
        gateways, urls = [], []
        for name in ("gateway", "other"):
            joins = ("--role", "gateway", "--join", address, "--port", "0")
            gateways.append(stack.enter_context(serve(folder, name, *joins)))
            urls.append(gateways[-1].wait_for(r"on (http://\S+)/v1"))
        clients = [Client(urls[0], index) for index in range(NUM_CLIENTS)]
        for each in clients:
            stack.callback(each.close)
        yield Cluster(head, gateways[0], gateways[1], urls[0], clients)


def go_on(clients: list[Client], limit_s: float) -> bool:
    """Wait until each client has had `NUM_AFTER` more answers; return whether they have."""
    wanted = [len(each.ended_s) + NUM_AFTER for each in clients]
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if all(len(each.ended_s) >= count for each, count in zip(clients, wanted, strict=True)):
            return True
        time.sleep(POLL_S)
    return False


def measure(cluster: Cluster, name: str, pid: int, limit_s: float, watch_s: float = 0.0) -> None:
    """Kill a process and print what the clients saw. `watch_s`: its end may show only so long
    afterwards.
    """
    clients = cluster.clients
    quiet_s = time.monotonic()
    if not go_on(clients, START_S):
        raise RuntimeError(f"clients get no answers before the kill of {name}")
    killed_s = time.monotonic()
    before = max(each.pause_s(quiet_s, killed_s) for each in clients)
    cluster.head.note()
    os.kill(pid, signal.SIGKILL)
    time.sleep(watch_s)
    well = go_on(clients, limit_s)
    end_s = time.monotonic()
    pauses = [each.pause_s(killed_s, end_s) for each in clients]
    failed = sum(at > killed_s for each in clients for at in list(each.failed_s))
    pause = f"{max(pauses):.1f} s" if well else f"not over within {limit_s:.0f} s"
    print(f"| {name} | {before:.1f} s | {pause} | {failed} |", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pauses", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--workers", type=int, default=1, help="of prefill, and of decode")
    parser.add_argument("--limit-s", type=float, default=60.0, help="how long a fault may last")
    given = parser.parse_args(argv)
    print(f"{machine()}; {load()}; {given.workers} prefill, {given.workers} decode, 1 kvstore")
    print("| killed | longest gap before | pause | requests that failed |\n|---|---|---|---|")
    with cluster(given.model, given.workers) as running:
        victims: dict[str, Callable[[], int]] = {
            **{role: partial(running.worker, role) for role in ("prefill", "decode", "kvstore")},
            "another gateway": lambda: running.other.process.pid,
        }
        for name, pid in victims.items():
            measure(running, name, pid(), given.limit_s)
        measure(running, "Ray's head", running.ray_head(), given.limit_s, RAY_S)
    with cluster(given.model, given.workers) as running:
        measure(running, "the supervisor", running.head.process.pid, given.limit_s)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
