"""pytest finds what `tests.support.rewritten` has compiled, and compiles nothing itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hypothesis

from tests.support.rewritten import compile_all, of_plugins, of_tests

TEST = "def test_one():\n    one = 1\n    assert one == 2\n"


def test_pytest_runs_the_code_that_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "test_one.py"
    file.parent.mkdir()
    file.write_text(TEST)
    [kept] = compile_all(of_tests(tmp_path))
    code = kept.read_bytes()
    kept.write_bytes(code.replace(b"test_one", b"test_two"))
    assert code != kept.read_bytes()
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        [*words, str(file)], cwd=tmp_path, env=environ,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "test_two - assert 1 == 2" in ran.stdout, "the kept code, with its asserts rewritten"


def test_plugins_are_compiled_too() -> None:
    assert Path(hypothesis.__file__) in of_plugins()
