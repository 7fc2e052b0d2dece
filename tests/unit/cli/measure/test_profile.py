"""`mooncake profile`: steps that fit an engine, a fit held against steps it has not seen."""

import json
from pathlib import Path

import pytest

from mooncake.base import ConfigError, CostSample, Role
from mooncake.cli.main import run
from mooncake.engine.config import EngineConfig
from mooncake.launch.worker.profile import ROLES, fit, shapes_within


def samples(noise: float = 0.0) -> list[CostSample]:
    return [
        CostSample(new, before, 1, 0.002 + 1e-4 * new + 1e-8 * new * before + noise * (new == 64))
        for new in (16, 64, 256, 1024)
        for before in (0, 512, 4096)
    ]


def test_steps_fit_the_engine() -> None:
    config = EngineConfig(
        block_tokens=64,
        num_blocks=40,
        max_model_len=2048,
        max_num_seqs=8,
        max_batched_tokens=512,
        max_chunk_tokens=512,
        max_waiting=8,
    )
    for role in ROLES:
        found = shapes_within(role, config)
        assert found
        for sequences, new, before in found:
            assert sequences <= 8
            assert sequences * new <= 512
            assert sequences * -(-(new + before) // 64) <= 40
    assert (1, 512, 512) in shapes_within(Role.PREFILL, config)
    assert (8, 1, 64) in shapes_within(Role.DECODE, config)


def test_the_error_is_of_samples_left_out() -> None:
    exact = fit(samples())
    assert max(exact.errors) < 0.02
    assert exact.coefficients[1] == pytest.approx(1e-4, rel=0.05)
    odd = fit(samples(noise=0.05))
    assert max(odd.errors) > 0.3
    with pytest.raises(ConfigError, match="only 3 kinds of steps"):
        fit(samples()[:3])


def test_a_checkpoint_is_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = str(tmp_path / "model"), tmp_path / "profile.json"
    assert run(["model", "init", "--preset", "k2-nano", "--out", model]) == 0
    limits = ["--max-model-len", "640", "--max-num-batched-tokens", "128", "--max-num-seqs", "4"]
    assert run(["profile", model, *limits, "--repeats", "1", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "prefill steps of" in shown
    assert "error of a step left out of the fit" in shown
    document = json.loads(out.read_text())
    assert len(document["decode"]["coefficients"]) == 5
    assert all(sample["seconds"] > 0 for sample in document["prefill"]["samples"])
    assert run(["profile", model, "--out", str(tmp_path / "nowhere" / "x.json")]) == 2
    assert "its directory does not exist" in capsys.readouterr().err
