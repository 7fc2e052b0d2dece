"""What tests, benchmarks and examples import of the packages is there.

mypy reads the packages alone, and a program that a test starts may hang the test when it fails.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.arch.sizes import ROOT

ROOTS = {"mooncake": ROOT, "mooncake_kernels": ROOT / "kernels", "tests": ROOT, "benchmarks": ROOT}


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return what a module defines at its top, modules in it included; None: there is no such."""
    path = ROOTS[module.partition(".")[0]].joinpath(*module.split("."))
    inside = {each.stem for each in path.glob("*") if each.suffix == ".py" or each.is_dir()}
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset(inside) if path.is_dir() else None
    found = set(inside)
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name.partition(".")[0])
    return frozenset(found)


def test_what_others_import_of_the_packages_is_there() -> None:
    missing = []
    files = [
        each
        for root in ("tests", "benchmarks", "examples")
        for each in Path(ROOT / root).rglob("*.py")
    ]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
                continue
            if node.module.partition(".")[0] not in ROOTS:
                continue
            known = names_of(node.module)
            wanted = {alias.name for alias in node.names}
            if known is None or wanted - known:
                missing.append(
                    f"{file.relative_to(ROOT)}: {node.module}: {wanted - (known or set())}"
                )
    assert len(files) > 500
    assert missing == []
