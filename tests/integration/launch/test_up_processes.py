"""What `mooncake up` does with its processes, which are small programs here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from mooncake.base import MooncakeError
from mooncake.launch.cluster import up
from mooncake.launch.config.cluster_file import ClusterFile, Machine, Part
from mooncake.launch.host.seeds import Seeds

MACHINE = Machine(name="here", address="127.0.0.1", counts={"gateway": 1})
ENDED = "gateway-0 has ended"


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs one process until it has written the file `done`; returns what was said."""
    for name, seconds in {"POLL_S": 0.01, "FIRST_WAIT_S": 0.01}.items():
        monkeypatch.setattr(up, name, seconds)
    monkeypatch.chdir(tmp_path)

    class Gateways:
        addresses = ("tcp://127.0.0.1:6400",)

        def ask(self, num_wanted: int) -> list[Any]:
            assert num_wanted == 1
            if Path("done").exists():
                os.kill(os.getpid(), signal.SIGTERM)
                return []
            Path("asked").touch()
            raise MooncakeError("join: a gateway refuses: no")

    def start(program: str) -> list[str]:
        monkeypatch.setattr(up, "_CHILD", program)
        cluster = ClusterFile(
            path=Path("k2.yaml"), model="m", machines=(MACHINE,),
            settings={"settings": {}, "gateway": {}},
        )  # fmt: skip
        child = up._Child(Part(name="gateway-0", role="gateway", given={}), dict(os.environ))
        said: list[str] = []
        running = up.Up(cluster, MACHINE, [child], said.append)
        assert running.run(cast(Seeds, Gateways()), 5.0) == 0
        return said

    return start


def test_a_terminal_that_interrupts_us_leaves_our_processes_to_us(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    """They are in no process group of ours, so Ctrl-C is no signal to them, and ours the first."""
    run("import os, pathlib, time; pathlib.Path('group').write_text(str(os.getpgrp()));"
        "pathlib.Path('done').touch(); time.sleep(60)")  # fmt: skip
    assert int((tmp_path / "group").read_text()) != os.getpgrp()


def test_a_gateway_that_refuses_ends_no_process(run: Callable[..., list[str]]) -> None:
    said = run(
        "import pathlib, time\n"
        "while not pathlib.Path('asked').exists(): time.sleep(0.01)\n"
        "pathlib.Path('done').touch(); time.sleep(60)"
    )
    assert said.count("join: a gateway refuses: no") == 1
    assert not [words for words in said if words.startswith(ENDED)]


def test_one_that_has_run_is_started_again_though_it_then_cannot(
    run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "WELL_S", 0.3)
    said = run(
        "import os, pathlib, sys, time\n"
        "starts = pathlib.Path('starts')\n"
        "number = len(starts.read_bytes()) if starts.exists() else 0\n"
        "starts.write_bytes(bytes(number + 1))\n"
        "if number == 0: time.sleep(0.5); sys.exit(1)\n"
        "if number == 1: sys.exit(2)\n"
        "pathlib.Path('done').touch(); time.sleep(60)"
    )
    fates = [words.partition("(")[2].partition(")")[0] for words in said if ENDED in words]
    assert fates == ["exit code 1", "exit code 2"]


def test_one_that_ends_again_and_again_waits_longer_up_to_a_limit(
    run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in {"FIRST_WAIT_S": 0.1, "LONGEST_WAIT_S": 0.3}.items():
        monkeypatch.setattr(up, name, seconds)
    said = run(
        "import pathlib, sys, time\n"
        "starts = pathlib.Path('starts')\n"
        "number = len(starts.read_bytes()) if starts.exists() else 0\n"
        "starts.write_bytes(bytes(number + 1))\n"
        "if number < 4: sys.exit(1)\n"
        "pathlib.Path('done').touch(); time.sleep(60)"
    )
    waits = [words.rpartition(" in ")[2] for words in said if ENDED in words]
    assert waits == ["0.1 s", "0.2 s", "0.3 s", "0.3 s"]


def test_one_that_cannot_start_at_first_is_told(run: Callable[..., list[str]]) -> None:
    with pytest.raises(MooncakeError, match="gateway-0 cannot start on here; it says why above"):
        run("import sys; sys.exit(2)")
