"""The house rules that a linter does not know: sizes, words at the top, what decisions may not use.

Reads the source as text and as a tree; imports none of it.
"""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("mooncake", "kernels/mooncake_kernels")
ALL_ROOTS = (*SOURCE_ROOTS, "tests", "benchmarks")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_ARGUMENTS = 7
MAX_COLUMNS = 100

DECISIONS = (
    "base", "engine", "instance", "kvstore", "prefill", "decode", "scheduler", "rpc/membership.py",
    "transfer/plan.py", "transfer/topology.py",
)  # fmt: skip
"""Modules that must run unchanged in the simulator: values and `now` in, values out."""
PORTS_TO_THE_SYSTEM = {
    "mooncake/base/clock.py": {"time"},
    "mooncake/base/ids.py": {"random"},
    "mooncake/kvstore/disk_files.py": {"threading", "time"},
    "mooncake/kvstore/segment_files.py": {"threading"},
}
"""The adapters that live beside their port, and the modules each may use."""
WORLD = {
    "asyncio", "multiprocessing", "queue", "random", "secrets", "select", "selectors", "signal",
    "socket", "subprocess", "threading", "time", "uuid",
}  # fmt: skip


def python_files(*roots: str) -> list[Path]:
    found = (path for root in roots for path in (ROOT / root).rglob("*.py"))
    return sorted(path for path in found if not path.name.startswith("."))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a GPU program, whose arguments are single pointers and numbers."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def imported_modules(path: Path) -> set[str]:
    """Return the dotted names of everything that `path` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def decision_files() -> list[Path]:
    paths: list[Path] = []
    for entry in DECISIONS:
        target = ROOT / "mooncake" / entry
        paths += [target] if target.suffix == ".py" else python_files(f"mooncake/{entry}")
    return [path for path in paths if path.exists()]


def test_there_is_something_to_check() -> None:
    assert len(python_files(*SOURCE_ROOTS)) > 30
    assert len(decision_files()) > 15


def test_files_are_short() -> None:
    sizes = {name_of(path): path.read_text().count("\n") for path in python_files(*ALL_ROOTS)}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_lines_are_narrow() -> None:
    wide = [
        f"{name_of(path)}:{number}"
        for path in python_files(*ALL_ROOTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line.split("  # type: ignore")[0]) > MAX_COLUMNS
    ]
    assert wide == []


def test_functions_are_short_and_take_few_arguments() -> None:
    problems = []
    for path in python_files(*SOURCE_ROOTS):
        for function in functions(path):
            where = f"{name_of(path)}:{function.lineno} {function.name}"
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                problems.append(f"{where}: {lines} lines")
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if count > MAX_ARGUMENTS and not is_compiled(function):
                problems.append(f"{where}: {count} arguments")
    assert problems == []


def test_every_module_says_what_it_is() -> None:
    silent = [
        name_of(path) for path in python_files(*ALL_ROOTS) if not ast.get_docstring(parsed(path))
    ]
    assert silent == []


def test_there_is_no_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    assert [name_of(path) for path in python_files(*ALL_ROOTS) if path.stem in drawers] == []


def test_decisions_touch_no_clock_thread_socket_or_chance() -> None:
    problems = []
    for path in decision_files():
        allowed = PORTS_TO_THE_SYSTEM.get(name_of(path), set())
        used = {module.split(".")[0] for module in imported_modules(path)} & WORLD - allowed
        if used:
            problems.append(f"{name_of(path)} imports {', '.join(sorted(used))}")
    assert problems == []


def test_the_environment_is_read_in_launch_only() -> None:
    readers = []
    for path in python_files(*SOURCE_ROOTS):
        if name_of(path).startswith("mooncake/launch/"):
            continue
        for node in ast.walk(parsed(path)):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            taken = (
                isinstance(node, ast.ImportFrom)
                and node.module == "os"
                and any(alias.name in ("environ", "getenv", "putenv") for alias in node.names)
            )
            if named or taken:
                readers.append(f"{name_of(path)}:{node.lineno}")
    assert readers == []


def test_nothing_unpickles_and_nothing_evaluates() -> None:
    barred = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
    problems = []
    for path in python_files(*SOURCE_ROOTS):
        used = {module.split(".")[0] for module in imported_modules(path)} & barred
        problems += [f"{name_of(path)} imports {module}" for module in sorted(used)]
        for node in ast.walk(parsed(path)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id in ("eval", "exec"):
                problems.append(f"{name_of(path)}:{node.lineno} calls {node.func.id}")
    assert problems == []


def test_no_error_is_swallowed_unseen() -> None:
    """A bare except, or a broad one that only passes, hides the fault that a test should show."""
    problems = []
    for path in python_files(*SOURCE_ROOTS):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = isinstance(node.type, ast.Name) and node.type.id in (
                "Exception",
                "BaseException",
            )
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            if node.type is None or (broad and silent):
                problems.append(f"{name_of(path)}:{node.lineno}")
    assert problems == []


def test_packages_export_sorted_names_and_do_nothing_else() -> None:
    """`__init__` holds imports, `__all__`, plain constants and at most a lazy `__getattr__`."""
    problems = []
    for path in python_files(*SOURCE_ROOTS):
        if path.name != "__init__.py":
            continue
        for node in parsed(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            simple = isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
            typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            lazy = isinstance(node, ast.FunctionDef) and node.name in ("__getattr__", "__dir__")
            if not (docstring or simple or typing_only or lazy):
                problems.append(f"{name_of(path)}:{node.lineno}")
    assert problems == []


@pytest.mark.parametrize("name", ["Makefile", "constraints.txt", "pyproject.toml", ".ci/run"])
def test_what_a_newcomer_starts_with_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_build_machine_runs_what_the_developer_runs() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text()


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *(name for names in extras.values() for name in names)}
    # triton belongs to the torch build that brings it; pinning it apart would break that pair.
    wanted -= {"triton"}
    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {name.lower().replace("_", "-") for name in pins if name and not name.startswith("#")}
    assert {name.lower() for name in wanted} - pinned == set()
