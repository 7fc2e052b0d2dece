"""The fork server: what it forks is what a new process would be, and nobody depends on its life."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host.processes import fork_server
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.worker.forks import ENGINE, RAY, worker_forks

END_S = 240.0
SCRIPT = """
import json, os, signal, sys, threading
import {early}
with open(sys.argv[1], "w") as file:
    json.dump({{
        "words": sys.argv[2:], "early": {early}.PID, "late": getattr(sys.modules.get("{late}"),
        "PID", None), "pid": os.getpid(), "color": os.environ.get("COLOR"),
        "private": os.environ.get("PRIVATE"), "directory": os.getcwd(), "name": __name__,
        "threads": len(os.listdir("/proc/self/task")), "first_path": sys.path[0],
        "group": os.getpgid(0),
    }}, file)
print("said", sys.stdin.read(), flush=True)
"""
FORKING = """
import os, sys
from mooncake.launch.host.processes.fork_server import fork
answer, place = os.pipe()
with open(os.devnull) as nothing:
    files = nothing.fileno(), 1, 2, place
    child = fork(["-m", "forked", "a word", 3], {"COLOR": "green"}, files)
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
Start = Callable[..., ForkServer]
Found = dict[str, object]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a fork server whose modules say in which process they were imported."""
    for name in ("mooncake_early", "mooncake_late"):
        (tmp_path / f"{name}.py").write_text("import os\nPID = os.getpid()\n")
    (tmp_path / "script.py").write_text(SCRIPT.format(early="mooncake_early", late="mooncake_late"))
    opened = []

    def started(name: str = "forks", early: str = "mooncake_early", **options: Any) -> ForkServer:
        places = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        path = {"PYTHONPATH": places, "PRIVATE": "of the server"}
        environ = {**os.environ, **path}
        server = ForkServer(tmp_path / name, [early], ["mooncake_late"], environ, **options)
        opened.append(server)
        return server

    yield started
    for server in opened:
        server.close()


def run(server: ForkServer, place: Path, **changes: str) -> tuple[Found, str, str]:
    """Run the script as the server's client; return what it found, and what it wrote."""
    output = place / "output.json"
    environ: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(place), **changes}
    words = [*shlex.split(server.command), "-u", str(place / "script.py"), str(output), "a", "b c"]
    done = subprocess.run(
        words, input="hello", env=environ, cwd=place, capture_output=True, text=True, timeout=END_S,
        check=True,
    )  # fmt: skip
    # Its output is read to the end, and the fork holds that: it has ended by now.
    return json.loads(output.read_text()), done.stdout, done.stderr


def test_a_fork_is_what_a_new_process_would_be(start: Start, tmp_path: Path) -> None:
    server = start()
    found, out, err = run(server, tmp_path, COLOR="blue")
    assert (found["early"], found["late"]) == (server.pid, server.pid), "imported once, there"
    assert found["pid"] == found["group"] != server.pid, "ended with its group, ends alone"
    assert (out, err) == ("said hello\n", ""), "it has the files of the client"
    assert found["words"] == ["a", "b c"]
    assert found["directory"] == found["first_path"] == str(tmp_path)
    assert (found["color"], found["private"]) == ("blue", None), "the environment of the client"
    assert (found["name"], found["threads"]) == ("__main__", 1)
    again, _, _ = run(server, tmp_path, COLOR="red")
    assert (again["early"], again["color"]) == (server.pid, "red")


