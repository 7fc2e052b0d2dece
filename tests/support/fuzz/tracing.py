"""Which ways inputs take through the lines of some modules, by `sys.settrace`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

Edge = tuple[int, int, int]
"""The number of a module, and two lines that ran one after the other."""


class Tracing:
    """Traces the lines of modules while it is entered; `edges` are what ran."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._files = {
            importlib.import_module(name).__file__: number for number, name in enumerate(modules)
        }
        self.edges: set[Edge] = set()
        self._last = 0

    def __enter__(self) -> Tracing:
        self.edges = set()
        self._last = 0
        if self._files:
            sys.settrace(self._enter)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        line = frame.f_lineno
        self.edges.add((self._files[frame.f_code.co_filename], self._last, line))
        self._last = line
        return self._line
