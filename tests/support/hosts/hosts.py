"""A few hosts on one network, all of them on this machine.

Each has a network, mount, pid, ipc and UTS namespace: an address, a host name, a home, a disk, a
/tmp and a /dev/shm of its own. They see this machine's programs and files elsewhere. The bridge
that joins them lies in a namespace too, so nothing outside can reach them, nor they anything
outside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support import namespaces
from tests.support.hosts import late_link
from tests.support.hosts.forks import Fork, on_host
from tests.support.hosts.local_faults import LocalFaults
from tests.support.namespaces import ip, sweep

PREFIX = "mh"
"""The prefix of names of namespaces; the pid of the process that made them follows."""
NETWORK = "10.77.0"
HOME = "/home/user"
SHARED = "/mnt"
"""Where all hosts see the same files, as from a file server."""
DISK = "/home/disk"
"""A host's own disk: what lies there outlives a loss of power."""
NOWHERE = "02:00:00:00:00:fe"
"""An address of the link layer that no host has: what is sent there is lost without a word."""
SHM_BYTES = 2**30
CHANCE = "32 0 0 {random},53 1 0 {below},6 0 0 2,6 0 0 0"
"""A program for the kernel (classic BPF): load a random number, keep the packet unless that is
below another number. netem, which does this and more, is in few kernels.
"""
RANDOM = 2**32 - 4096 + 56
"""Where such a program loads a random number of 32 bits from."""
_NUMBERS = itertools.count(1)
_POST = """
import sys, urllib.request
url, body = sys.argv[1:]
asked = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(asked, timeout=240).read().decode())
"""


def needs_hosts() -> None:
    """Skip the test where this machine cannot have hosts."""
    if why := namespaces.why_not(PREFIX):
        pytest.skip(why)


