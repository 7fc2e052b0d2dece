"""`mooncake eval`: what is asked, what is counted, against answers that are made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from mooncake.api.http.client import Answer, RequestFailed
from mooncake.bench.evaluate import Endpoint, Score, body_of, evaluate
from mooncake.bench.tool_calls import ToolCalls
from mooncake.tasks.mix import evaluation_samples
from mooncake.tasks.sample import Sample

Reply = Callable[[dict[str, Any]], tuple[int, bytes]]


class MadeUp:
    """An HTTP client whose server is a function."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.bodies: list[dict[str, Any]] = []
        self.open = self.most_open = 0

    async def request(
        self, method: str, path: str, headers: dict[str, str], body: bytes, on_data: Any
    ) -> Answer:
        assert (method, path) == ("POST", "/v1/chat/completions")
        assert headers["Content-Type"] == "application/json"
        asked = json.loads(body)
        self.bodies.append(asked)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await asyncio.sleep(0)
        self.open -= 1
        status, text = self._reply(asked)
        on_data(text, 0.0)
        return Answer(status, "made up")


def endpoint(client: MadeUp) -> Endpoint:
    return Endpoint(client, {"X": "y"}, "model", max_tokens=50)  # type: ignore[arg-type]


def says(message: dict[str, Any]) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": message}]}).encode()


def scores(samples: dict[str, list[Sample]], reply: Reply, concurrency: int = 3) -> list[Score]:
    return asyncio.run(evaluate(endpoint(MadeUp(reply)), samples, concurrency))


def test_right_answers_count() -> None:
    samples = {task: evaluation_samples(task, 6, seed=0) for task in ("sum", "call")}
    right = {
        sample.messages[-1]["content"]: sample.answer
        for each in samples.values()
        for sample in each
    }
    asked = 0

    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal asked
        asked += 1
        message = right[body["messages"][-1]["content"]]
        return says(message if asked % 3 else {"content": "no idea"})

    sums, calls = scores(samples, reply)
    assert (sums.task, calls.task) == ("sum", "call")
    assert sums.accuracy == calls.accuracy == pytest.approx(4 / 6)
    assert sums.standard_error == pytest.approx((4 / 6 * 2 / 6 / 6) ** 0.5)
    assert sums.document()["wrong"][0]["given"] == {"content": "no idea"}
    assert not sums.failures


def test_a_request_is_a_clients_own() -> None:
    [sample] = [s for s in evaluation_samples("result", 30, 0) if len(s.messages) > 2][:1]
    body = json.loads(body_of(sample, endpoint(MadeUp(says))))
    assert body["temperature"] == 0
    assert body["max_tokens"] == 50
    assert body["tools"] == list(sample.tools)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "tool"]
    thought = Sample("t", [{"role": "assistant", "content": "5", "reasoning": "2+3"}], {})
    assert json.loads(body_of(thought, endpoint(MadeUp(says))))["messages"] == [
        {"role": "assistant", "content": "5"}
    ]


def test_failures_are_wrong_and_told() -> None:
    samples = {"sum": evaluation_samples("sum", 4, seed=0)}
    for reply, why in (
        (lambda body: (503, b"later"), "503"),
        (lambda body: (200, b"{}"), "no message"),
        (lambda body: (200, b"<html>"), "no message"),
        (lambda body: (200, b'{"choices": []}'), "no message"),
        (lambda body: (200, b'{"choices": [{"message": 3}]}'), "no message"),
    ):
        [score] = scores(samples, reply)
        assert score.accuracy == 0
        assert len(score.failures) == 4
        assert why in score.failures[0]

    def lost(body: dict[str, Any]) -> tuple[int, bytes]:
        raise RequestFailed("the server closed the connection")

    assert len(scores(samples, lost)[0].failures) == 4


def test_so_many_are_open_and_no_more() -> None:
    client = MadeUp(lambda body: says({"content": "1"}))
    steps = 0

    def advance() -> None:
        nonlocal steps
        steps += 1

    samples = {"copy": evaluation_samples("copy", 20, seed=0)}
    asyncio.run(evaluate(endpoint(client), samples, 4, advance))
    assert client.most_open == 4
    assert steps == len(client.bodies) == 20


def test_tool_calls_are_measured_by_task() -> None:
    samples = {task: evaluation_samples(task, 4, seed=0) for task in ("call", "refusal")}
    call = {"id": "x", "type": "function", "function": {"name": "none", "arguments": "{}"}}

    def reply(asked: dict[str, Any]) -> tuple[int, bytes]:
        choice = {"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"}
        return 200, json.dumps({"choices": [choice]}).encode()

    asked, left = scores(samples, reply)
    assert asked.tool_calls == ToolCalls(called=4)
    assert left.tool_calls == ToolCalls(called_wrongly=4)
    assert asked.document()["tool_calls"]["schema_accuracy"] == 0.0
    [sums] = scores({"sum": evaluation_samples("sum", 1, seed=0)}, reply)
    assert "tool_calls" not in sums.document()


def test_a_call_without_a_name_is_a_failure() -> None:
    samples = {"call": evaluation_samples("call", 1, seed=0)}
    [score] = scores(samples, lambda asked: says({"tool_calls": [{"function": {}}]}))
    assert score.num_right == 0
    assert "without a name" in score.failures[0]
