"""The fork server: what it forks is what a new process would be, and nobody depends on its life."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from mooncake.launch.host.processes import fork_server
from mooncake.launch.host.processes.fork_server import Fork, ForkServer
from mooncake.launch.worker.forks import ENGINE, worker_forks

END_S = 240.0
SCRIPT = """
import json, os, sys
import mooncake_early
with open(sys.argv[1], "w") as file:
    json.dump({
        "words": sys.argv[2:], "early": mooncake_early.PID, "pid": os.getpid(),
        "color": os.environ.get("COLOR"), "private": os.environ.get("PRIVATE"),
        "directory": os.getcwd(), "name": __name__,
        "threads": len(os.listdir("/proc/self/task")), "group": os.getpgid(0),
    }, file)
print("said", sys.stdin.read(), flush=True)
"""
FORKING = """
import os, sys
from mooncake.launch.host.processes.fork_server import fork
if "first" in sys.argv:
    print("here", flush=True)
    sys.stdin.readline()
answer, place = os.pipe()
with open(os.devnull) as nothing:
    files = nothing.fileno(), 1, 2, place
    child = fork(["forked", "a word", 3], {"COLOR": "green"}, files)
os.close(place)
print(os.getpid(), child.pid if child else None, os.read(answer, 999).decode(), flush=True)
if sys.stdin.readline() == "kill":
    child.kill()
if child:
    child.wait()
    child.kill()  # may be said again
"""
FORKED = """
import json, os, signal, sys, mooncake_early
found = [mooncake_early.PID, os.getppid(), os.environ.get("COLOR"), sys.argv[1:2], __name__]
os.write(int(sys.argv[2]), json.dumps(found).encode())
os.close(int(sys.argv[2]))
signal.pause()
"""
MODULES = {
    "mooncake_early": "import os\nPID = os.getpid()\n",
    "script": SCRIPT,
    "forking": FORKING,
    "forked": FORKED,
    "waits": "import signal\nsignal.pause()\n",
    "parent": "import os\nopen('ppid', 'w').write(str(os.getppid()))\n",
    "threaded": "import threading\nfrom mooncake_early import PID\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
}
Start = Callable[..., ForkServer]
Found = dict[str, object]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a fork server whose module says in which process it was imported."""
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    opened = []

    def started(name: str = "forks", early: str = "mooncake_early") -> ForkServer:
        places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": places, "PRIVATE": "of the server"}
        server = ForkServer(tmp_path / name, [early], environ)
        opened.append(server)
        return server

    yield started
    for server in opened:
        server.close()


class Talk:
    """A fork, to write to and to read from. Use as a context."""

    def __init__(self, server: ForkServer, *words: str, **changes: str) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._in, self._out = os.fdopen(ours_in), os.fdopen(ours_out, "w")
        environ: Mapping[str, str] = {**os.environ, **changes}
        try:
            forked = fork_server.fork(words, environ, [theirs_in, theirs_out, 2], server=server)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        assert forked is not None, "it has been refused"
        self.fork: Fork = forked

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self.fork.kill()
        self.fork.wait(END_S)
        self._in.close()
        self._out.close()

    def hear(self) -> str:
        return self._in.readline()

    def say_last(self, words: str) -> str:
        """Write the last words; return all that is said until the end."""
        self._out.write(words)
        self._out.close()
        said = self._in.read()
        self.fork.wait(END_S)
        return said


def run(server: ForkServer, **changes: str) -> tuple[Found, str]:
    """Have the script forked; return what it found, and what it wrote."""
    output = Path("output.json")
    with Talk(server, "script", str(output), "a", "b c", **changes) as talk:
        said = talk.say_last("hello")
    return json.loads(output.read_text()), said


def refused(server: ForkServer) -> bool:
    """Return whether a process gets no fork, so that it starts another process itself."""
    with Path(os.devnull).open("rb") as nothing:
        files = [nothing.fileno(), 1, 2]
        return fork_server.fork(["waits"], os.environ, files, server=server) is None


def test_a_fork_is_what_a_new_process_would_be(start: Start, tmp_path: Path) -> None:
    server = start()
    found, said = run(server, COLOR="blue")
    assert found["early"] == server.pid, "imported once, there"
    assert found["pid"] == found["group"] != server.pid, "ended with its group, ends alone"
    assert said == "said hello\n", "it has the files of the client"
    assert found["words"] == ["a", "b c"]
    assert found["directory"] == str(tmp_path)
    assert (found["color"], found["private"]) == ("blue", None), "the environment of the client"
    assert (found["name"], found["threads"]) == ("__main__", 1)
    again, _ = run(server, COLOR="red")
    assert (again["early"], again["color"]) == (server.pid, "red")


