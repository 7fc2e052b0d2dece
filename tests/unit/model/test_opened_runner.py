"""What a runner is given by `ModelSource`: kernels draw and penalize wherever they attend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mooncake_kernels.dispatch import TRITON, kernel

from mooncake.base import KvLayout
from mooncake.engine.config import EAGLE3, EngineConfig, SpeculativeConfig
from mooncake.model import opening
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.sampler import PLAIN_OPS, Sampler, SamplingOps
from mooncake.model.memory import GpuMemory
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.model.eagle3_heads import config_of, random_tensors, write_head
from tests.support.waiting import LONG_S


@pytest.mark.parametrize("backend", ["auto", TRITON])
def test_tokens_are_drawn_and_penalized_where_the_model_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    given: dict[str, Any] = {}

    def noted(vocab_size: int, *args: Any, **options: Any) -> Sampler:
        given.update(options)
        return Sampler(vocab_size, *args, **options)

    monkeypatch.setattr(opening, "Sampler", noted)
    path = init_checkpoint("k2-nano", 0, tmp_path / "nano", dtype="float32")
    options = ModelOptions(attention_backend=backend, moe_backend=backend)
    source = opening.ModelSource(path, "float32", options)
    layout = KvLayout.for_model(
        Checkpoint.open(path).spec, block_tokens=16, dtype="float32", weights_revision="none"
    )
    config = EngineConfig(
        num_blocks=2, max_num_seqs=1, max_batched_tokens=16, max_chunk_tokens=16,
        max_model_len=32, max_waiting=1, block_tokens=16,
    )  # fmt: skip
    pages = memoryview(bytearray(2 * layout.block_bytes))
    source.runner(layout, config, pages, num_threads=None).close()
    on_triton = SamplingOps(kernel("draw", TRITON), kernel("penalize", TRITON), waits=False)
    assert given["ops"] == (on_triton if backend == TRITON else PLAIN_OPS)


def test_a_source_that_is_closed_leaves_no_thread(tmp_path: Path) -> None:
    path = init_checkpoint("k2-nano", 0, tmp_path / "nano", dtype="float32")
    before = set(threading.enumerate())
    source = opening.ModelSource(path, "float32")
    made = set(threading.enumerate()) - before
    assert made
    source.close()
    for thread in made:
        thread.join(LONG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("at_start", [True, False])
def test_a_head_that_drafts_later_is_loaded_when_an_engine_drafts(
    tmp_path: Path, at_start: bool
) -> None:
    """A prefill worker never drafts, unless it changes its role."""
    path = init_checkpoint("k2-nano", 0, tmp_path / "nano", dtype="float32")
    spec = Checkpoint.open(path).spec
    head = config_of(spec)
    options = ModelOptions(
        draft_model=str(write_head(tmp_path / "head", head, random_tensors(head, spec))),
        head_at_start=at_start,
    )
    source = opening.ModelSource(path, "float32", options)
    layout = KvLayout.for_model(spec, block_tokens=16, dtype="float32", weights_revision="none")
    config = EngineConfig(
        num_blocks=2, max_num_seqs=1, max_batched_tokens=16, max_chunk_tokens=16,
        max_model_len=32, max_waiting=1, block_tokens=16,
    )  # fmt: skip
    speculation = SpeculativeConfig(method=EAGLE3, num_speculative_tokens=1, model="head")
    drafting = replace(config, speculation=speculation)
    pages = memoryview(bytearray(2 * layout.block_bytes))
    source.runner(layout, config, pages, num_threads=None).close()
    assert (source._head is not None) == at_start
    runner = source.runner(layout, drafting, pages, num_threads=None)
    assert runner._drafts is not None
    runner.close()


@pytest.mark.parametrize("measured", [False, True])
def test_a_gpu_runs_steps_of_all_sizes_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """Also where pages are of a given number: else the first requests wait for compilers."""
    ran: list[tuple[int, ...]] = []

    class Meter:
        def measure(self, step: Callable[[], None]) -> GpuMemory:
            step()
            return GpuMemory(total_bytes=10**9, resident_bytes=0, step_bytes=10**6)

    forward, try_out = KimiK2.forward, Sampler.try_out
    monkeypatch.setattr(RankDevice, "open_meter", lambda _: Meter())
    monkeypatch.setattr(
        KimiK2, "forward",
        lambda model, inputs, *more, **named: (
            ran.append(tuple(inputs.tokens.shape)), forward(model, inputs, *more, **named)
        )[1],
    )  # fmt: skip
    sampled: list[int] = []
    monkeypatch.setattr(
        Sampler, "try_out", lambda self, x: (sampled.append(len(x)), try_out(self, x))[1]
    )
    path = init_checkpoint("k2-nano", 0, tmp_path / "nano", dtype="float32")
    source = opening.ModelSource(path, "float32", ModelOptions(measure_pages=measured))
    layout = KvLayout.for_model(
        Checkpoint.open(path).spec, block_tokens=16, dtype="float32", weights_revision="none"
    )
    config = EngineConfig(
        num_blocks=77, max_num_seqs=4, max_batched_tokens=16, max_chunk_tokens=16,
        max_model_len=32, max_waiting=1, block_tokens=16,
    )  # fmt: skip
    found = source.num_pages(layout, config)
    assert found > 77 if measured else found == 77
    assert {(1,), (2,), (4,), (8,), (16,)} <= set(ran)
    assert len(sampled) == len(ran)
    assert max(sampled) == 4
