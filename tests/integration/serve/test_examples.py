"""The programs in examples/ do what they say, and so do what the documents ask of a server: all of
them, against one server with k2-demo.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from benchmarks.accuracy import ONE_PROCESS
from benchmarks.support.servers import ours, running
from mooncake.cli.chat import TOOL_TRIES
from mooncake.launch.config.shipped import DEMO, checkpoint
from tests.support.docs.blocks import Asked, Block, Conversed, Program, blocks_that_are, classes_of
from tests.support.docs.typed import here, in_shell, prepare

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.slow
NAMED = ("--served-model-name", DEMO)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    batches = ("--batch-dir", str(tmp_path_factory.mktemp("batches")))
    with running(ours("examples", checkpoint(DEMO), *NAMED, *ONE_PROCESS, *batches)) as server:
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


def test_what_chat_suggests_is_answered_with_tools(url: str) -> None:
    command = [sys.executable, "-m", "mooncake.cli.main", "chat", "--tools", "--url", url]
    done = subprocess.run(
        command, input="\n".join(TOOL_TRIES), capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for said in (
        "Mooncake is a serving engine for Kimi K2.",
        'get_time({}) -> {"date": ',
        "The date is ",
        'calculate({"expression": "12*34"}) -> {"result": 408}',
        "The result is 408.",
    ):
        assert said in done.stdout, done.stdout


def test_every_example_is_run() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    here = {"openai_client", "agent", "structured", "batch", "retries", "python_api"}
    assert names == here | {"pool_client"}, "tests/integration/pool/test_plain_client.py runs that"


def words(url: str) -> dict[str, str]:
    """Return what the documents' commands say, and what is typed in its place."""
    return {
        ".venv/bin/": "",
        "http://127.0.0.1:8000": url, "http://10.0.0.7:8000": url, "http://10.0.0.8:8000": url,
        "mooncake status": f"mooncake status --url {url}",
        "mooncake chat": f"mooncake chat --url {url}",
        "mooncake eval --tasks": f"mooncake eval --base-url {url} --num-samples 2 --tasks",
        "--num-samples 100": "--num-samples 2",
        "--num-prompts 20": "--num-prompts 2",
        "k2-small": DEMO, "checkpoints/k2-nano": DEMO,
    }  # fmt: skip


@pytest.mark.parametrize("block", blocks_that_are(Asked, Program), ids=lambda each: each.place)
def test_what_the_documents_ask(url: str, block: Block, tmp_path: Path) -> None:
    [row] = classes_of(block)
    assert isinstance(row, Asked)
    prepare(tmp_path, "")
    text = here(block.text, words(url))
    if isinstance(row, Program):
        (tmp_path / "program.py").write_text(row.before + text)
        text = "python program.py"
    shown = in_shell(text, tmp_path)
    for part in row.says:
        assert part in shown


def declared(tool: str) -> dict[str, Any]:
    """Return the declaration of a tool that a page writes as `name(key: type, ...)`."""
    name, keys = re.fullmatch(r"(\w+)\((.*)\)", tool).groups()  # type: ignore[union-attr]
    types = dict(each.split(": ") for each in keys.split(", "))
    schema = {"type": "object", "properties": {key: {"type": types[key]} for key in types}}
    function = {
        "name": name,
        "description": name.replace("_", " ").capitalize(),
        "parameters": {**schema, "required": list(types)},
    }
    return {"type": "function", "function": function}


def lines_of(message: Any) -> list[str]:
    """Return an answer as the pages write it."""
    found = []
    if thought := getattr(message, "reasoning_content", None):
        found.append(f"(thinks)   {thought}")
    for call in message.tool_calls or ():
        found.append(f"assistant  {call.function.name}({call.function.arguments})")
    if message.content:
        found.append(f"assistant  {message.content}")
    return found


@pytest.mark.parametrize("block", blocks_that_are(Conversed), ids=lambda each: each.place)
def test_conversations_go_as_they_are_told(url: str, block: Block) -> None:
    [row] = classes_of(block)
    assert isinstance(row, Conversed)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    messages: list[Any] = []
    told = block.text.splitlines()
    while told:
        who, said = told.pop(0).split(maxsplit=1)
        if who == "tool":
            call = messages[-1]["tool_calls"][-1]["id"]
            messages.append({"role": "tool", "tool_call_id": call, "content": said})
        else:
            assert who == "user"
            messages.append({"role": "user", "content": said})
        answer = client.chat.completions.create(
            model=DEMO, messages=messages, max_tokens=256,
            tools=[declared(tool) for tool in row.tools] or openai.NOT_GIVEN,  # type: ignore[arg-type]
        ).choices[0].message  # fmt: skip
        messages.append(answer.model_dump(exclude_none=True))
        wanted = []
        while told and not told[0].startswith(("user ", "tool ")):
            wanted.append(told.pop(0))
        if not any(part in line for part in row.but for line in wanted):
            assert lines_of(answer) == wanted
