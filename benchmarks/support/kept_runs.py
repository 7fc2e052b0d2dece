"""Keeps the runs of a benchmark in a file, one a line as JSON, so that a later call goes on behind
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

Run = TypeVar("Run", bound=msgspec.Struct)


class KeptRuns(Generic[Run]):
    """The runs of one kind in one file."""

    def __init__(self, path: Path | None, kind: type[Run]) -> None:
        """`path`: None = nothing is kept."""
        self._path = path
        self._kind = kind

    def read(self) -> list[Run]:
        """Return the runs that earlier calls have kept, in their order."""
        if self._path is None or not self._path.exists():
            return []
        return msgspec.json.Decoder(self._kind).decode_lines(self._path.read_bytes())

    def add(self, run: Run) -> None:
        """Keep one more, whatever happens to those after it."""
        if self._path is not None:
            with self._path.open("ab") as out:
                out.write(msgspec.json.encode(run) + b"\n")
