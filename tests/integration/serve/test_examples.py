"""The programs in examples/ do what they say: all of them, against one server with k2-demo."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.accuracy import ONE_PROCESS
from benchmarks.support.servers import ours, running
from mooncake.launch.config.shipped import DEMO, checkpoint

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(ours("examples", checkpoint(DEMO), *ONE_PROCESS)) as server:
        yield server.url


def printed(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_answer_is_streamed(url: str) -> None:
    for name in ("openai_client", "retries"):
        assert printed(name, url).startswith("Mooncake is a serving engine for Kimi K2.")


def test_an_agent_calls_and_says_what_came_back(url: str) -> None:
    call, answer = printed("agent", url).splitlines()
    assert call == 'get_weather({"city": "Oslo"}) -> {"temperature": -3, "sky": "snowy"}'
    assert answer == "The temperature is -3 and the sky is snowy."


def test_an_answer_fits_its_schema(url: str) -> None:
    assert printed("structured", url) == "name: Ada\nage: 36\n"


def test_a_batch_is_answered_in_order(url: str) -> None:
    lines = printed("batch", url).splitlines()
    assert [line.rpartition("? ")[0] for line in lines] == [
        f"What is {number} + {number + 7}" for number in range(11, 27)
    ]
    right = [line.endswith(f"? {2 * (11 + place) + 7}") for place, line in enumerate(lines)]
    assert sum(right) >= 15


def test_a_model_runs_in_the_program() -> None:
    assert printed("python_api").startswith("The pool keeps KVCache blocks in DRAM")


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"openai_client", "agent", "structured", "batch", "retries", "python_api"}
