"""Code with one wait taken out: any statement that orders the device's work can be removed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_ORDERS = {"wait_stream", "wait_event", "record", "synchronize", "reached"}
_CALLED = {"wait"}
"""Functions that are passed in and do the same."""


@dataclass(frozen=True)
class Wait:
    """A statement of a module."""

    module: ModuleType
    function: str
    """Its qualified name."""
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}: {self.text}"


def waits_of(module: ModuleType) -> list[Wait]:
    """Return the statements of a module that order the device's work."""
    found: list[Wait] = []

    def look(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = name
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inside = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.Expr) and _orders(child.value):
                found.append(Wait(module, name, ast.unparse(child), child.lineno))
            look(child, inside)

    look(ast.parse(_source(module)), "")
    return found


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Run the module's code without a statement until the block ends."""
    tree = ast.parse(_source(wait.module))
    tree = ast.fix_missing_locations(_Remove(wait.line).visit(tree))
    whole = compile(tree, inspect.getfile(wait.module), "exec", dont_inherit=True)
    function = _live(wait)
    before, function.__code__ = function.__code__, _code(whole, wait.function)
    try:
        yield
    finally:
        function.__code__ = before


class _Remove(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if node.lineno == self._line and _orders(node.value):
            return ast.copy_location(ast.Pass(), node)
        return node


def _orders(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id in _CALLED
    return isinstance(call.func, ast.Attribute) and call.func.attr in _ORDERS


def _source(module: ModuleType) -> str:
    return Path(inspect.getfile(module)).read_text()


def _live(wait: Wait) -> FunctionType:
    value: Any = wait.module
    for name in wait.function.split("."):
        value = inspect.getattr_static(value, name)
    found: FunctionType = inspect.unwrap(value)
    return found


def _code(code: CodeType, name: str) -> CodeType:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name:
                return each
            if name.startswith(each.co_qualname + "."):
                return _code(each, name)
    raise LookupError(f"{name} is not in the code")