def test_each_ends_with_the_other(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "pids.py"
    script.write_text("import os\nprint(os.getpid(), flush=True)\ninput()\n")
    for ended in ("client", "fork", "input"):
        words = [*shlex.split(start(ended).command), str(script)]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as client:
            assert client.stdout is not None
            fork = psutil.Process(int(client.stdout.readline()))
            if ended == "client":
                client.kill()
            elif ended == "fork":
                fork.kill()
            else:
                client.communicate("a line\n", timeout=END_S)
            client.wait(END_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            fork.wait(END_S)


@pytest.mark.parametrize("how", ["by its parent", "with its parent", "by itself"])
def test_a_fork_has_another_one_forked_and_sees_its_end(
    start: Start, tmp_path: Path, how: str
) -> None:
    (tmp_path / "forking.py").write_text(FORKING)
    (tmp_path / "forked.py").write_text(FORKED)
    server = start()
    words = [*shlex.split(server.command), str(tmp_path / "forking.py")]
    with talking(words, tmp_path) as client:
        assert client.stdout is not None
        parent, pid, found = client.stdout.readline().split(maxsplit=2)
        fork = psutil.Process(int(pid))
        assert json.loads(found) == [server.pid, server.pid, "green", ["a word"], "__main__"]
        assert [*filter(None, fork.cmdline())][1:4] == ["-m", "forked", "a word"]
        if how == "with its parent":
            os.kill(int(parent), signal.SIGKILL)
        if how == "by itself":
            fork.kill()
        client.communicate("kill" if how == "by its parent" else "", timeout=END_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            fork.wait(END_S)


@pytest.mark.parametrize("ended", [True, False])
def test_who_has_no_server_gets_no_fork(start: Start, tmp_path: Path, ended: bool) -> None:
    (tmp_path / "forking.py").write_text("print('here', flush=True)\ninput()\n" + FORKING)
    server = start()
    command = shlex.split(server.command) if ended else [sys.executable]
    with talking([*command, str(tmp_path / "forking.py")], tmp_path) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "here\n"
        if ended:
            server.close()
        said, _ = client.communicate("go\n", timeout=END_S)
        assert said.split()[1:] == ["None"]


def talking(words: list[str], place: Path) -> subprocess.Popen[str]:
    """Start a process, to write to and to read from."""
    return subprocess.Popen(
        words, cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_its_executable_stands_for_that_of_python(start: Start, tmp_path: Path) -> None:
    server = start(variables={"COLOR": "it's blue"})
    script = tmp_path / "color.py"
    script.write_text("import os, sys\nprint(os.getppid(), os.environ['COLOR'], sys.argv[1])\n")
    words = [str(server.executable), "-u", str(script), "a b"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=True)
    assert done.stdout == f"{server.pid} it's blue a b\n"
    server.close()
    assert not server.executable.exists()


def test_two_servers_do_not_meet(start: Start, tmp_path: Path) -> None:
    one, other = start("one"), start("other")
    assert run(one, tmp_path)[0]["early"] == one.pid
    assert run(other, tmp_path)[0]["early"] == other.pid


def test_who_needs_other_imports_starts_by_itself(start: Start, tmp_path: Path) -> None:
    server = start()
    assert run(server, tmp_path, RAY_JOB_ID="01")[0]["early"] == server.pid
    found, out, err = run(server, tmp_path, RAY_JOB_ID="02")
    assert found["early"] == found["pid"]
    assert out == "said hello\n"
    assert "starts by itself" in err
    assert run(server, tmp_path, RAY_JOB_ID="01")[0]["early"] == server.pid


def test_a_module_that_starts_a_thread_is_never_forked(start: Start, tmp_path: Path) -> None:
    (tmp_path / "threaded.py").write_text(
        "import threading\nfrom mooncake_early import PID\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    found, _, err = run(start(early="threaded"), tmp_path)
    assert found["early"] == found["pid"]
    assert "starts by itself" in err


def test_a_client_that_has_left_gets_no_process(start: Start, tmp_path: Path) -> None:
    """It has started by itself, and a second process would do the same."""
    server = start()
    script = tmp_path / "waits.py"
    script.write_text("import signal\nsignal.pause()\n")
    assert run(server, tmp_path)[0]["early"] == server.pid
    os.kill(server.pid, signal.SIGSTOP)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(server.path))
        socket.send_fds(client, [b"\0"], [0, 1, 2])
        client.sendall(json.dumps([[str(script)], dict(os.environ), str(tmp_path), True]).encode())
    os.kill(server.pid, signal.SIGCONT)
    assert run(server, tmp_path)[0]["early"] == server.pid, "it serves one after the other"
    _, alive = psutil.wait_procs(psutil.Process(server.pid).children(), END_S)
    assert alive == [], "only that of the second client, which may be ending"


def test_a_process_waits_for_its_own_server_as_long_as_that_lives(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports may take long on a busy machine."""
    monkeypatch.setattr(fork_server, "CLIENT_S", 0.01)
    server = start()
    script = tmp_path / "script.py"
    script.write_text("import os\nopen('ppid', 'w').write(str(os.getppid()))\n")
    monkeypatch.chdir(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fork_server.fork, [str(script)], os.environ, [0, 1, 2], server=server)
        with pytest.raises(TimeoutError):
            asked.result(0.3)
        os.kill(server.pid, signal.SIGCONT)
        forked = asked.result(END_S)
    assert forked is not None
    forked.wait(END_S)
    assert (tmp_path / "ppid").read_text() == str(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    assert fork_server.fork([str(script)], os.environ, [0, 1, 2], server=server) is None


@pytest.mark.parametrize("early", ["mooncake_early", "mooncake_missing"])
def test_without_its_server_a_process_starts_by_itself(
    start: Start, tmp_path: Path, early: str
) -> None:
    server = start(early=early)
    if early == "mooncake_early":
        os.kill(server.pid, signal.SIGKILL)
    found, out, err = run(server, tmp_path)  # it waits for the server, or is refused
    assert found["early"] == found["pid"]
    assert out == "said hello\n"
    assert "starts by itself" in err
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(server.pid).wait(END_S)  # clients are refused a little before
    assert server.ended()


def test_a_server_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path\n"
        "from mooncake.launch.host.processes.fork_server import ForkServer\n"
        "server = ForkServer(Path(sys.argv[1]), [], [], os.environ)\n"
        "print(server.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", program, str(tmp_path / "forks")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(END_S)


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        (ServeConfig(), ENGINE),
        (ServeConfig(ray_address="127.0.0.1:6379"), (*ENGINE, *RAY)),
    ],
    ids=["of this machine", "of Ray"],
)
def test_what_workers_import_starts_no_thread(
    tmp_path: Path, config: ServeConfig, modules: tuple[str, ...]
) -> None:
    script, output = tmp_path / "script.py", tmp_path / "output"
    script.write_text(
        "import os, sys\n"
        f"missing = set({modules!r}) - set(sys.modules)\n"
        "open(sys.argv[1], 'w').write(f'{os.getppid()} {missing or None}')\n"
    )
    with worker_forks(config) as server:
        words = [*shlex.split(server.command), str(script), str(output)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=END_S, check=True)
        assert done.stderr == ""
        assert output.read_text() == f"{server.pid} None"
