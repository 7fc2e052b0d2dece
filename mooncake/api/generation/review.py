"""Checks the finished answers of one call against the schemas that its grammar does not follow as a
whole. There is one object for each call. Faults are reported to the client beside the answer, which
is not changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from mooncake.api.constrained.checker import Fault, SchemaChecker, SchemaToCheck
from mooncake.api.schema.replies import SchemaError
from mooncake.api.text.answer import Delta, Piece, join_pieces

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
        self._pieces: dict[int, list[Piece]] = {}
        """The answers so far, by number."""
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
            self._pieces.setdefault(delta.index, []).extend(delta.pieces)
            if delta.finish_reason in _COMPLETE:
                ending.append(delta)
        found = await asyncio.gather(*(self._errors(delta.index) for delta in ending))
        for delta, errors in zip(ending, found, strict=True):
            delta.schema_errors = errors

    async def _errors(self, index: int) -> list[SchemaError]:
        whole = Delta(index=index, pieces=join_pieces(self._pieces.pop(index)))
        calls = whole.tool_calls
        errors: list[SchemaError] = []
        for call in calls:
            schema = self._tools.get(call.name or "")
            if schema is not None:
                faults = await self._checker.check(schema, call.text, self._tenant)
                errors += [_error(fault, call.call_id) for fault in faults]
            if len(errors) >= MAX_ERRORS:
                return errors[:MAX_ERRORS]
        if self._answer is not None and not calls:
            faults = await self._checker.check(self._answer, whole.text, self._tenant)
            errors += map(_error, faults)
        return errors


def _error(fault: Fault, call_id: str | None = None) -> SchemaError:
    error = SchemaError(path=fault.path, keyword=fault.keyword, message=fault.message)
    if call_id is not None:
        error.tool_call_id = call_id
    return error
