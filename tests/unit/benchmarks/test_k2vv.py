"""The verifier's own arithmetic: what counts as a right call, and requests as it sends them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from benchmarks.k2vv import NO_ANSWER, measure, read_requests

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "bare"}},
]


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_share_of_right_answers() -> None:
    replies: list[tuple[int, str, list[dict[str, Any]]]] = [
        (200, "tool_calls", [call("go", "{}")]),
        (200, "tool_calls", [call("went", "{}")]),
        (200, "stop", []),
        (200, "length", [call("go", '{"a"')]),
        (503, "", []),
    ]

    def answer(request: httpx.Request) -> httpx.Response:
        status, reason, calls = replies[json.loads(request.content)["number"]]
        choice = {"finish_reason": reason, "message": {"tool_calls": calls}}
        return httpx.Response(status, json={"choices": [choice]})

    async def run() -> None:
        requests = [{"number": number, "tools": TOOLS} for number in range(len(replies))]
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://x/v1/") as client:
            tally, lines = await measure(requests, client, 2)
        assert tally.schema_accuracy == 0.5
        assert tally.finished == {"tool_calls": 2, "stop": 1, "length": 1, NO_ANSWER: 1}
        assert tally.faults == {"unknown tool": 1}
        assert [line["fault"] is None for line in lines] == [True, False, True, True, True]

    asyncio.run(run())


def test_requests_are_sent_as_they_are_written(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"model": "k2", "messages": [], "tools": []}\n\n{"messages": [1]}\n')
    assert read_requests(file, None, None) == [
        {"messages": [], "tools": [], "stream": False},
        {"messages": [1], "stream": False},
    ]
    [first, _] = read_requests(file, "own", 5)
    assert (first["model"], first["max_tokens"]) == ("own", 5)
