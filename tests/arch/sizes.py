"""Lists what is worth a look for its size: `python -m tests.arch.sizes`, part of `make check`.

Advice, not a law: a long file may be one idea, and a trick to shorten it is worse than its length.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE_ROOTS = ("mooncake", "kernels/mooncake_kernels")
ALL_ROOTS = (*SOURCE_ROOTS, "tests", "benchmarks")

FILE_LINES = 500
FUNCTION_LINES = 70
NUM_ARGUMENTS = 7


def python_files(*roots: str) -> list[Path]:
    """Return the Python files below folders of the repository, sorted."""
    found = (path for root in roots for path in (ROOT / root).rglob("*.py"))
    return sorted(path for path in found if not path.name.startswith("."))


def name_of(path: Path) -> str:
    """Return a file's path as seen from the repository's root."""
    return path.relative_to(ROOT).as_posix()


atexit.register(gc.unfreeze)  # otherwise extension modules say at the end that objects have leaked


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file.

    Trees are kept, and all of them have two million nodes. The garbage collector would look through
    these again and again, which takes three times as long as to parse the files.
    """
    tree = ast.parse(path.read_text(), filename=str(path))
    gc.freeze()
    return tree


def _functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _is_compiled(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a GPU program, whose arguments are single pointers and numbers."""
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def long_files() -> Iterator[str]:
    """Yield the files that hold more lines than one sitting reads."""
    for path in python_files(*ALL_ROOTS):
        if (lines := path.read_text().count("\n")) > FILE_LINES:
            yield f"{name_of(path)}: {lines} lines"


def large_functions() -> Iterator[str]:
    """Yield the functions of the source that are long or take many arguments."""
    for path in python_files(*SOURCE_ROOTS):
        for function in _functions(path):
            where = f"{name_of(path)}:{function.lineno} {function.name}"
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{where}: {lines} lines"
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            count = len([argument for argument in arguments if argument.arg not in ("self", "cls")])
            if count > NUM_ARGUMENTS and not _is_compiled(function):
                yield f"{where}: {count} arguments"


def main() -> None:
    """Print the list; nothing on it is an error."""
    if found := [*long_files(), *large_functions()]:
        print("worth a look:", *found, sep="\n  ")


if __name__ == "__main__":
    main()
