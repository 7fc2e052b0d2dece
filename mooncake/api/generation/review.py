"""Checks the finished answers of one call against the schemas that its grammar does not follow as a
whole. There is one object for each call. Faults are reported to the client beside the answer, which
is not changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from mooncake.api.constrained.checker import Fault, SchemaChecker, SchemaToCheck
from mooncake.api.schema.replies import SchemaError
from mooncake.api.text.answer import Delta

_COMPLETE = ("stop", "tool_calls")
"""The ends of complete answers. If an answer was cut off, clients know that it is not complete."""
MAX_ERRORS = 20
"""The most errors for one answer."""


class Review:
    """Owns the text of the answers while they grow."""

    def __init__(
        self,
        checker: SchemaChecker,
        answer: SchemaToCheck | None,
        tools: Mapping[str, SchemaToCheck],
    ) -> None:
        """`answer`: the schema of an answer's text, None = any; `tools`: the schemas of
        arguments.
        """
        self._checker = checker
        self._answer = answer
        self._tools = tools
        self._choices: dict[int, _Choice] = {}
        self._tenant = ""

    def run_as(self, tenant: str) -> None:
        """Check in the turns of `tenant`."""
        self._tenant = tenant

    async def add(self, deltas: Iterable[Delta]) -> None:
        """Add what is new in the answers. A `Delta` that ends an answer gets the errors of the
        whole answer.
        """
        ending: list[Delta] = []
        for delta in deltas:
            self._choices.setdefault(delta.index, _Choice()).add(delta)
            if delta.finish_reason in _COMPLETE:
                ending.append(delta)
        found = await asyncio.gather(*(self._errors(delta.index) for delta in ending))
        for delta, errors in zip(ending, found, strict=True):
            delta.schema_errors = errors

    async def _errors(self, index: int) -> list[SchemaError]:
        choice = self._choices.pop(index)
        errors: list[SchemaError] = []
        for call in choice.calls.values():
            schema = self._tools.get(call.name)
            if schema is not None:
                faults = await self._checker.check(schema, "".join(call.arguments), self._tenant)
                errors += [_error(fault, call.call_id) for fault in faults]
            if len(errors) >= MAX_ERRORS:
                return errors[:MAX_ERRORS]
        if self._answer is not None and not choice.calls:
            text = "".join(choice.text)
            errors += map(_error, await self._checker.check(self._answer, text, self._tenant))
        return errors


class _ToolCall:
    def __init__(self, call_id: str, name: str) -> None:
        self.call_id = call_id
        self.name = name
        self.arguments: list[str] = []


class _Choice:
    """The text and the calls of one answer so far."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: dict[int, _ToolCall] = {}

    def add(self, delta: Delta) -> None:
        for piece in delta.pieces:
            if piece.call is not None:
                if piece.call_id is not None and piece.name is not None:
                    self.calls[piece.call] = _ToolCall(piece.call_id, piece.name)
                self.calls[piece.call].arguments.append(piece.text)
            elif not piece.is_reasoning:
                self.text.append(piece.text)


def _error(fault: Fault, call_id: str | None = None) -> SchemaError:
    error = SchemaError(path=fault.path, keyword=fault.keyword, message=fault.message)
    if call_id is not None:
        error.tool_call_id = call_id
    return error
