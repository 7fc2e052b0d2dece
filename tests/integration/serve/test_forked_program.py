"""What tests fork instead of starting a new interpreter is what a new process would be."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.support.serve import forked_program
from tests.support.serve.forked_program import ForkedProcess
from tests.support.serve.server_process import ServerProcess, nano_checkpoint
from tests.support.waiting import wait_until

END_S = 240.0
SMALL = (
    "--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "32MiB",
    "--kvstore-dram-bytes", "32MiB",
)  # fmt: skip


def run(place: Path, *words: str, **changes: str) -> tuple[int, str]:
    """Run a command to its end; return its exit code and what it wrote."""
    log = place / "log"
    with log.open("wb") as output:
        process = forked_program.start(words, {**os.environ, **changes}, output.fileno(), place)
    assert isinstance(process, ForkedProcess), "a new interpreter has started"
    code = process.wait(END_S)
    assert process.poll() == process.wait() == code
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
    process.kill()  # it is too late, and no error
    return code, log.read_text()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("version",), 0, "mooncake"),
        (("serve", "--no-such-flag"), 2, "no-such-flag"),
        (("serve", "a-folder", "--dry-run"), 2, "a-folder"),
        (("status", "--url", "http://127.0.0.1:1"), 3, "127.0.0.1"),
        (("serve", "--help"), 0, "usage: mooncake serve"),
    ],
)
def test_its_exit_code_and_its_words_are_those_of_the_command(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    (tmp_path / "a-folder").mkdir()
    found = run(tmp_path, *words)
    assert found[0] == code, found[1]
    assert said in found[1]


def test_it_has_the_environment_that_it_is_given(tmp_path: Path) -> None:
    code, said = run(tmp_path, "serve", "--dry-run", MOONCAKE_HTTP_WITHOUT_TLS="perhaps")
    assert code == 2
    assert said == "mooncake: http-without-tls: 'perhaps' is neither true nor false\n"


def test_one_that_is_killed_says_so(tmp_path: Path) -> None:
    words = ("serve", str(nano_checkpoint(tmp_path)), "--role", "kvstore", "--dram", "4MiB")
    with (tmp_path / "log").open("wb") as output:
        process = forked_program.start(words, os.environ, output.fileno())
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    wait_until(lambda: os.getpgid(process.pid) == process.pid, "it has a session of its own")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait(END_S) == -signal.SIGKILL


def test_a_server_and_its_fork_server_import_nothing_again(tmp_path: Path) -> None:
    with ServerProcess(str(nano_checkpoint(tmp_path)), *SMALL) as server:
        server.wait_until_serving()
        assert isinstance(server.process, ForkedProcess)
        own = psutil.Process(server.process.pid)
        assert own.cmdline()[1:4] == ["-m", "mooncake.cli.main", "serve"]
        [forks] = own.children()
        workers = {each.pid for each in forks.children()}
        assert workers == set(server.worker_pids().values())
        # A process that a program was started in has other variables than the one that forks.
        forking = own.parent()
        assert forking is not None
        started_with = [
            Path(f"/proc/{each.pid}/environ").read_bytes() for each in (forking, own, forks)
        ]
        assert len(set(started_with)) == 1
        assert server.complete("a b c", 3)
        code, left = server.stop()
    assert (code, left) == (0, []), server.output
