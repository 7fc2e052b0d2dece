"""Clusters of which one part after another is killed, for `benchmarks pauses`.

Each is a context that yields what starts clients of a gateway, and what makes each fault, by the
name of what is killed: once all that the fault needs is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support.servers import birth, family
from benchmarks.support.streams import words
from tests.support.hosts.hosts import HOME, Host, Hosts
from tests.support.hosts.placed import GCS, NODE, RAYLET, UP, WORKERS, Placed
from tests.support.hosts.soak.cluster import ROLES, SoakCluster
from tests.support.hosts.soak.faults import Fault as SoakFault

START_S = 900.0
POLL_S = 0.5
MAX_NUM_SEQS = 6
"""Of a decode engine that Ray has placed, so that eight clients need both: one that has the blocks
of all would compute all.
"""
UNHEARD_S = 5.0
"""A worker that a gateway has not heard for so long does not count as up."""
SMALL = (
    "--dtype", "float32", "--kv-cache-memory-bytes", "64MiB", "--kvstore-dram-bytes", "64MiB",
)  # fmt: skip
JOIN = r"--role ROLE --join (\S+)"
"""What `mooncake serve --headless` says when it is ready."""
ASK = """
import ssl, sys, urllib.request
context = ssl.create_default_context(cafile=sys.argv[2])
print(urllib.request.urlopen(sys.argv[1], timeout=20, context=context).read().decode())
"""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is killed, and the gateway that clients ask meanwhile."""

    url: str
    begin: Callable[[], object]
    is_over: Callable[[], bool] = lambda: True
    """Whether what was killed is there again."""


Clients = Callable[[str, int], contextlib.AbstractContextManager[Path]]
"""Starts so many clients of a gateway for its body; yields the file of what they say."""
Faults = Mapping[str, Callable[[], Fault]]
Cluster = Callable[[Path, Path], contextlib.AbstractContextManager[tuple[Clients, Faults]]]


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds. Raises RuntimeError: it does not in time."""
    end_s = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end_s:
            raise RuntimeError(f"not within {START_S:.0f} s: {what}")
        time.sleep(POLL_S)


# ---------------------------------------- `mooncake serve`


@dataclasses.dataclass
class Serving:
    """A `mooncake serve` of this machine, and what it has said."""

    process: subprocess.Popen[bytes]
    log: Path
    known: dict[int, str | None] = dataclasses.field(default_factory=dict)
    """Its processes and when they began, as `note` has seen them: others may outlive the first."""

    def note(self) -> None:
        pids = set(family(self.process.pid)) - {self.process.pid}
        self.known |= {pid: birth(pid) for pid in pids}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def num_said(self, pattern: str) -> int:
        return len(re.findall(pattern, self.output))

    def wait_for(self, pattern: str) -> str:
        """Return the first group of what it says that matches. Raises RuntimeError: it has ended,
        or says nothing such.
        """

        def is_said() -> bool:
            if self.process.poll() is not None:
                raise RuntimeError(f"it has ended:\n{self.output}")
            return self.num_said(pattern) > 0

        until(is_said, f"{pattern!r} in {self.log}")
        return str(re.findall(pattern, self.output)[0])


@contextlib.contextmanager
def serving(folder: Path, name: str, *flags: str) -> Iterator[Serving]:
    """Run `mooncake serve` for the body; all its processes end with it."""
    log = folder / name
    command = [sys.executable, "-m", "mooncake.cli.main", "serve", *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    program = Serving(process, log)
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


@contextlib.contextmanager
def served(folder: Path, model: Path) -> Iterator[tuple[Clients, Faults]]:
    """`mooncake serve --headless` with a worker of each role, and two gateways that have joined."""
    head = [str(model), *SMALL, "--headless"]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(serving(folder, "head", *head))
        address = first.wait_for(JOIN)
        gateways = [
            stack.enter_context(
                serving(folder, name, "--role", "gateway", "--join", address, "--port", "0")
            )
            for name in ("gateway", "other")
        ]
        url, _ = [each.wait_for(r"on (http://\S+)/v1") for each in gateways]

        def pids() -> dict[str, int]:
            with urllib.request.urlopen(f"{url}/v1/cluster/status", timeout=60) as reply:
                return {each["id"]: each["pid"] for each in living(json.load(reply))}

        def kill(pid: int) -> None:
            first.note()
            os.kill(pid, signal.SIGKILL)

        def start_again() -> None:
            kill(first.process.pid)
            first.process.wait()
            again.append(stack.enter_context(serving(folder, "again", *head)))

        def worker(role: str) -> Fault:
            name = f"{role}-0"
            pid = pids()[name]
            return Fault(url, lambda: kill(pid), lambda: pids().get(name, pid) != pid)

        faults: Faults = {
            **{role: partial(worker, role) for role in ("prefill", "decode", "kvstore")},
            "another gateway": lambda: Fault(url, lambda: kill(gateways[1].process.pid)),
            "the supervisor, started again": lambda: Fault(
                url, start_again, lambda: again[0].num_said(JOIN) > 0
            ),
        }
        again: list[Serving] = []

        @contextlib.contextmanager
        def clients(url: str, number: int) -> Iterator[Path]:
            log = folder / "clients"
            with log.open("wb") as output:
                process = subprocess.Popen(words(url, number), stdout=output)
            try:
                yield log
            finally:
                process.kill()
                process.wait()

        yield clients, faults


# ---------------------------------------- `mooncake up`


def living(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the workers that a gateway hears."""
    return [
        each for each in status["workers"] if each["state"] == "up" and each["silent_s"] < UNHEARD_S
    ]


