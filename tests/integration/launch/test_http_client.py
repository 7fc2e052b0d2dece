"""`mooncake status` and `mooncake chat` against servers that answer well, badly and not at all."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mooncake.base import ConfigError, MooncakeError, Unavailable
from mooncake.cli import chat, status
from mooncake.cli.main import run
from mooncake.launch.host.http_client import Client
from tests.support.api.http_server import Reply, TableServer

MODELS = Reply(chunks=(b'{"data": [{"id": "k2"}, {"id": "other"}]}',))
CHAT = "POST /v1/chat/completions"


def events(*texts: str, end: bytes = b"data: [DONE]\n\n") -> Reply:
    """Return a stream of chat chunks."""
    chunks = [
        b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"
        for text in texts
    ]
    return Reply(chunks=(b": a comment\n\n", *chunks, end), content_type="text/event-stream")


def asked_for(server: TableServer, **changes: Any) -> chat.Chat:
    return chat.Chat(url=server.url, max_tokens=7, **changes)


def person(*lines: str) -> Callable[[str], str]:
    """Return an `input` that gives these lines and then closes."""
    left: Iterator[str] = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


def test_get() -> None:
    with TableServer({"GET /v1/models": MODELS}) as server:
        assert Client(server.url).get("/v1/models")["data"][0]["id"] == "k2"
        assert server.asked[0].authorization is None


def test_the_key_and_the_path_before_ours_are_sent() -> None:
    with TableServer({"GET /api/x": Reply(chunks=(b"1",))}) as server:
        assert Client(f"{server.url}/api/", "k3y").get("/x") == 1
        assert server.asked[0].authorization == "Bearer k3y"


@pytest.mark.parametrize(
    ("reply", "message", "code"),
    [
        (Reply(503, (b'{"error": {"message": "no worker"}}',)), "answered 503: no worker", 1),
        (Reply(401, (b'{"error": "who are you"}',)), "answered 401: who are you", 4),
        (Reply(403, (b'{"error": "not yours"}',)), "answered 403: not yours", 4),
        (Reply(500, (b"boom",)), "answered 500: boom", 1),
        (Reply(502), "answered 502: Bad Gateway", 1),
        (Reply(200, (b"<html>",)), "did not answer with JSON", 1),
    ],
)
def test_refusals_are_told_and_have_exit_codes(
    reply: Reply, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with TableServer({"GET /x": reply, "GET /v1/cluster/status": reply}) as server:
        with pytest.raises(MooncakeError, match=message):
            Client(server.url).get("/x")
        assert run(["status", "--url", server.url]) == code
        assert "mooncake: " in capsys.readouterr().err


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:99999"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Client(url)


def test_a_url_may_leave_out_the_scheme() -> None:
    with TableServer({"GET /x": Reply(chunks=(b"2",))}) as server:
        assert Client(server.url.removeprefix("http://")).get("/x") == 2


def test_events_come_in_order_and_end() -> None:
    with TableServer({CHAT: events("a", "b")}) as server:
        got = list(Client(server.url).stream("/v1/chat/completions", {"n": 1}))
        assert [event["choices"][0]["delta"]["content"] for event in got] == ["a", "b"]
        assert json.loads(server.asked[0].body) == {"n": 1}


def test_an_error_within_a_stream_is_raised() -> None:
    late = b'data: {"error": {"message": "worker lost"}}\n\n'
    with TableServer({CHAT: events("a", end=late)}) as server:
        stream = Client(server.url).stream("/v1/chat/completions", {})
        assert next(stream)
        with pytest.raises(MooncakeError, match="worker lost"):
            next(stream)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    with TableServer({CHAT: events("a", end=b"data: {half")}) as server:
        stream = Client(server.url).stream("/v1/chat/completions", {})
        assert next(stream)
        with pytest.raises(Unavailable, match="broke off"):
            next(stream)


def test_a_conversation_keeps_its_turns() -> None:
    out = io.StringIO()
    with TableServer({"GET /v1/models": MODELS, CHAT: events("Hel", "lo")}) as server:
        code = chat.talk(
            asked_for(server, system="be kind", temperature=0.5),
            read=person("hi", "", "again", "/new", "third"), out=out,
        )  # fmt: skip
    bodies = [json.loads(asked.body) for asked in server.asked if asked.method == "POST"]
    assert code == 0
    assert [len(body["messages"]) for body in bodies] == [2, 4, 2]
    assert bodies[1]["messages"][1:] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "again"},
    ]
    assert {body["model"] for body in bodies} == {"k2"}
    assert {body["max_tokens"] for body in bodies} == {7}
    assert {body["temperature"] for body in bodies} == {0.5}
    assert out.getvalue().count("Hello\n") == 3


def test_a_failed_question_is_not_kept() -> None:
    out = io.StringIO()
    busy = Reply(429, (b'{"error": {"message": "too busy"}}',))
    with TableServer({"GET /v1/models": MODELS, CHAT: busy}) as server:
        chat.talk(asked_for(server), read=person("hi", "hi"), out=out)
    bodies = [json.loads(asked.body) for asked in server.asked if asked.method == "POST"]
    assert [len(body["messages"]) for body in bodies] == [1, 1]
    assert "too busy" in out.getvalue()


@pytest.mark.parametrize("word", ["/quit", "/exit"])
def test_leaving(word: str) -> None:
    with TableServer({"GET /v1/models": MODELS}) as server:
        assert chat.talk(asked_for(server), read=person(word), out=io.StringIO()) == 0


def test_an_unknown_command_is_not_sent() -> None:
    out = io.StringIO()
    with TableServer({"GET /v1/models": MODELS}) as server:
        chat.talk(asked_for(server, model="other"), read=person("/help"), out=out)
        assert server.asked == []
    assert out.getvalue().count(chat.HELP) == 2


def test_ctrl_c_at_the_prompt_leaves() -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    with TableServer({"GET /v1/models": MODELS}) as server:
        assert chat.talk(asked_for(server), read=interrupted, out=io.StringIO()) == 0


STATUS = {
    "ready": True,
    "workers": [
        {
            "id": "decode-0",
            "role": "decode",
            "pid": 12,
            "host": "h",
            "state": "up",
            "silent_s": 0.25,
        }
    ],
    "pool": {"num_nodes": 1, "used_bytes": 2},
}


def test_status_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    reply = Reply(chunks=(json.dumps(STATUS).encode(),))
    with TableServer({f"GET {status.STATUS_PATH}": reply}) as server:
        assert status.show(status.Status(url=server.url, api_key="k", json=True)) == 0
        assert server.asked[0].authorization == "Bearer k"
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    reply = Reply(chunks=(json.dumps(STATUS).encode(),))
    with TableServer({f"GET {status.STATUS_PATH}": reply}) as server:
        assert status.show(status.Status(url=server.url)) == 0
    shown = capsys.readouterr().out
    for word in ("decode-0", "12", "up", "1 nodes", "2 B used", "ready: yes"):
        assert word in shown
