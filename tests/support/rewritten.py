"""Compiles the files of tests as pytest does, for several of its processes that then read them at
the same time: each would compile all of them.
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from _pytest.assertion import rewrite

TESTS = Path(__file__).parents[1]
_pytest: Any = rewrite
"""pytest has no public name for this; where a release differs, its processes compile as before."""


def compile_tests(folder: Path = TESTS) -> list[Path]:
    """Compile all files of tests below a folder with all cores; return where the code lies."""
    files = [*folder.rglob("conftest.py"), *folder.rglob("test_*.py")]
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
    compile_tests()
