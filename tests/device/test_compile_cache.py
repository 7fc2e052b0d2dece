"""A rank on a GPU asks the compile cache for kernels of that GPU's capability."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.cuda.install import Emulated, Real


def test_a_start_without_a_fitting_cache_says_what_it_lacks(
    gpu: Real | Emulated,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    del gpu
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0), raising=False)
    options = ModelOptions(device="cuda", compile_cache=str(tmp_path))
    RankDevice(options, torch.bfloat16).log_kernels()
    assert f"the compile cache {tmp_path} is not used: it has no sm_90-triton_" in caplog.text
    assert "were read from the compile cache" not in caplog.text


def test_a_start_without_the_setting_asks_for_none(
    gpu: Real | Emulated, caplog: pytest.LogCaptureFixture
) -> None:
    del gpu
    RankDevice(ModelOptions(device="cuda"), torch.bfloat16).log_kernels()
    assert "compile cache" not in caplog.text