class Watched:
    """A cluster as a host sees it that is none of its machines, and the clients there."""

    def __init__(self, host: Host, authority: Path) -> None:
        """`authority`: the certificate that signed those of the gateways."""
        self._host = host
        shutil.copy(authority, host.path(f"{HOME}/ca.pem"))

    @contextlib.contextmanager
    def clients(self, url: str, number: int) -> Iterator[Path]:
        program = self._host.run(*words(url, number, "ca.pem"))
        try:
            yield program.log
        finally:
            program.stop(signal.SIGKILL)

    def status(self, url: str) -> dict[str, Any]:
        """Return what a gateway knows; nothing, where it does not answer."""
        asking = (sys.executable, "-c", ASK, f"{url}/v1/cluster/status", "ca.pem")
        try:
            told: dict[str, Any] = json.loads(self._host.check(*asking))
        except (AssertionError, subprocess.TimeoutExpired):
            return {"workers": [], "gateways": []}
        return told

    def pids(self, url: str) -> dict[tuple[str, str], int]:
        """Return the processes of workers, by their role and machine."""
        return {(each["role"], each["node_id"]): each["pid"] for each in living(self.status(url))}

    def await_members(self, url: str, wanted: Counter[str]) -> None:
        """Wait until a gateway knows so many of each role."""

        def holds() -> bool:
            told = self.status(url)
            here = Counter(each["role"] for each in living(told))
            here["gateway"] = sum(each["state"] == "up" for each in told["gateways"])
            return here == wanted

        until(holds, f"{url} knows {dict(wanted)}")

    def await_work(self, url: str, role: str, node: str) -> None:
        """Wait until a worker has a request of clients."""

        def holds() -> bool:
            return any(
                (each["role"], each["node_id"]) == (role, node) and each["load"].get("num_running")
                for each in living(self.status(url))
            )

        until(holds, f"{role} on {node} has work")


