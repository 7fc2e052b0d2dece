"""The engine alone: what `mooncake bench throughput|latency` measures, on any backend."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from mooncake.base import ConfigError, InvalidRequest, SamplingParams
from mooncake.cli import main as cli
from mooncake.launch.host import environment
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from tests.support.model.tiny_models import random_tokens

ROOT = Path(__file__).resolve().parents[3]
ABSENT = "httptools,httpx,pydantic,pyverbs,ray,starlette,uvicorn,uvloop,zmq"
PROMPTS = [random_tokens(length, seed=length, vocab_size=512) for length in (3, 20)]
SETTINGS = {"max_model_len": 64, "block_size": 16, "num_gpu_blocks_override": 16, "num_threads": 1}
TRITON = {"attention_backend": "triton", "moe_backend": "triton"}
GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint(
        "k2-nano", 3, tmp_path_factory.mktemp("direct") / "plain", dtype="float32",
        overrides={"num_hidden_layers": 2},
    )  # fmt: skip


def tokens_of(
    path: Path,
    sampling: SamplingParams = GREEDY,
    prompts: list[list[int]] = PROMPTS,
    **given: object,
) -> list[list[int]]:
    with DirectEngine.open(str(path), **SETTINGS, **given) as engine:
        return engine.generate(prompts, [sampling] * len(prompts))


def test_tokens_depend_on_no_backend(plain: Path) -> None:
    wanted = tokens_of(plain)
    assert [len(tokens) for tokens in wanted] == [3, 3]
    assert tokens_of(plain, **TRITON) == wanted
    sampled = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=7, max_tokens=3)
    drawn = tokens_of(plain, sampled)
    assert drawn != wanted
    assert tokens_of(plain, sampled, **TRITON) == drawn


def test_a_closed_engine_keeps_no_memory(plain: Path) -> None:
    """At once: the next one measures what a GPU has left before anybody collects cycles."""
    gc.collect()
    gc.disable()
    try:
        with DirectEngine.open(str(plain), **SETTINGS) as engine:
            engine.generate(PROMPTS, [GREEDY] * len(PROMPTS))
            kept = [weakref.ref(engine._runner._forward), weakref.ref(engine._runner._model)]
        assert [ref() for ref in kept] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("backends", [TRITON, {}], ids=["triton", "compiled"])
def test_tokens_depend_on_no_neighbour(plain: Path, backends: dict[str, Any]) -> None:
    fixed = {**backends, "deterministic": True}
    assert tokens_of(plain, GREEDY, PROMPTS[1:], **fixed) == tokens_of(plain, **fixed)[1:]


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_quantized_checkpoints_run_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    from mooncake.model.backends import Backends

    whole = Backends.experts
    monkeypatch.setattr(
        Backends,
        "experts",
        lambda self, op, *stored: (made.append(op), whole(self, op, *stored))[1],
    )
    wide = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    init_checkpoint("k2-nano", 3, tmp_path / "plain", overrides=wide)
    path = convert_checkpoint(tmp_path / "plain", tmp_path / name, name)
    found = tokens_of(path, **TRITON, dtype="float32")
    assert made == [f"experts_{name}"]
    if name == "int4":  # of weights alone: the very tokens of the dequantized ones
        assert found == tokens_of(path, dtype="float32")
    assert [len(tokens) for tokens in found] == [3, 3]


def test_the_cache_in_fp8(plain: Path) -> None:
    wanted, found = tokens_of(plain), tokens_of(plain, kv_cache_dtype="fp8")
    assert tokens_of(plain, kv_cache_dtype="fp8", **TRITON) == found
    assert found[0][0] == wanted[0][0]


def test_more_prompts_than_may_wait(plain: Path) -> None:
    prompts = [PROMPTS[0]] * 9
    found = tokens_of(plain, GREEDY, prompts, max_num_seqs=2, max_waiting_requests=3)
    assert found == [found[0]] * 9


def test_what_does_not_fit_is_said(plain: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"62 \+ 3 tokens are more than max-model-len 64"):
        tokens_of(plain, GREEDY, [[1] * 62])
    with pytest.raises(ConfigError, match="deterministic needs"):
        tokens_of(plain, deterministic=True, moe_backend="reference")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve {} --gpu-memory-utilization 0", "gpu-memory-utilization: '0' is not a number"),
        ("serve {} --device tpu", "device: 'tpu' is not one of auto, cpu, cuda"),
        ("serve {} --device cuda", "device=cuda: this machine shows no NVIDIA GPU"),
        ("serve {} --moe-backend marlin", "moe-backend: 'marlin' is not one of auto, reference"),
        ("serve {} --attention-backend fused", "attention-backend: 'fused' is not one of auto"),
        ("serve {} --kv-cache-dtype fp4", "kv-cache-dtype: 'fp4' is not one of auto, fp8"),
        ("bench throughput --model {} --device cuda", "device=cuda: torch sees no CUDA GPU here"),
        ("bench latency --model {} --n 0", "number of prompts and answers must be at least 1"),
        ("bench latency --model {} --input-len 50000", "are more than max-model-len 32768"),
    ],
)
def test_mistakes_are_one_line(
    words: str, message: str, plain: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(environment, "restart_with", lambda environ: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("mooncake.launch.host.machine_facts.num_gpus", lambda: 0)
    assert cli.run(words.format(plain).split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert message in last
    assert last.startswith("mooncake: ")


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_bench_needs_neither_api_nor_cluster(kind: str, plain: Path, tmp_path: Path) -> None:
    """As on a machine with torch, Triton, msgspec and llguidance only."""
    words = ["--model", str(plain), "--input-len", "5", "--output-len", "3", "--disable-tqdm"]
    words += ["--max-model-len", "64", "--num-threads", "1", "--output-json", str(tmp_path / "j")]
    many = {
        "throughput": ["--num-prompts", "3"],
        "latency": ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1", "--n", "2"],
    }
    quiet = {**environment.QUIET, **environment.COMPUTE}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.without_packages", ABSENT, "bench", kind,
         *words, *many[kind]],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
        env={**os.environ, **quiet, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    saved = json.loads((tmp_path / "j").read_text())
    if kind == "throughput":
        assert (saved["num_requests"], saved["total_num_tokens"]) == (3, 24)
        assert "output tokens/s" in done.stdout
    else:
        assert len(saved["latencies"]) == 2
