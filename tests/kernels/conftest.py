"""What tests of several kernels use."""

from __future__ import annotations

import pytest
from mooncake_kernels.native import build

from tests.support.kernels.interpreter import looking_once

__all__ = ["isa", "looking_once"]


@pytest.fixture(params=build.ISAS, ids=lambda isa: isa.name)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> build.Isa:
    """Code as it is compiled for a CPU that has these instructions and no more."""
    wanted: build.Isa = request.param
    if not wanted.needed <= build.cpu_flags():
        pytest.skip(f"this CPU has no {wanted.name}")
    monkeypatch.setattr(build, "cpu_flags", lambda: wanted.needed)
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    if build.isa() is not wanted:
        pytest.skip(f"the kernel gives no {wanted.name}")
    return wanted
