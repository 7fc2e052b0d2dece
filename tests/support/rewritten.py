"""Compiles what pytest compiles in a way of its own, which is files of tests and plugins, before
several of its processes read them at the same time: each would compile all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]
_pytest: Any = rewrite
"""pytest has no public name for this; where a release differs, its processes compile as before."""


def of_tests(folder: Path = TESTS) -> list[Path]:
    """Return the files of tests below a folder."""
    return [*folder.rglob("conftest.py"), *folder.rglob("test_*.py")]


def of_plugins() -> list[Path]:
    """Return the files of the packages that bring plugins."""
    return [
        Path(str(package.locate_file(file)))
        for package in metadata.distributions()
        if any(point.group == "pytest11" for point in package.entry_points)
        for file in package.files or ()
        if file.suffix == ".py"
    ]


def compile_all(files: Sequence[Path]) -> list[Path]:
    """Compile files with all cores; return where the code lies."""
    with ProcessPoolExecutor() as processes:
        return [*processes.map(_compile, files, chunksize=16)]


def _compile(file: Path) -> Path:
    source_hash, code = _pytest._rewrite_test(file, None)
    kept: Path = _pytest.get_cache_dir(file) / (file.stem + _pytest.PYC_TAIL)
    kept.parent.mkdir(exist_ok=True)
    own = kept.with_name(f"{kept.name}.{os.getpid()}")
    with own.open("wb") as written:
        _pytest._write_pyc_fp(written, source_hash, code)
    own.replace(kept)
    return kept


if __name__ == "__main__":
    compile_all([*of_tests(), *of_plugins()])
