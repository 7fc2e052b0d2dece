"""`mooncake chat` runs the tools that a model calls; what a server sends is shown, not obeyed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mooncake.base import ConfigError, MooncakeError, Unavailable
from mooncake.cli.chat import MAX_ROUNDS, TOOL_TRIES, TRIES, Chat, Conversation, plain, talk
from mooncake.cli.chat_tools import MAX_FILES, MAX_TEXT, ChatTools
from mooncake.launch.host.http_client import Client

STATUS = {
    "gateways": [{}],
    "workers": [{"role": "prefill"}, {"role": "decode"}, {"role": "decode"}],
}


class Scripted(Client):
    """Answers each question with the next of its streams, and keeps what it was asked."""

    def __init__(self, *streams: list[dict[str, Any]] | Exception) -> None:
        super().__init__("http://127.0.0.1:1")
        self._streams = list(streams)
        self.asked: list[dict[str, Any]] = []

    def get(self, path: str) -> Any:
        return STATUS if "status" in path else {"data": [{"id": "m"}]}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert path == "/v1/chat/completions"
        self.asked.append(json.loads(json.dumps(body)))
        answer = self._streams.pop(0) if len(self._streams) > 1 else self._streams[0]
        if isinstance(answer, Exception):
            raise answer
        yield from answer


def said(text: str) -> list[dict[str, Any]]:
    return [{"choices": [{"delta": {"content": part}}]} for part in text]


def called(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    """Return a stream with calls, their arguments in pieces of one letter."""
    events = []
    for index, (name, arguments) in enumerate(calls):
        first = {"index": index, "id": f"c{index}", "function": {"name": name, "arguments": ""}}
        pieces = [{"index": index, "function": {"arguments": letter}} for letter in arguments]
        events += [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in [first, *pieces]]
    return events


def test_the_page_proposes_the_same_questions() -> None:
    page = files("mooncake.api").joinpath("page/chat.js").read_text()
    [line] = [line for line in page.splitlines() if line.startswith("const TRIES")]
    assert json.loads(line[line.index("[") : line.index("]") + 1]) == list(TRIES)


@pytest.mark.parametrize(("model", "has_tries"), [("k2-demo", True), ("k2", False)])
def test_questions_are_proposed_for_the_demo_model(model: str, has_tries: bool) -> None:
    """The model itself is asked them in tests/integration/api/test_python_api.py."""
    out = io.StringIO()
    lines = iter(["/quit"])
    with mock.patch("mooncake.cli.chat.Client", return_value=Scripted(said("hello"))):
        assert talk(Chat(model=model), read=lambda _: next(lines), out=out) == 0
    assert all((question in out.getvalue()) == has_tries for question in TRIES)


def test_with_tools_questions_are_proposed_that_need_them(tmp_path: Path) -> None:
    """The model itself is asked them in tests/integration/serve/test_examples.py."""
    out = io.StringIO()
    lines, wanted = iter(["/quit"]), Chat(model="k2-demo", tools=True, folder=str(tmp_path))
    with mock.patch("mooncake.cli.chat.Client", return_value=Scripted(said("hello"))):
        assert talk(wanted, read=lambda _: next(lines), out=out) == 0
    assert all(question in out.getvalue() for question in TOOL_TRIES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "a.txt").write_text("hello")
    (inside / "binary").write_bytes(b"\xff\x00")
    (inside / ".hidden").write_text("")
    (tmp_path / "secret").write_text("secret")
    (inside / "link").symlink_to(tmp_path / "secret")
    return inside


def tools(folder: Path, client: Client | None = None) -> ChatTools:
    return ChatTools(client or Scripted([]), folder, lambda: datetime(2026, 5, 4, 13, 7))


def run(folder: Path, name: str, **arguments: Any) -> Any:
    return json.loads(tools(folder).run(name, json.dumps(arguments)))


def test_control_characters_are_spelled_out() -> None:
    assert plain("a\n\tb 你好") == "a\n\tb 你好"
    assert plain("\x1b]0;t\x07\r\x9b2J\x7f") == r"\x1b]0;t\x07\x0d\x9b2J\x7f"


def test_calls_are_run_and_the_model_goes_on_with_what_they_return(folder: Path) -> None:
    client = Scripted(
        called(("calculate", '{"expression": "6*7"}'), ("get_time", "{}")), said("42 at 13:07.")
    )
    out = io.StringIO()
    conversation = Conversation(client, Chat(), tools(folder, client))
    assert conversation.ask("6*7, and the time?", out) == "42 at 13:07."
    first, second = client.asked
    assert [tool["function"]["name"] for tool in first["tools"]] == [
        "get_time", "calculate", "list_files", "read_file", "get_cluster",
    ]  # fmt: skip
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert second["messages"][1]["tool_calls"][0] == {
        "id": "c0", "type": "function",
        "function": {"name": "calculate", "arguments": '{"expression": "6*7"}'},
    }  # fmt: skip
    assert second["messages"][2] == {
        "role": "tool",
        "tool_call_id": "c0",
        "content": '{"result": 42}',
    }
    assert out.getvalue() == (
        '  calculate({"expression": "6*7"}) -> {"result": 42}\n'
        '  get_time({}) -> {"date": "2026-05-04", "time": "13:07"}\n'
        "42 at 13:07.\n"
    )


def test_without_the_flag_no_tool_is_declared() -> None:
    client = Scripted(said("Hi."))
    Conversation(client, Chat()).ask("Hello", io.StringIO())
    assert "tools" not in client.asked[0]


def test_a_model_that_only_calls_is_stopped_and_the_question_forgotten(folder: Path) -> None:
    client = Scripted(called(("get_time", "{}")))
    conversation = Conversation(client, Chat(), tools(folder, client))
    with pytest.raises(MooncakeError, match=f"called tools {MAX_ROUNDS} times"):
        conversation.ask("time?", io.StringIO())
    assert len(client.asked) == MAX_ROUNDS
    assert conversation.turns == []


def test_a_failure_after_a_call_takes_the_whole_question_with_it(folder: Path) -> None:
    client = Scripted(called(("get_time", "{}")), Unavailable("gone"))
    conversation = Conversation(client, Chat(), tools(folder, client))
    with pytest.raises(MooncakeError, match="gone"):
        conversation.ask("time?", io.StringIO())
    assert conversation.turns == []


def test_a_person_is_told_of_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--folder: .* is not a folder"):
        talk(Chat(tools=True, folder=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("expression", "result"),
    [("2+3*4", 14), ("(1+2)*-3", -9), ("7/2", 3.5), ("10 % 4", 2), ("8/2", 4), (" 1.5*2 ", 3)],
)
def test_expressions_are_calculated(folder: Path, expression: str, result: float) -> None:
    assert run(folder, "calculate", expression=expression) == {"result": result}


@pytest.mark.parametrize(
    "expression",
    ["2**9", "a", "__import__('os')", "1/0", "1+", "9e99*9", "True", "(" * 150, "1" * 199, "1j"],
)
def test_what_is_no_sum_is_an_error(folder: Path, expression: str) -> None:
    assert list(run(folder, "calculate", expression=expression)) == ["error"]


def test_files_of_the_folder_are_listed_and_read_and_no_others(folder: Path) -> None:
    assert run(folder, "list_files") == {"files": ["a.txt", "binary", "link", "sub/"]}
    assert run(folder, "read_file", path="a.txt") == {"text": "hello"}
    assert run(folder, "read_file", path="sub/../a.txt") == {"text": "hello"}
    for path in ("../secret", "link", str(folder.parent / "secret")):
        assert run(folder, "read_file", path=path) == {"error": f"{path} is not in the folder"}
    assert run(folder, "read_file", path="b") == {"error": "there is no file b"}
    assert run(folder, "read_file", path="sub") == {"error": "there is no file sub"}
    assert run(folder, "read_file", path="binary") == {"error": "binary is not a text file"}
    assert run(folder, "read_file", path="a\0b") == {"error": "a\0b is not a text file"}


def test_long_texts_and_lists_are_cut_and_say_so(folder: Path) -> None:
    (folder / "a.txt").write_text("x" * (MAX_TEXT + 1))
    assert run(folder, "read_file", path="a.txt") == {"text": "x" * MAX_TEXT, "cut": True}
    for number in range(MAX_FILES):
        (folder / f"n{number}").touch()
    found = run(folder, "list_files")
    assert len(found["files"]) == MAX_FILES
    assert found["left_out"] == 4


def test_the_cluster_is_counted_by_roles(folder: Path) -> None:
    assert run(folder, "get_cluster") == {"gateways": 1, "prefill": 1, "decode": 2}


def test_wrong_calls_are_errors_for_the_model(folder: Path) -> None:
    made = tools(folder)
    assert json.loads(made.run("fly", "{}")) == {"error": "there is no tool 'fly'"}
    assert json.loads(made.run("read_file", "{")) == {"error": "the arguments are not JSON"}
    for arguments in ("{}", "[]", '{"path": 3}', '{"path": ""}'):
        assert json.loads(made.run("read_file", arguments)) == {
            "error": "path is missing, or is not a text"
        }


def test_what_is_no_utf8_is_shown_to_model_and_person(folder: Path) -> None:
    (folder / "caf\udce9.txt").touch()  # as a name in Latin-1 is read
    listed = tools(folder).run("list_files", "{}")
    assert "caf?.txt" in listed.encode().decode()
    for name, key in (("calculate", "expression"), ("read_file", "path")):
        answer = tools(folder).run(name, json.dumps({key: "\ud800"}))
        assert "error" in json.loads(answer.encode())


def test_arguments_of_endless_depth_are_an_error(folder: Path) -> None:
    assert "not JSON" in tools(folder).run("calculate", "[" * 200_000)
