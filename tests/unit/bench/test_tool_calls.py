"""What K2 Vendor Verifier's measures count: calls when they should be, and calls that fit."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.bench.tool_calls import ToolCalls, fault_of_calls

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


@pytest.mark.parametrize(
    ("calls", "fault"),
    [
        ([call("go", '{"a": 1}'), call("bare", "{}")], None),
        ([call("go", '{"a": "1"}')], "arguments against the schema"),
        ([call("go", '{"a": 1')], "arguments are no JSON"),
        ([call("went", "{}")], "unknown tool"),
        ([call("bare", "[]")], "arguments against the schema"),
        ([call("go", "{}"), call("went", "{}")], "unknown tool"),
        ([], "no call"),
    ],
)
def test_what_is_a_right_call(calls: list[dict[str, Any]], fault: str | None) -> None:
    found = fault_of_calls(TOOLS, calls)
    assert (found or "").startswith(fault or "")
    assert (found is None) is (fault is None)


def test_the_measures() -> None:
    right, wrong = [call("go", '{"a": 1}')], [call("go", '{"a": "1"}')]
    tally = ToolCalls()
    for wanted, reason, calls in (
        (True, "tool_calls", right), (True, "tool_calls", wrong), (True, "stop", []),
        (False, "tool_calls", right), (False, "stop", []), (True, "length", right),
    ):  # fmt: skip
        tally.add(wanted, reason, calls, TOOLS)
    assert tally == ToolCalls(called=2, called_wrongly=1, not_called=2, left_alone=1, num_valid=2)
    precision, recall = 2 / 3, 2 / 4
    assert tally.trigger_similarity == pytest.approx(2 / (1 / precision + 1 / recall))
    assert tally.schema_accuracy == pytest.approx(2 / 3)
    assert ToolCalls.total([tally, tally]).num_answers == 12
    assert ToolCalls.total([tally, tally]).document()["schema_accuracy"] == tally.schema_accuracy


def test_without_calls_there_is_nothing_to_measure() -> None:
    tally = ToolCalls(left_alone=3)
    assert tally.trigger_similarity is None
    assert tally.schema_accuracy is None
