"""The table of ops: every name leads to a callable, and asking is cheap until then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mooncake_kernels import dispatch


def test_every_op_has_a_reference_and_every_backend_loads() -> None:
    for op in dispatch.ops():
        names = dispatch.backends(op)
        assert names[0] == dispatch.REFERENCE
        for backend in names:
            assert callable(dispatch.kernel(op, backend))


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(
        KeyError, match=r"'experts' has no backend 'abacus', only reference, fixed, native"
    ):
        dispatch.kernel("experts", "abacus")


def test_an_unknown_op_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="tea"):
        dispatch.kernel("tea")
    with pytest.raises(KeyError, match="tea"):
        dispatch.backends("tea")


def test_the_table_itself_loads_no_torch() -> None:
    code = (
        "import sys; from mooncake_kernels import dispatch; dispatch.backends('route'); "
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(dispatch.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
