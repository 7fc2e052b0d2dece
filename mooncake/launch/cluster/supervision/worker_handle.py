"""The process of a worker as its supervisor sees it: a supervisor starts the process or adopts one
that runs, hears how it is, and has it end.

The process belongs to nobody: it outlives whoever started it. Both talk by packets over a socket
in this user's private folder, one supervisor at a time; a new one takes the place of the old one.
Owns the messages. `worker_program` is the other side.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from mooncake import __version__
from mooncake.base import MooncakeError
from mooncake.launch.host import environment
from mooncake.launch.host.build import revision
from mooncake.launch.host.processes.abstract_name import credentials_of
from mooncake.launch.host.processes.descendants import has_ended
from mooncake.launch.host.processes.fork_server import ForkServer, fork
from mooncake.launch.host.secrets.credentials import private_dir
from mooncake.launch.worker.settings import WorkerSettings

PROGRAM = "mooncake.launch.cluster.supervision.worker_program"
"""The module that the process of a worker runs."""
ANSWER_S = 60.0
"""A process that says nothing to a new supervisor for this long is killed."""
PACKET_BYTES = 2**17
TRIES = 3

_log = logging.getLogger(__name__)


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A supervisor's first word: be this worker, or go on if you are."""

    settings: WorkerSettings
    secret: str
    secret_file: str | None
    advertise_host: str | None
    fingerprint: str
    """What the worker is, apart from where its gateway is: see `fingerprint`."""
    orphan_s: float
    """How long a worker that is ready serves on without a supervisor."""

    def __repr__(self) -> str:
        """Return only the worker's name: one of the fields is a secret."""
        return f"Begin({self.settings!r})"


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End, as `Worker.leave` does."""

    limit_s: float
    waits: bool


class Told(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a worker's process is."""

    pid: int = 0
    what: str = "starting"
    done: int = 0
    whole: int = 0
    ready: bool = False
    refusal: str = ""
    """Why the worker cannot start."""


Message = Begin | Leave | Told


def fingerprint(settings: WorkerSettings, gpus: str | None = None) -> str:
    """Return what must be the same for a process to go on as the worker of a new supervisor: the
    release, the settings and the GPUs that it sees (None: those of this process), but not the
    gateway's address (which is in the name of a group, too), the secret and the log of one start.
    """
    group = settings.expert_group and msgspec.structs.replace(settings.expert_group, name="")
    same = msgspec.structs.replace(
        settings, cluster_secret="", gateway_address="", log_file=None, expert_group=group
    )
    gpus = gpus or environment.variables().get(environment.SEEN_GPUS, "")
    words = [__version__.encode(), revision().encode(), gpus.encode(), msgspec.msgpack.encode(same)]
    return hashlib.sha256(b"\0".join(words)).hexdigest()


def place_of(run: str, worker_id: str) -> Path:
    """Return the socket of a worker of one run of `mooncake serve`; its length does not depend on
    the names.
    """
    digest = hashlib.sha256(f"{run} {worker_id}".encode()).hexdigest()
    return private_dir() / f"worker-{digest[:16]}"


