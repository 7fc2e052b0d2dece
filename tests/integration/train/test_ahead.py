"""Processes that draw coming steps: the same batches as without them, and gone at the end."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import psutil
import pytest
import torch

from mooncake.base import Unavailable
from mooncake.model.checkpoint.making.presets import write_preset_files
from mooncake.train.ahead import Wanted, drawn_ahead
from mooncake.train.batches import Batches

TASKS = {"copy": 1.0, "call": 1.0}
ENDED_WITHIN_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("files")
    write_preset_files("k2-demo", home)
    return home


def wanted(asked: list[int] | None = None) -> Iterator[Wanted]:
    for step in count():
        if asked is not None:
            asked.append(step)
        yield step, TASKS, 300 if step % 2 else 100


def drawers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended, perhaps in an earlier test
            if "spawn_main" in " ".join(child.cmdline()):
                found.append(child)
    return found


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=ENDED_WITHIN_S)
    return not alive


def test_batches_drawn_ahead_are_those_drawn_in_turn(checkpoint: Path) -> None:
    alone, ahead = (
        islice(Batches(checkpoint, 3, 500, 400, processes=number).of_steps(wanted()), 5)
        for number in (0, 2)
    )
    for own, other in zip(alone, ahead, strict=True):
        assert [batch.groups for batch in own] == [batch.groups for batch in other]
        for one, two in zip(own, other, strict=True):
            assert torch.equal(one.tokens, two.tokens)
            assert torch.equal(one.counts, two.counts)


def test_two_steps_a_process_are_drawn_ahead_and_a_closed_iterator_leaves_nothing(
    checkpoint: Path,
) -> None:
    asked: list[int] = []
    before = drawers()
    steps = drawn_ahead((checkpoint, 0, 200, 400), wanted(asked), 2)
    for taken in range(3):
        next(steps)
        assert asked == list(range(4 + taken + 1))
    mine = [process for process in drawers() if process not in before]
    assert len(mine) == 2
    steps.close()
    assert gone(mine)


def test_a_process_that_ends_fails_the_run(checkpoint: Path) -> None:
    before = drawers()
    steps = drawn_ahead((checkpoint, 0, 200, 400), wanted(), 2)
    next(steps)
    mine = [process for process in drawers() if process not in before]
    mine[0].kill()
    with pytest.raises(Unavailable, match="a process that draws samples ended"):
        for _ in islice(steps, 10):
            pass
    assert gone(mine)


KILLED = """
import sys
from itertools import repeat
from pathlib import Path
from mooncake.train.ahead import drawn_ahead

if __name__ == "__main__":
    steps = drawn_ahead((Path(sys.argv[1]), 0, 200, 400), repeat((0, {"copy": 1.0}, 300)), 2)
    next(steps)
    print("drawing", flush=True)
    sys.stdin.read()
"""


def test_no_process_outlives_a_killed_run(checkpoint: Path, tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    run = subprocess.Popen(
        [sys.executable, str(program), str(checkpoint)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == "drawing\n"
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 2
    run.kill()
    run.communicate()
    assert gone(children)


def test_drawing_needs_no_torch() -> None:
    program = "import sys, mooncake.train.ahead; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
