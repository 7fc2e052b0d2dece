"""Every kernel, with Kimi-K2's shapes, through Triton's compiler and ptxas for an H200.

The interpreter runs the source but not the compiled branches; this is what checks those, and that
a kernel fits a multiprocessor. Speed is measured on a GPU only. A kernel whose first intermediate
form is the one that the kept numbers were made from is not compiled to the end again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernels import hopper_table
from tests.support.kernels.hopper_compiler import HOPPER_SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_WGMMA = ("decode, 8 heads", "32 heads", "16 rows", "layer ops", "router", "float32")
"""Launches that need not, or cannot, fill wgmma's 64 rows, and products it cannot do exactly."""
MAY_SPILL = ("decode, 64 heads, whole pages", "float32")
"""What runs only where it is asked for: to be measured, and exact products for comparisons."""
MEASURED_SPILLING = {"gate_up_fp8_kernel", "down_fp8_kernel"}
"""Served in the form that an H200 has run, in which they spill."""


pytestmark = pytest.mark.timeout(1800)
"""Minutes of one core, which other tests may be using too, after a change of every kernel."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.kernels.hopper_launches",
         "--changed"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def launches(compiled: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = compiled["kernels"]
    return found


@pytest.mark.slow
def test_the_kept_numbers_are_what_compiles(compiled: dict[str, Any]) -> None:
    kept = hopper_table.kept()
    if compiled["triton"] != kept["triton"]:
        pytest.skip(f"made with Triton {kept['triton']}, this is {compiled['triton']}")
    assert compiled["kernels"] == kept["kernels"], (
        "python -m tests.support.kernels.hopper_launches --write"
    )


def test_the_readme_shows_the_kept_numbers() -> None:
    shown = hopper_table.README.read_text(encoding="utf-8").splitlines()
    assert [line for line in hopper_table.table(hopper_table.kept()) if line not in shown] == []


@pytest.mark.slow
def test_every_kernel_fits_a_multiprocessor(launches: list[dict[str, Any]]) -> None:
    assert len({made["kernel"] for made in launches}) >= 18
    large = [made for made in launches if made["shared_bytes"] > HOPPER_SHARED_BYTES]
    assert large == []


@pytest.mark.slow
def test_products_run_on_wgmma(launches: list[dict[str, Any]]) -> None:
    products = {
        "_attend", "attend_warpgroups", "_prefill", "gate_up_kernel", "gate_up_ranges_kernel",
        "gate_up_fp8_kernel", "down_kernel", "down_fp8_kernel",
    }  # fmt: skip
    missing = [
        made
        for made in launches
        if made["kernel"] in products
        and not made["wgmma"]
        and not any(mark in made["launch"] for mark in WITHOUT_WGMMA)
    ]
    assert missing == []
    assert [made["wgmma"] for made in launches if made["kernel"] == "_linear"] == [True, True]


@pytest.mark.slow
def test_registers_suffice(launches: list[dict[str, Any]]) -> None:
    served = [made for made in launches if not any(mark in made["launch"] for mark in MAY_SPILL)]
    assert {made["kernel"] for made in served} == {made["kernel"] for made in launches}
    assert {made["kernel"] for made in served if made["stack_bytes"]} == MEASURED_SPILLING