class Program:
    """A program that runs on a host, and what it says."""

    def __init__(self, process: subprocess.Popen[bytes] | Fork, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 240.0) -> re.Match[str]:
        """Wait until it has said something that matches."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            ended = self.process.poll() is not None
            if found := re.search(pattern, self.output):
                return found
            if ended:
                break
            time.sleep(0.05)
        raise AssertionError(f"never said {pattern!r}; output:\n{self.output}")

    def send(self, number: int) -> None:
        """Send it a signal."""
        of = self.process.pid  # of the program that entered the host, whose one child is this one
        os.kill(int(Path(f"/proc/{of}/task/{of}/children").read_text()), number)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 240.0) -> int:
        """Send it a signal, and return its exit code."""
        self.send(number)
        return self.process.wait(seconds)


class Host:
    """One host. Its processes are children of a first one, and end with it."""

    def __init__(
        self, name: str, number: int, namespace: str, switch: str, folder: Path, shared: Path
    ) -> None:
        """`namespace` is its network, and `switch` the one in which the bridge and its port are."""
        self.name = name
        self._shared = shared
        self.address = f"{NETWORK}.{number}"
        self._namespace = namespace
        self.switch, self.port, self._late = switch, f"port{number}", f"late{number}"
        self._forwards: subprocess.Popen[bytes] | None = None
        self._link = f"{namespace}v"
        self._folder = folder
        self._disk = folder / "disk"
        self._disk.mkdir(parents=True, exist_ok=True)
        self._faults = LocalFaults(folder)
        self._first: subprocess.Popen[bytes] | None = None
        self._programs: list[subprocess.Popen[bytes] | Fork] = []

    def start(self) -> None:
        """Boot it, with nothing in its memory file systems."""
        program = Path(sys.executable).parent / "dumb-init"
        lines = [
            f"hostname {shlex.quote(self.name)}",
            "mount --make-rprivate /",
            "mount -t proc proc /proc",
            f"mount --bind {shlex.quote(str(self._shared))} {SHARED}",
            "mount -t tmpfs home /home",
            f"mkdir {HOME} {DISK}",
            f"mount --bind {shlex.quote(str(self._disk))} {DISK}",
            *self._faults.lines,
            "mount -t tmpfs -o mode=1777 tmp /tmp",
            f"mount -t tmpfs -o size={SHM_BYTES},mode=1777 shm /dev/shm",
            "echo up",
            f"exec {shlex.quote(str(program))} sleep infinity",
        ]
        self._first = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self._namespace,
             "unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child",
             "/bin/sh", "-ec", "\n".join(lines)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self._first.stdout is not None
        assert self._first.stdout.readline() == b"up\n", f"{self.name} does not boot"

    @property
    def _init(self) -> int:
        """The pid of its first process, as this machine counts."""
        assert self._first is not None
        of = self._first.pid
        return int(Path(f"/proc/{of}/task/{of}/children").read_text().split()[0])

    def path(self, place: str) -> Path:
        """Return where this machine sees a file of the host."""
        return Path(f"/proc/{self._init}/root{place}")

    def run(self, *words: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start a program in the host's home."""
        log = self._folder / f"{next(_NUMBERS)}.log"
        inside = [
            "nsenter", f"--target={self._init}", "--mount", "--net", "--pid", "--ipc", "--uts",
            f"--wd=/proc/{self._init}/root{HOME}",
        ]  # fmt: skip
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*inside, "env", *self._faults.variables, *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=_environment() | dict(environment or {}),
            )  # fmt: skip
        self._programs.append(process)
        return Program(process, log)

    def fork(self, be: Callable[[], int]) -> Program:
        """Start a fork of this process, which does `be` in the host's home without its faults of
        clock and disk.
        """
        log, first = self._folder / f"{next(_NUMBERS)}.log", self._init
        with log.open("wb") as output:
            fork = Fork(lambda: on_host(first, HOME, be), _environment(), output.fileno())
        self._programs.append(fork)
        return Program(fork, log)

    def mooncake(self, *words: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start the `mooncake` command."""
        program = Path(sys.executable).parent / "mooncake"
        return self.run(str(program), *words, environment=environment)

    def post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post JSON from this host, and return the JSON that comes back."""
        answer: dict[str, Any] = json.loads(
            self.check(sys.executable, "-c", _POST, url, json.dumps(body), seconds=300.0)
        )
        return answer

    def check(self, *words: str, seconds: float = 240.0) -> str:
        """Run a program to its end and return what it said.

        Raises:
            AssertionError: it failed.
        """
        program = self.run(*words)
        code = program.process.wait(seconds)
        assert code == 0, f"{words} on {self.name} ended with {code}:\n{program.output}"
        return program.output

    def unplug(self) -> None:
        """Lose the network; what runs does not learn of it."""
        ip("-netns", self._namespace, "link", "set", "eth0", "down")

    def plug(self) -> None:
        """Have the network again."""
        ip("-netns", self._namespace, "link", "set", "eth0", "up")

    def lose_way_to(self, other: Host) -> None:
        """Have all that is sent to `other` get lost; the other direction stays."""
        words = (other.address, "lladdr", NOWHERE, "nud", "permanent", "dev", "eth0")
        ip("-netns", self._namespace, "neigh", "replace", *words)

    def find_way_to(self, other: Host) -> None:
        """Reach `other` again."""
        with contextlib.suppress(OSError):
            ip("-netns", self._namespace, "neigh", "del", other.address, "dev", "eth0")

    def slow_down(self, rate: str) -> None:
        """Let so much leave it, as "100mbit"; tc(8) knows the units."""
        limit = ("root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        self._tc("qdisc", "replace", "dev", "eth0", *limit)

    def lose(self, share: float) -> None:
        """Have this share of the packets that reach it get lost, each by chance; 0: none."""
        below = min(2**32 - 1, int(share * 2**32))
        self._tc("qdisc", "replace", "dev", "eth0", "clsact")
        self._tc(
            "filter", "replace", "dev", "eth0", "ingress", "pref", "1", "protocol", "all",
            "handle", "1", "bpf", "direct-action", "bytecode",
            f"4,{CHANCE.format(random=RANDOM, below=below)}",
        )  # fmt: skip

    def delay(self, seconds: float) -> None:
        """Have all between it and other hosts take so much longer, each way; 0: no longer."""
        inside = ("-netns", self.switch, "link")
        if self._forwards is not None:
            self._forwards.kill()
            self._forwards.communicate()
            self._forwards = None
            ip(*inside, "delete", self._late)
        if not seconds:
            ip(*inside, "set", self.port, "master", "bridge")
            return
        ip(*inside, "add", self._late, "up", "type", "veth", "peer", "name", f"{self._late}b")
        ip(*inside, "set", f"{self._late}b", "master", "bridge", "up")
        ip(*inside, "set", self.port, "nomaster")
        self._forwards = subprocess.Popen(
            ["setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self.switch,
             sys.executable, late_link.__file__, self.port, self._late, str(seconds)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._forwards.stdout is not None
        assert self._forwards.stdout.readline() == b"forwards\n"

    def num_sent_again(self) -> int:
        """Return how many segments of TCP it has sent more than once."""
        names, values = (
            line.split() for line in self.check("grep", "^Tcp:", "/proc/net/snmp").splitlines()
        )
        return int(values[names.index("RetransSegs")])

    def _tc(self, *words: str) -> None:
        subprocess.run(["tc", "-netns", self._namespace, *words], check=True)

    def skew_clock(self, seconds: float) -> None:
        """Have the clock of its programs show so much more than the time, from now on."""
        self._faults.set(clock_s=seconds)

    def slow_disk(self, seconds: float) -> None:
        """Have each read, write and sync of a file on its disk take so much longer; 0: no longer,
        also for those that wait.
        """
        self._faults.set(disk_s=seconds)

    def fill_disk(self, *, full: bool = True) -> None:
        """Have writes to its disk fail for want of room, or succeed again."""
        self._faults.set(full=full)

    def vanish(self) -> None:
        """End as by a loss of power: no connection is closed."""
        self.unplug()
        self.end()

    def come_back(self) -> None:
        """Boot again, with the same address and nothing else."""
        self.plug()
        self.start()

    def end(self) -> None:
        """Kill all that runs on it."""
        if self._first is None:
            return
        with contextlib.suppress(OSError, IndexError):
            os.kill(self._init, signal.SIGKILL)
        self._first.kill()
        self._first.wait(30)
        for program in self._programs:
            program.wait(30)
        assert self._first.stdout is not None
        self._first.stdout.close()
        self._first = None


def _environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        "HOME": HOME,
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


class Hosts:
    """Hosts named a, b, c ... that reach each other. Use as a context."""

    def __init__(self, count: int, folder: Path, shared: Path) -> None:
        """`folder`: for what programs say. `shared`: what all hosts see at `SHARED`."""
        sweep(PREFIX)
        self._shared = shared
        self._tag = f"{PREFIX}{os.getpid()}"
        self._switch = f"{self._tag}-0"
        ip("netns", "add", self._switch)
        ip("-netns", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-netns", self._switch, "link", "set", "bridge", "up")
        self._namespaces = [self._switch]
        self.all = [self._attach(number, folder) for number in range(1, count + 1)]

    def _attach(self, number: int, folder: Path) -> Host:
        namespace, name = f"{self._tag}-{number}", "abcdefgh"[number - 1]
        host = Host(name, number, namespace, self._switch, folder / name, self._shared)
        ip("netns", "add", namespace)
        self._namespaces.append(namespace)
        inside = ("-netns", namespace)
        ip("-netns", self._switch, "link", "add", host.port, "type", "veth",
           "peer", "name", "eth0", "netns", namespace)  # fmt: skip
        ip("-netns", self._switch, "link", "set", host.port, "master", "bridge", "up")
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "address", "add", f"{host.address}/24", "dev", "eth0")
        ip(*inside, "link", "set", "eth0", "up")
        return host

    def __enter__(self) -> list[Host]:
        try:
            for host in self.all:
                host.start()
        except BaseException:
            self._close()
            raise
        return self.all

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for host in self.all:
            host.end()
            host.delay(0.0)
        for namespace in reversed(self._namespaces):
            with contextlib.suppress(OSError):
                ip("netns", "delete", namespace)


@contextlib.contextmanager
def hosts(count: int, folder: Path, shared: Path) -> Iterator[Sequence[Host]]:
    """Yield so many hosts (see `Hosts`); the test is skipped where there can be none."""
    needs_hosts()
    with Hosts(count, folder, shared) as made:
        yield made
