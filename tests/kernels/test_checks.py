"""The table of `serve --check`: every op in it, honest about what differs and what cannot run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mooncake_kernels import checks, dispatch
from mooncake_kernels.checks import CheckRow, check_kernels, difference
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.synthetic import Maker

from tests.support.kernels.gates import DEVICE


def test_every_op_has_a_case() -> None:
    assert sorted(checks.CASES) == dispatch.ops()


def test_every_backend_agrees_here() -> None:
    rows = list(check_kernels(DEVICE))
    wanted = [(op, b) for op in dispatch.ops() for b in dispatch.backends(op) if b != "reference"]
    assert [(row.op, row.backend) for row in rows] == wanted
    packs = onednn.supported(torch.empty(0, dtype=torch.bfloat16))
    lacking = set() if packs else {"needs a CPU with bfloat16"}
    assert [row for row in rows if not row.passed and row.note not in lacking] == []
    assert any(row.passed for row in rows)


def rows_of(monkeypatch: pytest.MonkeyPatch, op: str, fast: Any) -> list[CheckRow]:
    whole = dispatch.kernel

    def fake(name: str, backend: str = "reference") -> Any:
        return fast(whole(name)) if backend == "triton" else whole(name)

    monkeypatch.setattr(checks, "kernel", fake)
    monkeypatch.setattr(checks, "ops", lambda: [op])
    return [row for row in check_kernels(DEVICE) if row.backend == "triton"]


def test_a_wrong_kernel_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of(monkeypatch, "rms_norm", lambda right: lambda *args: right(*args) * 1.02)
    assert not row.passed
    assert row.difference is not None
    assert row.difference > row.gate


def test_a_kernel_that_breaks_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        def call(*args: Any) -> Any:
            raise RuntimeError("no such instruction")

        return call

    (row,) = rows_of(monkeypatch, "rms_norm", broken)
    assert not row.passed
    assert row.note == "RuntimeError: no such instruction"


@pytest.mark.parametrize("backend", ["native", "fixed"])
def test_code_for_cpus_is_not_given_memory_of_a_gpu(backend: str) -> None:
    assert backend in dispatch.backends("choose") + dispatch.backends("experts")
    assert checks._unusable(backend, torch.device("cuda")) == "computes on the CPU"


def test_synthetic_fp8_weights_are_numbers_however_many_there_are() -> None:
    values, factors, *_ = Maker(torch.device("cpu")).experts("fp8", 1, 2048, 4096)
    assert not values.float().isnan().any()
    assert factors.isfinite().all()


def test_a_missing_dependency_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    (row,) = rows_of(monkeypatch, "rms_norm", missing)
    assert row.note == "not installed: triton"
    assert not row.passed


def test_difference() -> None:
    x = torch.tensor([1.0, 2.0, float("-inf")])
    assert difference([x], [x]) == 0
    assert difference([torch.tensor([1.0, 2.0, 3.0])], [x]) == 1
    assert difference([torch.tensor([1, 2])], [torch.tensor([1, 3])]) == 0.5
    assert difference([torch.zeros(2)], [torch.zeros(2)]) == 0
    assert difference([-x[:2]], [x[:2]]) == 2
