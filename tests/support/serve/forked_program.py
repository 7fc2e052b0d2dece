"""`mooncake` in a process forked from one that has imported all that servers need. A new
interpreter computes for six seconds until a server is ready; most of that are imports, of this
process and of the fork server that its workers are forked from.

What runs is the same, and so are the processes below it. Tests of a start itself, and those that
measure, start a new interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from mooncake.cli import main as cli
from mooncake.launch.host import environment
from mooncake.launch.host.processes import fork_server
from mooncake.launch.host.processes.fork_server import Fork, ForkServer
from mooncake.launch.worker.forks import ENGINE

TOP = Path(__file__).parents[3]
MODULES = (
    *ENGINE, "mooncake.cli.serve", "mooncake.launch.cluster.serve",
    "mooncake.launch.cluster.supervision.process_workers", "mooncake.launch.cluster.colocated",
    "mooncake.launch.cluster.gateways.gateway_process", "mooncake.api.http.event_loop",
    "mooncake.rpc.zmq_channel", "mooncake.launch.cluster.pool",
    "mooncake.launch.cluster.lone_worker", "mooncake.launch.cluster.gateways.joined_gateway",
    "mooncake.cli.main",
)  # fmt: skip


class _Forks:
    """The process of these tests that forks; it starts with the first server."""

    lock = threading.Lock()
    server: ForkServer | None = None


def start(
    words: Sequence[str], environ: Mapping[str, str], output: int, cwd: Path | None = None
) -> subprocess.Popen[str] | ForkedProcess:
    """Run `mooncake WORDS` in a session of its own; it writes to the descriptor `output`. Where no
    process forks for it, a new interpreter starts.
    """
    variables = {**environment.QUIET, **environment.COMPUTE, **environ}
    directory = str(cwd or Path.cwd())
    reading, writing = os.pipe()
    with Path(os.devnull).open("rb") as nothing:
        files = [nothing.fileno(), output, output, writing]
        program = [__name__, 3, directory, *words]
        forked = fork_server.fork(program, variables, files, server=_forks())
        os.close(writing)
        if forked is not None:
            return ForkedProcess(forked, reading)
        os.close(reading)
        return subprocess.Popen(
            [sys.executable, "-m", "mooncake.cli.main", *words],
            stdin=nothing, stdout=output, stderr=output, text=True, env=environ, cwd=cwd,
            start_new_session=True,
        )  # fmt: skip


def _forks() -> ForkServer:
    with _Forks.lock:
        if _Forks.server is None:
            folder = tempfile.TemporaryDirectory(prefix="forks-")
            path = os.pathsep.join([str(TOP), *filter(None, sys.path)])
            environ = {
                **environment.QUIET, **environment.COMPUTE, **os.environ, "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
            }  # fmt: skip
            _Forks.server = ForkServer(Path(folder.name, "forks"), MODULES, environ)
            atexit.register(folder.cleanup)
            atexit.register(_Forks.server.close)
        return _Forks.server


class ForkedProcess:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, fork: Fork, code: int) -> None:
        """`code`: the descriptor from which the exit code can be read after the end."""
        self._fork = fork
        self._code = code
        os.set_blocking(code, False)
        self.pid = fork.pid
        self._lock = threading.Lock()
        self._returncode: int | None = None
        self._pidfd = -1
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            self._pidfd = os.pidfd_open(fork.pid)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; if it told none, it was killed."""
        ends = select.poll()
        with self._lock:
            if self._returncode is None and self._pidfd >= 0:
                watched = os.dup(self._pidfd)
                ends.register(watched, select.POLLIN)
            else:
                return self._ended()
        try:
            if not ends.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("forked program", timeout or 0.0)
        finally:
            os.close(watched)
        with self._lock:
            return self._ended()

    def _ended(self) -> int:
        if self._returncode is None:
            told = b""
            with contextlib.suppress(BlockingIOError):
                told = os.read(self._code, 1)
            self._returncode = told[0] if told else -signal.SIGKILL
            os.close(self._code)
            self._fork.let_go()
            if self._pidfd >= 0:
                os.close(self._pidfd)
        return self._returncode

    def send_signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._returncode is None and self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _ForkedHere:
    """What `ForkServer` uses of `subprocess.Popen`: a fork of this process, which has imported what
    the server would import.
    """

    def __init__(
        self, words: Sequence[str], *, env: Mapping[str, str], pass_fds: tuple[int], **_: object
    ) -> None:
        [listener] = pass_fds
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _be_a_fork_server(words, env, listener, reading)
        os.close(reading)
        self.stdin = os.fdopen(writing, "wb", buffering=0)
        self._has_ended = False

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        return self._wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, how: int) -> int | None:
        """Return 0 once it has ended, and None before."""
        self._has_ended = self._has_ended or os.waitpid(self.pid, how)[0] == self.pid
        return 0 if self._has_ended else None


def _be_a_fork_server(
    words: Sequence[str], environ: Mapping[str, str], listener: int, stdin: int
) -> NoReturn:
    """Be what `python WORDS` would be, and then what the fork server's client wants."""
    os.setsid()
    os.dup2(stdin, 0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.closerange(3, listener)
    os.closerange(listener + 1, 2**16)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["-c", *words[4:]]
    fork_server._show_words(words[1:])
    code = 0
    try:
        fork_server.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what called this belongs to the process that was forked


def main() -> NoReturn:
    """Be `mooncake WORDS` and tell its exit code. The arguments: the descriptor for the code, the
    directory to run in, the words.
    """
    number, directory, *words = sys.argv[1:]
    own_pid, ends = os.getpid(), os._exit

    def tell(code: object) -> None:
        if os.getpid() == own_pid:  # what this process forks runs the code below, too
            told = code if isinstance(code, int) else int(code is not None)
            os.write(int(number), bytes([told]))

    def end(status: int) -> NoReturn:
        tell(status)
        ends(status)

    os._exit = end
    os.chdir(directory)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As in a new interpreter: only its own fork server forks for it.
    fork_server.Origin.path = None
    fork_server.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
        Popen=_ForkedHere, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL
    )
    fork_server._show_words(["-m", "mooncake.cli.main", *words])
    sys.argv = ["mooncake", *words]
    try:
        cli.program()
    except SystemExit as left:
        tell(left.code)
        raise
    except BaseException:
        tell(1)
        raise


if __name__ == "__main__":
    main()
