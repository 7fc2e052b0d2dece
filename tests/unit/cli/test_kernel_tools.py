"""`serve --check`, `tune` and `model convert` as words on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mooncake_kernels import checks, dispatch

from mooncake.cli.main import run
from mooncake.model.checkpoint.quant_format import Fp8Block
from mooncake.model.checkpoint.weights import Checkpoint


def test_check_prints_every_op(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--check"]) == 0
    shown = capsys.readouterr().out
    assert [op for op in dispatch.ops() if op not in shown] == []
    assert "DIFFERS" not in shown


def test_check_fails_where_a_kernel_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = dispatch.kernel

    def fake(op: str, backend: str = "reference") -> Any:
        right = whole(op, backend)
        return (lambda *args: right(*args) * 1.5) if backend == "triton" else right

    monkeypatch.setattr(checks, "kernel", fake)
    monkeypatch.setattr(checks, "ops", lambda: ["rms_norm"])
    assert run(["serve", "--check"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "--split", "tp3"], "split: 'tp3' is not one of tp8, tp16, ep16"),
        (["tune", "--format", "int3"], "format: 'int3' is not one of plain, fp8, int4"),
    ],
)
def test_tune_says_what_it_knows(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_tune_wants_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune"]) == 2
    assert "CUDA GPU" in capsys.readouterr().err


def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = str(tmp_path / "plain"), str(tmp_path / "fp8")
    assert run(["model", "init", "--preset", "k2-nano", "--out", plain]) == 0
    assert run(["model", "convert", plain, "--to", "fp8", "--out", out]) == 0
    assert isinstance(Checkpoint.open(Path(out)).quantization, Fp8Block)
    assert f"mooncake serve {out}" in capsys.readouterr().err.replace("\n", "")
    assert run(["model", "convert", out, "--to", "int4", "--out", str(tmp_path / "no")]) == 2
    assert "quantized already" in capsys.readouterr().err.replace("\n", " ")