@pytest.mark.parametrize("how", ["by its parent", "with its parent", "by itself"])
def test_a_fork_has_another_one_forked_and_sees_its_end(start: Start, how: str) -> None:
    server = start()
    with Talk(server, "forking") as talk:
        parent, pid, found = talk.hear().split(maxsplit=2)
        fork = psutil.Process(int(pid))
        assert json.loads(found) == [server.pid, server.pid, "green", ["a word"], "__main__"]
        assert [*filter(None, fork.cmdline())][1:4] == ["-m", "forked", "a word"]
        if how == "with its parent":
            os.kill(int(parent), signal.SIGKILL)
        if how == "by itself":
            fork.kill()
        talk.say_last("kill" if how == "by its parent" else "")
        with contextlib.suppress(psutil.NoSuchProcess):
            fork.wait(END_S)


def test_a_fork_whose_server_has_ended_gets_no_other(start: Start) -> None:
    server = start()
    with Talk(server, "forking", "first") as talk:
        assert talk.hear() == "here\n"
        server.close()
        assert talk.say_last("go\n").split()[1:] == ["None"]


def test_who_has_no_server_gets_no_fork(start: Start, tmp_path: Path) -> None:
    start()
    words = [sys.executable, str(tmp_path / "forking.py")]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=END_S, check=True
    )
    assert done.stdout.split()[1:] == ["None"]


def test_two_servers_do_not_meet(start: Start) -> None:
    one, other = start("one"), start("other")
    assert run(one)[0]["early"] == one.pid
    assert run(other)[0]["early"] == other.pid


def test_a_module_that_starts_a_thread_is_never_forked(start: Start) -> None:
    assert refused(start(early="threaded"))


def test_a_client_that_has_left_gets_no_process(start: Start, tmp_path: Path) -> None:
    """It has started by itself, and a second process would do the same."""
    server = start()
    assert run(server)[0]["early"] == server.pid
    os.kill(server.pid, signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(server.path))
        socket.send_fds(client, [b"\0"], [0, 1, 2])
        client.sendall(json.dumps([["waits"], dict(os.environ), str(tmp_path), True]).encode())
    os.kill(server.pid, signal.SIGCONT)
    assert run(server)[0]["early"] == server.pid, "it serves one after the other"
    _, alive = psutil.wait_procs(psutil.Process(server.pid).children(), END_S)
    assert alive == [], "only that of the second client, which may be ending"


def test_a_process_waits_for_its_own_server_as_long_as_that_lives(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports may take long on a busy machine."""
    monkeypatch.setattr(fork_server, "CLIENT_S", 0.01)
    server = start()
    os.kill(server.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fork_server.fork, ["parent"], os.environ, [0, 1, 2], server=server)
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        os.kill(server.pid, signal.SIGCONT)
        forked = asked.result(END_S)
    assert forked is not None
    forked.wait(END_S)
    assert (tmp_path / "ppid").read_text() == str(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    assert refused(server)


@pytest.mark.parametrize("early", ["mooncake_early", "mooncake_missing"])
def test_without_its_server_a_process_starts_by_itself(start: Start, early: str) -> None:
    server = start(early=early)
    if early == "mooncake_early":
        os.kill(server.pid, signal.SIGKILL)
    assert refused(server), "it waits for the server, or is refused"
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(server.pid).wait(END_S)  # clients are refused a little before
    assert server.ended()


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from mooncake.launch.host.processes.fork_server import ForkServer\n"
        "server = ForkServer(Path(sys.argv[1]), [], os.environ)\n"
        "print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "forks")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(END_S)


def test_what_workers_import_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported.py").write_text(
        "import os, sys\n"
        f"missing = set({ENGINE!r}) - set(sys.modules)\n"
        "open(sys.argv[1], 'w').write(f'{os.getppid()} {missing or None}')\n"
    )
    places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", places)
    output = tmp_path / "output"
    with worker_forks() as server, Talk(server, "imported", str(output)) as talk:
        talk.say_last("")
        assert output.read_text() == f"{server.pid} None"