@contextlib.contextmanager
def up(folder: Path, model: Path) -> Iterator[tuple[Clients, Faults]]:
    """The three hosts of the soak, of which any two can serve."""
    shared = folder / "shared"
    copied = shutil.copytree(model, shared / model.name)
    with Hosts(len(ROLES) + 1, folder / "hosts", shared) as hosts:
        cluster = SoakCluster(hosts, copied, folder)
        watched = Watched(hosts[-1], folder / "folders" / "a" / "ca.pem")
        url = f"https://{hosts[0].address}:8000"
        wanted = Counter(role for roles in ROLES.values() for role in roles)

        def row(kind: str, host: str, what: str = "") -> Fault:
            fault = SoakFault(kind, host, what)
            watched.await_members(url, wanted)
            before = watched.pids(url)
            hit = {key: pid for key, pid in before.items() if key[1] == fault.host}
            if fault.what:
                hit = {key: pid for key, pid in hit.items() if key[0] == fault.what}

            def begin() -> None:
                if ("decode", fault.host) in hit:
                    watched.await_work(url, "decode", fault.host)
                end = cluster.begin(fault)
                if fault.kind != "vanish":
                    end()

            def is_over() -> bool:
                if fault.kind == "vanish":
                    return True
                now = watched.pids(url)
                return all(now.get(key, pid) != pid for key, pid in hit.items())

            return Fault(url, begin, is_over)

        yield (
            watched.clients,
            {
                **{r: partial(row, "kill", "c", r) for r in ("prefill", "decode", "kvstore")},
                "another gateway": partial(row, "kill", "b", "gateway"),
                "`up` and its processes": partial(row, "kill up", "c"),
                "a host": partial(row, "vanish", "c"),
            },
        )


@contextlib.contextmanager
def placed(folder: Path, model: Path) -> Iterator[tuple[Clients, Faults]]:
    """Two hosts with gateways and pool nodes, over which Ray places engines. Clients ask the one
    that is not Ray's head.
    """
    shared = folder / "shared"
    copied = shutil.copytree(model, shared / model.name)
    with Hosts(3, folder / "hosts", shared) as hosts:
        machines = hosts[:2]
        cluster = Placed(machines, copied, **{"max-num-seqs": MAX_NUM_SEQS})
        watched = Watched(hosts[2], machines[0].path(f"{HOME}/k2/a/ca.pem"))
        cluster.type_up(machines[0]).wait_for("this machine is the head of Ray", START_S)
        cluster.type_up(machines[1])
        cluster.await_watched(1)
        wanted = Counter({"gateway": 2, "kvstore": 2, **WORKERS})
        heads = 1
        """How many have said by the next fault that they look after all workers."""

        def asked() -> tuple[Host, str]:
            """Return Ray's head, and the gateway of the other machine, once that knows all and the
            head looks after all: engines serve on while nobody does.
            """
            until(lambda: cluster.num_watched() >= heads, "Ray looks after all workers")
            head = cluster.head()
            [other] = [each for each in machines if each is not head]
            url = f"https://{other.address}:8000"
            watched.await_members(url, wanted)
            return head, url

        def engine(role: str) -> Fault:
            head, url = asked()
            before = watched.pids(url)
            node = next((n for r, n in before if (r, n) == (role, head.name)), "")
            host = head if node else next(each for each in machines if each is not head)
            pid = before[role, host.name]

            def begin() -> None:
                if role == "decode":
                    watched.await_work(url, role, host.name)
                host.check("kill", "-9", str(pid))

            return Fault(url, begin, lambda: watched.pids(url).get((role, host.name), pid) != pid)

        def keeper(pattern: str) -> Fault:
            nonlocal heads
            head, url = asked()
            number = heads = cluster.num_watched() + 1

            def begin() -> None:
                cluster.kill(head, pattern)
                if pattern == UP:
                    cluster.type_up(head)

            return Fault(url, begin, lambda: cluster.num_watched() >= number)

        def power() -> Fault:
            head, url = asked()
            number = cluster.num_watched()

            def begin() -> None:
                watched.await_work(url, "decode", head.name)
                head.vanish()

            return Fault(url, begin, lambda: cluster.num_watched() > number)

        yield (
            watched.clients,
            {
                **{role: partial(engine, role) for role in WORKERS},
                "Ray's head": partial(keeper, GCS),
                "Ray's raylet": partial(keeper, RAYLET),
                "the node of Ray": partial(keeper, NODE),
                "`up`": partial(keeper, UP),
                "the head's host": power,
            },
        )


CLUSTERS: Mapping[str, Cluster] = {"serve": served, "up": up, "placed": placed}
