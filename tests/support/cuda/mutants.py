"""Code with one wait taken out: any statement that orders the device's work, or the work of ranks,
can be removed.

As a pytest plugin (`-p tests.support.cuda.mutants`) it takes out what `TAKEN_OUT` names, in the
process of the tests and in all that emulate GPUs for them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

ORDERS = {"wait_stream", "wait_event", "record", "synchronize", "reached"}
OF_RANKS = ORDERS | {"wait", "meet", "tolist", "wait_until_begun", "wait_until_guesses_are_heard"}
"""Those by which ranks wait for each other, too."""
_CALLED = {"wait"}
"""Functions that are passed in and do the same."""
TAKEN_OUT = "MOONCAKE_TEST_TAKEN_OUT"
"""An environment variable: names of waits, a line each."""


@dataclass(frozen=True)
class Wait:
    """A statement of a module."""

    module: ModuleType
    function: str
    """Its qualified name."""
    text: str
    line: int

    @property
    def path(self) -> str:
        """Its name with the module's whole one."""
        return f"{self.module.__name__}:{self.function}: {self.text}"

    @property
    def name(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.function}: {self.text}"


def pytest_configure() -> None:
    _kept.enter_context(taken_out())


_kept = ExitStack()


@contextmanager
def taken_out() -> Iterator[None]:
    """Run without the waits that the environment names until the block ends."""
    waits = [each for path in os.environ.get(TAKEN_OUT, "").splitlines() for each in _named(path)]
    with without(*waits):
        yield


def _named(path: str) -> list[Wait]:
    """Return the waits of that path. A function may have the same statement twice."""
    module = importlib.import_module(path.partition(":")[0])
    found = [each for each in waits_of(module, OF_RANKS) if each.path == path]
    assert found, f"there is no {path}"
    return found


def waits_of(module: ModuleType, calls: Set[str] = ORDERS) -> list[Wait]:
    """Return the statements of a module that make one of these calls."""
    found: list[Wait] = []

    def look(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = name
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inside = f"{name}.{child.name}" if name else child.name
            if isinstance(child, ast.Expr) and _orders(child.value, calls):
                found.append(Wait(module, name, ast.unparse(child), child.lineno))
            look(child, inside)

    look(ast.parse(_source(module)), "")
    return found


@contextmanager
def without(*waits: Wait) -> Iterator[None]:
    """Run the modules' code without some statements until the block ends."""
    with ExitStack() as stack:
        for module in {each.module for each in waits}:
            mine = [each for each in waits if each.module is module]
            tree = _Remove({each.line for each in mine}).visit(ast.parse(_source(module)))
            tree = ast.fix_missing_locations(tree)
            whole = compile(tree, inspect.getfile(module), "exec", dont_inherit=True)
            for each in mine:
                function, name = _live(each)
                stack.callback(setattr, function, "__code__", function.__code__)
                function.__code__ = _code(whole, name)
        yield


class _Remove(ast.NodeTransformer):
    def __init__(self, lines: set[int]) -> None:
        self._lines = lines

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        if node.lineno not in self._lines:
            return node
        made: ast.stmt = ast.Pass()
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            begun = node.value.func.value
            if isinstance(begun, ast.Call) and not isinstance(begun.func, ast.Attribute):
                made = ast.Expr(begun)  # what is waited for goes on
        return ast.copy_location(made, node)


def _orders(call: ast.expr, calls: Set[str]) -> bool:
    if not isinstance(call, ast.Call):
        return False
    if isinstance(call.func, ast.Name):
        return call.func.id in _CALLED
    return isinstance(call.func, ast.Attribute) and call.func.attr in calls


def _source(module: ModuleType) -> str:
    return Path(inspect.getfile(module)).read_text()


def _live(wait: Wait) -> tuple[FunctionType, str]:
    """Return the function that has the statement, or the outer one where it is made anew at each
    call, and its qualified name.
    """
    value: Any = wait.module
    passed = []
    for name in wait.function.split("."):
        value = inspect.unwrap(inspect.getattr_static(value, name))
        passed.append(name)
        if isinstance(value, FunctionType):
            return value, ".".join(passed)
    raise LookupError(f"{wait.function} is not a function")


def _code(code: CodeType, name: str) -> CodeType:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_qualname == name:
                return each
            if name.startswith(each.co_qualname + "."):
                return _code(each, name)
    raise LookupError(f"{name} is not in the code")
