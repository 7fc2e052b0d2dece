"""A process that has imported what workers need, and forks. A forked worker saves the seconds that
its imports take, and shares their memory with the others.

A process asks for a fork with `fork`; the fork ends with it, or outlives it. A forked process may
ask for further ones. Threads do not survive a fork, so the server has none. If an import starts a
thread, the server refuses, and workers start as any process does. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CLIENT_S = 10.0
"""A client that has not said by then what it wants is refused."""
MAX_FILES = 16
ANSWER_BYTES = 16
"""More than the number of a process has."""
_MAIN = "from mooncake.launch.host.processes.fork_server import main; main()"


@dataclass(frozen=True)
class Command:
    """What a client wants to run: a module with its arguments, an environment and open files."""

    words: list[str | int]
    """A number n stands for the descriptor of the n-th file."""
    environ: dict[str, str]
    directory: str
    files: list[int]
    """Descriptors of its standard input, output and errors, then of what else it inherits."""
    client: int
    """Descriptor of the connection to the client, which ends with this one."""
    outlives: bool = False
    """Whether this process does not end with the client."""


class ForkServer:
    """Starts a fork server and ends it. Use as a context, or `close` it."""

    def __init__(self, path: Path, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the server at the socket `path`. It imports `modules`, in `environ`."""
        self.path = path
        path.unlink(missing_ok=True)
        # Bound here, so that clients may come at once. Only the server holds it afterwards: where
        # it has died, clients are refused.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(64)
            words = [str(listener.fileno()), ",".join(modules)]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, *words],
                stdin=subprocess.PIPE,  # the server ends when this pipe closes
                stdout=subprocess.DEVNULL,
                env={**environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy starts threads otherwise
                pass_fds=(listener.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent alone
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        """Return whether the server has ended; clients then start as any process does."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server. Processes that it has forked run on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fork:
    """A process that `fork` has started. It is killed when this process ends."""

    def __init__(self, connection: socket.socket, pid: int, pidfd: int) -> None:
        """`connection`: the fork holds its other end, and is killed when this end closes."""
        self._connection = connection
        self._pidfd = pidfd
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False

    def kill(self) -> None:
        """End the process at once. This is no error when it has ended already."""
        with self._lock:
            if not self._ended:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def let_go(self) -> None:
        """Forget the process; it goes on only if it outlives this one."""
        os.close(self._pidfd)
        self._connection.close()

    def wait(self, timeout: float | None = None) -> None:
        """Return once the process has ended. One thread at a time may call this.

        Raises:
            TimeoutError: it has not ended in time.
        """
        if self._ended:
            return
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError(f"process {self.pid} has not ended after {timeout:g} s")
        with self._lock:
            self._ended = True
            os.close(self._pidfd)
            self._connection.close()


class Origin:
    """What this process knows about the server that forked it."""

    path: str | None = None
    """The server's socket; None: this process was not forked."""


def fork(
    words: Sequence[str | int],
    environ: Mapping[str, str],
    files: Sequence[int],
    *,
    outlives: bool = False,
    server: ForkServer | None = None,
) -> Fork | None:
    """Let `server`, or else the one that forked this process, fork once more; the fork becomes
    `python -m WORDS`. Return None if there is no server, or if it no longer forks.

    files: descriptors for standard input, output and errors, then those that the fork inherits. A
    number n in `words` stands for the n-th of them. outlives: the fork does not end with this
    process.
    """
    path = Origin.path if server is None else str(server.path)
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # A server of our own may still import; if it ends, so does the connection.
        connection.settimeout(CLIENT_S if server is None else None)
        connection.connect(path)
        socket.send_fds(connection, [b"\0"], list(files))
        connection.sendall(json.dumps([list(words), dict(environ), os.getcwd(), outlives]).encode())
        connection.shutdown(socket.SHUT_WR)
        answer, pidfds, _, _ = socket.recv_fds(connection, ANSWER_BYTES, 1)
    except OSError:
        answer = b""
    if not answer:
        connection.close()
        return None
    [pidfd] = pidfds
    return Fork(connection, int(answer), pidfd)


def main() -> None:
    """Be the server until standard input ends. A fork becomes what its client wants."""
    number, modules = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    command = _serve(socket.socket(fileno=int(number)), modules.split(","))
    if command is not None:
        _be(command)


def _serve(listener: socket.socket, modules: Sequence[str]) -> Command | None:
    """Fork for each client. Return its command in the fork, and None at the end of the server."""
    own_pid = os.getpid()
    gc.disable()  # nothing that is imported is garbage
    for name in filter(None, modules):
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then keeps no dead children
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(sys.stdin, select.POLLIN)
    while True:
        if sys.stdin.fileno() in dict(poll.poll()):
            return None
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError, ValueError):
            command = _received(connection)
            try:
                if num_threads() > 1 or _has_left(connection.fileno()):
                    continue
                if (pid := os.fork()) == 0:
                    Origin.path = listener.getsockname()
                    listener.close()
                    connection.detach()
                    return command
                _answer(connection, pid)
            finally:
                if os.getpid() == own_pid:
                    for descriptor in command.files:
                        os.close(descriptor)


def _answer(connection: socket.socket, pid: int) -> None:
    """Tell a client which process has been forked for it.

    Raises:
        OSError: the client or the fork has gone.
    """
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(connection, [str(pid).encode()], [pidfd])
    finally:
        os.close(pidfd)


def num_threads() -> int:
    """Return how many threads this process has, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def _received(connection: socket.socket) -> Command:
    """Return what a client wants.

    Raises:
        OSError: the client has left, or says nothing.
        ValueError: the message is not from one of our clients.
    """
    connection.settimeout(CLIENT_S)
    _, files, _, _ = socket.recv_fds(connection, 1, MAX_FILES)
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    words, environ, directory, outlives = json.loads(b"".join(parts))
    return Command(words, environ, directory, files, connection.fileno(), outlives)


def _be(command: Command) -> None:
    """Be the process that `python -m WORDS` would be."""
    os.setsid()  # Ray ends what is in the group of a worker that has died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(command.files[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if command.outlives:
        os.close(command.client)
    else:
        _end_with(command.client)
    os.chdir(command.directory)
    os.environ.clear()
    os.environ.update(command.environ)
    words = [str(command.files[each] if isinstance(each, int) else each) for each in command.words]
    gc.enable()
    _show_words(["-m", *words])
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _show_words(words: Sequence[str]) -> None:
    """Have `ps` show these words for this process; otherwise it shows those of the server. (Ray
    does the same in its own processes.)
    """
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[45:47])
    shown = b"\0".join(os.fsencode(word) for word in (sys.executable, *words))
    length = end - first
    ctypes.memmove(first, shown[: length - 1].ljust(length, b"\0"), length)


def _has_left(connection: int) -> bool:
    """Return whether the other end is closed: a client that waits no longer starts by itself."""
    poll = select.poll()
    poll.register(connection, 0)  # poll then reports only a hang-up
    return bool(poll.poll(0))


def _end_with(connection: int) -> None:
    """Have this process killed when the other end of `connection` closes."""
    os.set_inheritable(connection, True)  # what this process may become ends so too
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if _has_left(connection):
        os.kill(os.getpid(), signal.SIGKILL)
