"""The measures of Moonshot's K2 Vendor Verifier: whether a model calls tools exactly when it
should, and whether its calls fit the declared tools. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from mooncake.api.constrained.check_program import faults

CALLED = "tool_calls"
"""The finish reason of an answer that calls tools."""


@dataclass
class ToolCalls:
    """Counts of answers to requests with tools: whether a call was wanted, and whether it
    was made.
    """

    called: int = 0
    """A tool was called, as wanted."""
    called_wrongly: int = 0
    not_called: int = 0
    """No tool was called, though one was wanted."""
    left_alone: int = 0
    """No tool was called, as wanted."""
    num_valid: int = 0
    """Answers with calls in which every call fits its schema."""

    def add(
        self,
        wanted: bool,
        reason: str,
        calls: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        """Count an answer. wanted: whether it should call a tool; reason: its finish reason."""
        if reason == CALLED:
            self.num_valid += fault_of_calls(tools, calls) is None
            self.called += wanted
            self.called_wrongly += not wanted
        else:
            self.not_called += wanted
            self.left_alone += not wanted

    @property
    def num_answers(self) -> int:
        return self.called + self.called_wrongly + self.not_called + self.left_alone

    @property
    def num_called(self) -> int:
        return self.called + self.called_wrongly

    @property
    def trigger_similarity(self) -> float | None:
        """The F1 score of calling at all: the harmonic mean of precision and recall. It is None if
        no answer called a tool, and none should have.
        """
        missed = self.called_wrongly + self.not_called
        return 2 * self.called / (2 * self.called + missed) if self.called or missed else None

    @property
    def schema_accuracy(self) -> float | None:
        """The share of valid answers among those with calls. It is None if there are none."""
        return self.num_valid / self.num_called if self.num_called else None

    def document(self) -> dict[str, Any]:
        return {
            **vars(self), "trigger_similarity": self.trigger_similarity,
            "schema_accuracy": self.schema_accuracy,
        }  # fmt: skip

    @classmethod
    def total(cls, parts: Iterable[ToolCalls]) -> ToolCalls:
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))


def fault_of_calls(
    tools: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return what is wrong with the first wrong call, or None when all are right."""
    declared = {tool["function"]["name"]: tool["function"] for tool in tools}
    if not calls:
        return "no call: finish_reason says tool_calls"
    for call in calls:
        name = call["function"]["name"]
        if name not in declared:
            return f"unknown tool: {name}"
        try:
            arguments = json.loads(call["function"]["arguments"])
        except ValueError as error:
            return f"arguments are no JSON: {error}"
        if found := faults(declared[name].get("parameters") or {"type": "object"}, arguments):
            return f"arguments against the schema: {found[0][-1]}"
    return None
