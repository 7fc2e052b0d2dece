"""What tests, benchmarks and examples import of the packages is there.

mypy reads the packages alone, and a program that a test starts may hang the test when it fails.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.arch.sizes import ROOT, parsed, python_files

ROOTS = {"mooncake": ROOT, "mooncake_kernels": ROOT / "kernels", "tests": ROOT, "benchmarks": ROOT}


@cache
def names_of(module: str) -> frozenset[str] | None:
    """Return what a module defines at its top, modules in it included; None: there is no such."""
    path = ROOTS[module.partition(".")[0]].joinpath(*module.split("."))
    inside = {each.stem for each in path.glob("*") if each.suffix == ".py" or each.is_dir()}
    file = path / "__init__.py"
    if not file.exists():  # a folder without one comes after a file, as in Python
        file = path.with_suffix(".py")
    if not file.exists():
        return frozenset(inside) if path.is_dir() else None
    found = set(inside)
    for node in ast.walk(parsed(file)):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name.partition(".")[0])
    return frozenset(found)


def imported_at_once(body: Sequence[ast.stmt], known: set[str]) -> Iterator[str]:
    """Yield which of the known modules are imported as soon as a module with this text is."""
    for node in body:
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                whole = [f"{module}.{alias.name}" for alias in names]
                yield from (each if each in known else module for each in whole)
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                yield from imported_at_once(orelse, known)
            case ast.If(body=inner, orelse=orelse) | ast.Try(body=inner, orelse=orelse):
                yield from imported_at_once([*inner, *orelse], known)


def check_no_circle(trees: dict[str, ast.Module]) -> None:
    """Raises CycleError for modules of which each imports the next, and the last the first."""
    known = set(trees)
    imports = {
        name: set(imported_at_once(tree.body, known)) & known - {name}
        for name, tree in trees.items()
    }
    TopologicalSorter(imports).prepare()


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Such modules cannot be imported, or only in one order."""
    later = "def f():\n    import a\nif TYPE_CHECKING:\n    import a\n"
    first = ast.parse("from b import c")
    check_no_circle({"a": first, "b": ast.parse(later)})
    second, third = ast.parse("import x\nfrom d import e"), ast.parse("import a")
    with pytest.raises(CycleError):
        check_no_circle({"a": first, "b": second, "d": third})
    trees = {}
    for file in python_files("mooncake"):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
        trees[name.removesuffix(".__init__")] = parsed(file)
    assert len(trees) > 500
    check_no_circle(trees)


def private_names_of_ray(tree: ast.AST) -> list[str]:
    """Return what a module takes of Ray that Ray does not publish: a name that begins with `_`,
    imported, given to `import_module`, or read of a module.
    """
    taken: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                taken += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names):
                taken += [f"{module}.{alias.name}" for alias in names]
            case ast.Constant(value=str(text)) if re.fullmatch(r"ray(\.\w+)+", text):
                taken.append(text)
            case ast.Attribute(attr=name) if name.startswith("_"):
                taken.append(ast.unparse(node))
    return [name for name in taken if re.match(r"ray\.(\w+\.)*_", name)]


def test_of_ray_only_what_it_publishes_is_used() -> None:
    for text in (
        "import ray._raylet", "from ray._private import worker", "ray.util._x()",
        "from ray.experimental.internal_kv import _internal_kv_get as get",
        "import_module('ray._private.ray_logging')", "ray._private.worker.global_worker",
    ):  # fmt: skip
        assert private_names_of_ray(ast.parse(text)), text
    found = {
        str(file.relative_to(ROOT)): names
        for file in python_files("mooncake")
        if (names := private_names_of_ray(parsed(file)))
    }
    assert found == {}


def test_what_others_import_of_the_packages_is_there() -> None:
    missing = []
    files = python_files("tests", "benchmarks", "examples")
    for file in files:
        for node in ast.walk(parsed(file)):
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


GATEWAY = """
import sys
from mooncake.cli import main, serve
from mooncake.api.http.server import bind, serve
from mooncake.api.app import create_app
from mooncake.api.model import load_served_model
from mooncake.api.http import event_loop
from mooncake.launch.cluster import checks, serve
from mooncake.launch.cluster.gateways import gateway_process
from mooncake.launch.cluster.supervision import process_workers
from mooncake.launch.cluster.supervision import supervisor
from mooncake.rpc import zmq_channel
print(*sorted(sys.modules))
"""
"""What a gateway that starts workers in processes of their own imports until it is ready."""
NOT_OF_A_GATEWAY = (
    "ray", "torch",
    "mooncake.decode", "mooncake.engine.batcher", "mooncake.engine.engine",
    "mooncake.instance.instance", "mooncake.kvstore.client", "mooncake.kvstore.node",
    "mooncake.kvstore.storage", "mooncake.model.kimi_k2", "mooncake.prefill",
    "mooncake.transfer.factory", "mooncake.transfer.local", "mooncake.transfer.rdma.backend",
    "mooncake.transfer.router", "mooncake.transfer.shm", "mooncake.transfer.staging",
    "mooncake.transfer.tcp",
)  # fmt: skip


def test_a_gateway_imports_no_part_that_moves_or_computes_blocks() -> None:
    """They took a third of the CPU seconds of its imports, which every start waits for."""
    for module in NOT_OF_A_GATEWAY:
        assert module.partition(".")[0] not in ROOTS or names_of(module) is not None, module
    done = subprocess.run(
        [sys.executable, "-c", GATEWAY], cwd=ROOT, capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )  # fmt: skip
    imported = done.stdout.split()
    assert "mooncake.launch.cluster.gateways.gateway_process" in imported
    inside = tuple(f"{module}." for module in NOT_OF_A_GATEWAY)
    assert [m for m in imported if m in NOT_OF_A_GATEWAY or m.startswith(inside)] == []
