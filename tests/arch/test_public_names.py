"""What others may import is written down: a changed public name shows in the diff of a text file.

After a deliberate change: `make public-names`, and say in the commit what callers do now.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import public_names

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", public_names.packages())
def test_exports_are_sorted_unique_and_there(package: str) -> None:
    names = public_names.exported(package)
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if not name.isupper() and name[0].isupper()]
    functions = [name for name in names if name[0].islower() or name[0] == "_"]
    assert names == sorted(constants) + sorted(classes) + sorted(functions)
    assert len(names) == len(set(names))
    module = importlib.import_module(package)
    missing = [name for name in names if not hasattr(module, name)]
    assert missing == []


def test_public_names_are_the_recorded_ones() -> None:
    assert public_names.STORED.read_text() == public_names.render()


def test_transformers_imports_beside_our_source_roots() -> None:
    """A top-level package `kernels` would be taken for Hugging Face's; ours must not be one."""
    code = (
        "import importlib.util, transformers; "
        "from transformers import DeepseekV3Config; "
        "spec = importlib.util.find_spec('kernels'); "
        "print(transformers.__version__, spec is not None and spec.origin is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "False"


def test_importing_the_package_is_cheap() -> None:
    """`mooncake --help` must answer at once: neither torch nor Ray comes along by accident."""
    code = (
        "import sys, mooncake, mooncake.base, mooncake.cli.main; "
        "heavy = ('torch', 'ray', 'transformers', 'starlette'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
