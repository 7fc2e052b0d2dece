"""The server's processes on this machine. Checks kill, stop, end and replace them."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mooncake.bench.conformance.endpoint import Endpoint
from mooncake.bench.conformance.verdict import Failed, NotPossible

_POLL_S = 0.25
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Use:
    """What a process uses of the machine."""

    memory_bytes: int
    num_descriptors: int
    num_mappings: int
    """Mappings of memory. A memory registration that is not undone is one of them."""


class Processes:
    """The processes of each role, "prefill" and "decode". A Mooncake server tells its own."""

    def __init__(self, pids: Mapping[str, list[int]], commands: Mapping[str, str]) -> None:
        """pids: the processes of each role; when there are none, the server is asked for them.
        commands: the command for each role that starts a process anew after it ended; without one,
        its supervisor does.
        """
        self._pids = {role: list(each) for role, each in pids.items() if each}
        self._commands = dict(commands)

    async def of_role(self, endpoint: Endpoint, role: str) -> list[int]:
        """Return the living processes of a role.

        Raises:
            NotPossible: they are not known, or not on this machine.
        """
        if self._pids:
            found = self._pids.get(role, [])
        else:
            if urllib.parse.urlsplit(endpoint.url).hostname not in _LOOPBACK:
                raise NotPossible("the server is not on this machine: its processes are elsewhere")
            workers = (await endpoint.status()).get("workers") or []
            of_role = [worker for worker in workers if worker.get("role") == role]
            found = [int(each["pid"]) for each in of_role if each.get("state") == "up"]
        alive = [pid for pid in found if is_alive(pid)]
        if not alive:
            raise NotPossible(f"no {role} process is known; name one with --{role}-pid")
        return alive

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal. Raises NotPossible when the process belongs to another user."""
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        except PermissionError as error:
            raise NotPossible(f"process {pid} may not be signalled: {error.strerror}") from error

    async def replaced(self, endpoint: Endpoint, role: str, gone: int, deadline_s: float) -> None:
        """Wait until another process has taken the place of `gone`.

        Raises:
            Failed: no other process has come.
        """
        if self._pids:
            self._start(role, gone)
            return
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            try:
                if gone not in await self.of_role(endpoint, role):
                    return
            except NotPossible:
                pass  # none is up yet
            await asyncio.sleep(_POLL_S)
        raise Failed(f"no {role} process came in the place of {gone} within {deadline_s:g} s")

    def may_end(self, role: str) -> bool:
        """Whether a process of a role may be told to end: there is another one, or a command starts
        one.
        """
        return len(self._pids.get(role, ())) > 1 or (role in self._pids and role in self._commands)

    async def ended(self, role: str, pid: int, deadline_s: float) -> None:
        """Wait until a process that was told to end has ended. If there is a command for it, start
        it anew.

        Raises:
            Failed: it does not end.
        """
        deadline = time.monotonic() + deadline_s
        while is_alive(pid):
            if time.monotonic() > deadline:
                raise Failed(f"{role} process {pid} did not end within {deadline_s:g} s of SIGTERM")
            await asyncio.sleep(_POLL_S)
        if role in self._commands:
            self._start(role, pid)
        else:
            self._pids[role].remove(pid)

    def _start(self, role: str, gone: int) -> None:
        command = self._commands.get(role)
        if command is None:
            raise NotPossible(f"--{role}-command has to say what starts a {role} process anew")
        started = subprocess.Popen(
            shlex.split(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._pids[role] = [started.pid if pid == gone else pid for pid in self._pids[role]]


def is_alive(pid: int) -> bool:
    """Whether a process runs. A process that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def use_of(pid: int) -> Use:
    """Return what a process of this machine uses. Raises NotPossible when this user may
    not see it.
    """
    home = Path(f"/proc/{pid}")
    try:
        pages = int((home / "statm").read_text().split()[1])
        mappings = (home / "maps").read_text().count("\n")
        descriptors = len(list((home / "fd").iterdir()))
    except OSError as error:
        raise NotPossible(f"process {pid} may not be looked at: {error.strerror}") from error
    return Use(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, mappings)