def connected(place: Path) -> socket.socket | None:
    """Return a connection to the process that listens at `place`, or None if there is none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(place))
    except OSError:
        connection.close()
        return None
    return connection


def is_running(place: Path) -> bool:
    """Return whether a process listens at `place`."""
    if (connection := connected(place)) is None:
        return False
    connection.close()
    return True


def running(run: str, worker_ids: Iterable[str]) -> dict[str, str]:
    """Return which of these workers of a run have a process on this machine, and their GPUs."""
    return running_at({worker_id: place_of(run, worker_id) for worker_id in worker_ids})


def running_at(places: Mapping[str, Path]) -> dict[str, str]:
    """Return which of these workers have a process that listens, and which GPUs that sees; empty:
    all that there are.
    """
    return {
        name: file.read_text() if (file := _gpus_file(place)).exists() else ""
        for name, place in places.items()
        if is_running(place)
    }


def _gpus_file(place: Path) -> Path:
    """Return the file that names the GPUs which the process at `place` sees, if not all."""
    return place.with_suffix(".gpus")


def _forget(place: Path) -> None:
    """Remove what a process at `place` has left."""
    place.unlink(missing_ok=True)
    _gpus_file(place).unlink(missing_ok=True)


class WorkerHandle:
    """Starts or adopts the process of a worker. `receive` says how it is until it has ended."""

    def __init__(
        self, place: Path, begin: Begin, start: Callable[[Path], None] | None = None
    ) -> None:
        """Adopt the process at `place`. Where there is none, or it is another worker and has ended
        for this one, `start` (by default `start_at`) starts a new one.

        Raises:
            MooncakeError: no process stays.
        """
        for _ in range(TRIES):
            connection = connected(place)
            is_new = connection is None
            if connection is None:
                (start or start_at)(place)
                connection = connected(place)
            limit_s = None if is_new else ANSWER_S  # imports may take long; an end is noticed
            if connection is not None and (first := _greeted(connection, begin, limit_s)):
                self._connection, self._place, self.first = connection, place, first
                if not is_new:
                    _log.info("%s is adopted (pid %d)", begin.settings.worker_id, first.pid)
                return
        raise MooncakeError("its process ended before it reported anything; see its log above")

    def receive(self) -> Told | None:
        """Return the next word of the process, or None if it has ended, or has another
        supervisor.
        """
        try:
            return _received(self._connection)
        except OSError:
            return None

    def leave(self, limit_s: float, *, waits: bool) -> None:
        """Have the worker end. It is no error when it has ended already."""
        with contextlib.suppress(OSError):
            self._connection.send(msgspec.msgpack.encode(Leave(limit_s=limit_s, waits=waits)))

    def cut(self) -> None:
        """Have `receive` return None, also for a thread that waits in it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the process. If it has ended, nothing is left of it."""
        self._connection.close()
        if not is_running(self._place):
            _forget(self._place)


def start_at(
    place: Path,
    forks: ForkServer | None = None,
    changes: Mapping[str, str] = MappingProxyType({}),
    wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Start a process that listens at `place` and waits for a supervisor. It is a child of none
    that may end before it: Ray ends the children of its processes. `forks` forks it, or else the
    server that forked this process. `changes`: what its environment has besides that of this
    process. `wanted`: whether to start it where that server has ended.

    Raises:
        MooncakeError: it is not wanted any more.
    """
    _forget(place)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # Bound here, so that a supervisor can connect at once.
        listener.bind(str(place))
        listener.listen()
        number = listener.fileno()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environ = {**environment.variables(), "PYTHONPATH": path, **changes}
        if gpus := environ.get(environment.SEEN_GPUS):
            _gpus_file(place).write_text(gpus)
        with Path(os.devnull).open("rb") as nothing:
            files = [nothing.fileno(), 1, 2, number]
            forked = fork([PROGRAM, 3], environ, files, outlives=True, server=forks)
            if forked is not None:
                forked.let_go()
                return
        if not wanted():
            raise MooncakeError("it is not to start any more")
        words = [sys.executable, "-m", PROGRAM, str(number)]
        subprocess.run(
            ["/bin/sh", "-c", '"$@" &', "sh", *words],  # the shell ends and leaves its child alone
            stdin=subprocess.DEVNULL,
            pass_fds=[number],
            env=environ,
            start_new_session=True,
            check=True,
        )


def end_left(place: Path) -> None:
    """Kill the process at `place`, if a supervisor has left one there. Nothing is left of it."""
    if (connection := connected(place)) is not None:
        with connection:
            _kill(connection)
    _forget(place)


def _greeted(connection: socket.socket, begin: Begin, limit_s: float | None) -> Told | None:
    """Have a process be a worker and write where this process does; return its first word. Return
    None if it was another worker and has ended, or it has said nothing within `limit_s` and was
    killed.
    """
    try:
        connection.settimeout(limit_s)
        socket.send_fds(connection, [msgspec.msgpack.encode(begin)], [1, 2])
        first = _received(connection)
        connection.settimeout(None)
    except TimeoutError:
        _kill(connection)
        first = None
    except OSError:
        first = None
    if first is None:
        connection.close()
    return first


def _received(connection: socket.socket) -> Told | None:
    packet = connection.recv(PACKET_BYTES)
    return msgspec.msgpack.decode(packet, type=Told) if packet else None


def _kill(connection: socket.socket) -> None:
    """Kill the process that listens at the other end and wait for its end. If it does not listen
    yet, the kernel names the process that started it instead, and nothing is killed.
    """
    pid, _ = credentials_of(connection)
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                has_ended(descriptor, ANSWER_S)
        finally:
            os.close(descriptor)
