"""From a checkpoint directory to runners, in words without tensors: what a launcher calls.

Owns the loaded model; several runners of one process share its weights, each has its own pages.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from mooncake.base import CheckpointError, KvLayout
from mooncake.model.grammar import Grammars
from mooncake.model.grammar_tokens import load_grammar_tokens
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.runner import ModelRunner
from mooncake.model.weights import SPEC_DTYPES, Checkpoint


class ModelSource:
    """A checkpoint on disk and, once it was asked for, the model in memory."""

    def __init__(self, path: Path, dtype: str) -> None:
        """Open the checkpoint; reads headers only.

        Raises:
            CheckpointError: it cannot be read, or `dtype` is not one that can be computed in.
        """
        self._checkpoint = Checkpoint.open(path)
        if dtype not in SPEC_DTYPES:
            raise CheckpointError(f"dtype {dtype!r} is none of {', '.join(SPEC_DTYPES)}")
        self._dtype = SPEC_DTYPES[dtype]
        self._grammars = Grammars(
            self._checkpoint.spec.vocab_size, functools.partial(load_grammar_tokens, path)
        )
        self._lock = threading.Lock()
        self._model: KimiK2 | None = None

    @property
    def revision(self) -> str:
        """Names the weights; see `Checkpoint.revision`."""
        return self._checkpoint.revision

    def load(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the weights if they are not; `progress(done, total)` counts tensors.

        Raises:
            CheckpointError: a tensor is missing, unknown or of the wrong shape.
        """
        with self._lock:
            if self._model is None:
                self._model = load_model(
                    self._checkpoint,
                    dtype=self._dtype,
                    device=torch.device("cpu"),
                    progress=progress,
                )

    def runner(
        self, layout: KvLayout, num_pages: int, buffer: memoryview, num_threads: int | None
    ) -> ModelRunner:
        """Return a runner whose KV pages are `buffer`, loading the weights first if need be."""
        self.load()
        assert self._model is not None
        spec = self._checkpoint.spec
        return ModelRunner(
            self._model,
            KvTensors.view(layout, num_pages, buffer),
            Sampler(spec.vocab_size, self._model.device, self._grammars),
            num_threads=num_threads,
        )
