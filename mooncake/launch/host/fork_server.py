"""A process that has imported what workers need, and forks. A forked worker saves the seconds that
its imports take, and shares their memory with the others.

`fork_client.py` asks for a fork, and each of the two ends with the other. Threads do not survive a
fork, so the server has none. If an import starts a thread, the server refuses, and workers start as
any process does. It ends with its parent.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

CLIENT = Path(__file__).with_name("fork_client.py")
CLIENT_S = 10.0
"""A client that has not said by then what it wants is refused."""
SETTLED_BY_IMPORT = ("RAY_JOB_ID", "RAY_AUTH_MODE", "RAY_USE_TLS")
"""Variables that Ray reads when it is imported. A client whose values differ is refused."""
_MAIN = "from mooncake.launch.host.fork_server import main; main()"


@dataclass(frozen=True)
class Command:
    """What a client wants to run: a script with its arguments, an environment and open files."""

    words: list[str]
    environ: dict[str, str]
    directory: str
    files: list[int]
    """Descriptors of its standard input, output and errors."""
    client: int
    """Descriptor of the connection to the client, which ends with this one."""


class ForkServer:
    """A running fork server. Use as a context, or `close` it."""

    def __init__(
        self,
        path: Path,
        early: Sequence[str],
        late: Sequence[str],
        environ: Mapping[str, str],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Start the server at the socket `path`. It imports `early` now, in `environ`, and `late`
        when the first client comes, in the client's environment. Processes started by `executable`
        get `variables` in addition to their own.
        """
        self._path = path
        self.executable = path.with_suffix(".sh")
        """A command to use instead of Python's executable, so that scripts are forked."""
        sets = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        self.executable.write_text("\n".join(["#!/bin/sh", *sets, f'exec {self.command} "$@"\n']))
        self.executable.chmod(0o700)
        path.unlink(missing_ok=True)
        # Bound here, so that clients may come at once. Only the server holds it afterwards: where
        # it has died, clients are refused.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen(64)
            words = [str(listener.fileno()), ",".join(early), ",".join(late)]
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
        """The server's process id."""
        return self._process.pid

    @property
    def command(self) -> str:
        """The shell words to put before a Python script so that it is forked."""
        words = [sys.executable, "-I", "-S", str(CLIENT), str(self._path)]
        return shlex.join(words)

    def ended(self) -> bool:
        """Return whether the server has ended; clients then start as any process does."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the server. Processes that it has forked run on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.kill()
        self._process.wait()
        self._path.unlink(missing_ok=True)
        self.executable.unlink(missing_ok=True)

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Be the server until standard input ends. In a fork, be what its client wants."""
    number, early, late = sys.argv[1:]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    command = _serve(socket.socket(fileno=int(number)), early.split(","), late.split(","))
    if command is not None:
        _be(command)


def _serve(listener: socket.socket, early: Sequence[str], late: Sequence[str]) -> Command | None:
    """Fork for each client. Return its command in the fork, and None at the end of the server."""
    own_pid = os.getpid()
    gc.disable()  # nothing that is imported is garbage
    _import(early)
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
                if any(late):
                    _set_environment(command.environ)
                    _import(late)
                    gc.freeze()
                    late = ()
                if _differs(command.environ) or num_threads() > 1:
                    continue
                if os.fork() == 0:
                    listener.close()
                    connection.detach()
                    return command
                connection.sendall(b"\1")
            finally:
                if os.getpid() == own_pid:
                    for descriptor in command.files:
                        os.close(descriptor)


def num_threads() -> int:
    """Return how many threads this process has, including those of libraries."""
    return len(os.listdir("/proc/self/task"))


def _import(modules: Sequence[str]) -> None:
    for name in filter(None, modules):
        importlib.import_module(name)


def _differs(environ: Mapping[str, str]) -> bool:
    """Return whether imports in `environ` could give other modules than the imports here."""
    known = {name: environ[name] for name in SETTLED_BY_IMPORT if name in environ}
    return any(os.environ.get(name) != value for name, value in known.items())


def _received(connection: socket.socket) -> Command:
    """Return what a client wants.

    Raises:
        OSError: the client has left, or says nothing.
        ValueError: the message is not from one of our clients.
    """
    connection.settimeout(CLIENT_S)
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    words, environ, directory = json.loads(b"".join(parts))
    return Command(words, environ, directory, files, connection.fileno())


def _be(command: Command) -> None:
    """Be the process that `python WORDS` would be."""
    os.setsid()  # Ray ends what is in the group of a worker that has died
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(command.files):
        os.dup2(descriptor, number)
        os.close(descriptor)
    _end_with(command.client)
    os.chdir(command.directory)
    _set_environment(command.environ)
    words = list(command.words)
    while words[0].startswith("-"):  # flags of the interpreter
        del words[0]
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    gc.enable()
    runpy.run_path(words[0], run_name="__main__")


def _set_environment(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


def _end_with(connection: int) -> None:
    """Have this process killed when the other end of `connection` closes."""
    os.set_inheritable(connection, True)  # what this process may become ends so too
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(connection, 0)  # poll then reports only a hang-up
    if poll.poll(0):
        os.kill(os.getpid(), signal.SIGKILL)
