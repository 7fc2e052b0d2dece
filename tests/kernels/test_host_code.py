"""Triton's code for the host, compiled beforehand, is what Triton loads; a GPU is not needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

host_code = pytest.importorskip("mooncake_kernels.triton.host_code")

ASK = """
import sys
from pathlib import Path

from mooncake_kernels.triton import host_code
from triton.runtime import build

source, host_code.COMPILED = sys.argv[1], Path(sys.argv[2])
host_code.use_compiled()
print(build._build("cuda_utils", source, "/", [], [], [], []))
"""


def asked(source: Path, folder: Path) -> str:
    """Return what Triton says that it would load, on a machine without a compiler."""
    words = [sys.executable, "-c", ASK, str(source), str(folder)]
    kernels = Path(__file__).parents[2] / "kernels"
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(kernels), "PATH": "/nowhere"},
    )
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_triton_loads_what_was_compiled_and_needs_no_compiler(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    made = host_code.compile_into(tmp_path / "compiled")
    assert asked(host_code.SOURCE, made.parent) == str(made)
    content = made.read_bytes()
    assert b"PyInit_cuda_utils\0" in content
    assert b"libcuda.so.1\0" in content, "the driver of the machine that it runs on"
    other = tmp_path / "driver.c"
    other.write_text("// of another release")
    assert "is not among what was compiled beforehand" in asked(other, made.parent)
    assert "Failed to find C compiler" in asked(other, tmp_path / "nothing")
