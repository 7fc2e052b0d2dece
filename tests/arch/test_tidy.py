"""The house rules that a linter does not know: width, words at the top, what decisions may not use.

Reads the source as text and as a tree; imports none of it.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.arch.sizes import ALL_ROOTS, ROOT, SOURCE_ROOTS, name_of, parsed, python_files

MAX_COLUMNS = 100

DECISIONS = (
    "base", "engine", "instance", "kvstore", "prefill", "decode", "scheduler", "rpc/membership.py",
    "transfer/plan.py", "transfer/topology.py",
)  # fmt: skip
"""Modules that must run unchanged in the simulator: values and `now` in, values out."""
PORTS_TO_THE_SYSTEM = {
    "mooncake/base/clock.py": {"time"},
    "mooncake/base/ids.py": {"random"},
    "mooncake/base/mailbox.py": {"threading"},
    "mooncake/base/threads.py": {"threading"},
    "mooncake/kvstore/storage/disk_files.py": {"threading", "time"},
    "mooncake/kvstore/storage/disk_threads.py": {"threading"},
    "mooncake/kvstore/storage/s3.py": {"time"},
    "mooncake/kvstore/storage/segment_files.py": {"threading"},
}
"""The adapters that live beside their port, and the modules each may use."""
WORLD = {
    "asyncio", "multiprocessing", "queue", "random", "secrets", "select", "selectors", "signal",
    "socket", "subprocess", "threading", "time", "uuid",
}  # fmt: skip


BELOW_FLAGS = (
    "api", "base", "bench", "crypto", "decode", "engine", "identity", "instance", "kvstore",
    "model", "prefill", "rpc", "scheduler", "sim", "telemetry", "transfer",
)  # fmt: skip
"""Packages that are also used where there is no command line: by `LLM`, in a file of settings."""


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


def test_lines_are_narrow() -> None:
    wide = [
        f"{name_of(path)}:{number}"
        for path in python_files(*ALL_ROOTS)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line.split("  # type: ignore")[0]) > MAX_COLUMNS
    ]
    assert wide == []


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


@pytest.mark.parametrize(
    "name", ["Makefile", "constraints.txt", "constraints-cpu.txt", "pyproject.toml", ".ci/run"]
)
def test_what_a_newcomer_starts_with_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = {*project["dependencies"], *(name for names in extras.values() for name in names)}
    # triton belongs to the torch build that brings it; pinning it apart would break that pair.
    wanted -= {"triton"}
    pins = [line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = {name.lower().replace("_", "-") for name in pins if name and not name.startswith("#")}
    assert {name.lower() for name in wanted} - pinned == set()


def texts(path: Path) -> Iterator[str]:
    """Yield the texts of a module that are no docstrings, with a 0 for what is filled in."""
    nodes = list(ast.walk(parsed(path)))
    others = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            others.update(node.values)
            parts = (each.value if isinstance(each, ast.Constant) else "0" for each in node.values)
            yield "".join(map(str, parts))
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in others:
            yield node.value


@pytest.mark.parametrize("package", BELOW_FLAGS)
def test_errors_name_settings_and_the_command_line_spells_flags(package: str) -> None:
    """A setting stands in backticks, and the command writes it as a flag. Whole commands may be
    named.
    """
    named = {
        f"{name_of(path)}: {found[0]}"
        for path in python_files(f"mooncake/{package}")
        for text in texts(path)
        if (found := re.search("--[a-z]+[a-z-]*", re.sub("`?mooncake [a-z][^`]*", "", text)))
    }
    assert named == set(), "write `setting`"
