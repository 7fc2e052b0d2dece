"""What a runner is given by `ModelSource`: kernels draw and penalize wherever they attend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mooncake_kernels.dispatch import REFERENCE, TRITON, kernel

from mooncake.base import KvLayout
from mooncake.engine.config import EngineConfig
from mooncake.model import opening
from mooncake.model.checkpoint.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.layers.sampler import Sampler
from mooncake.model.options import ModelOptions


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
    assert given["draw_tokens"] == (kernel("draw", TRITON) if backend == TRITON else None)
    wanted = TRITON if backend == TRITON else REFERENCE
    assert given["penalize"] == kernel("penalize", wanted)
