"""The model of a process, through the lives of its workers: opened, kept or dropped while they
sleep, and opened again, perhaps from other files.

Owns the source of the model. The workers of one process share it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake.base import CheckpointError, KvLayout
from mooncake.base.cluster_mode import DROPPED
from mooncake.base.messages import CheckWeights

if TYPE_CHECKING:  # a worker without a model has no torch either
    from mooncake.launch.worker.settings import WorkerSettings
    from mooncake.model.checkpoint.files.signature import Signature
    from mooncake.model.opening import ModelSource


class NoFiles(CheckpointError):
    """This machine has no files of the weights, and reads them from engines."""


class HeldModel:
    """Gives workers the source of their model. Threads may share it."""

    def __init__(
        self,
        open_source: Callable[[str, str], ModelSource],
        read: Callable[[CheckWeights], tuple[Signature, str]],
    ) -> None:
        """`open_source` opens the checkpoint in a directory, whose weights have this revision.
        `read` returns what `opening.read_weights` does of the weights that a question names.
        """
        self._open = open_source
        self._read = read
        self._lock = threading.Lock()
        self._source: ModelSource | None = None
        self._opened = ("", "")
        """The directory and the revision of the source."""
        self._served: Signature | None = None

    def use(self, settings: WorkerSettings) -> ModelSource:
        """Return the source of the weights that a worker's settings name. An older one is closed
        first, so that never both are in memory.

        Raises:
            CheckpointError: they cannot be read.
        """
        wanted = (settings.model, settings.weights_revision)
        with self._lock:
            if self._source is None or self._opened != wanted:
                self._drop()
                self._source, self._opened = self._open(*wanted), wanted
            return self._source

    def rest(self, level: int) -> int:
        """Free what a worker that sleeps at `level` does not keep; return the level at which it
        sleeps. A model of several ranks, or in a device's memory, cannot be kept.
        """
        with self._lock:
            source = self._source
            if source is None:
                return DROPPED
            self._served = self._served or source.signature
            if level < DROPPED and source.can_rest:
                return level
            self._drop()
            return DROPPED

    def check(self, question: CheckWeights, layout: KvLayout) -> tuple[str, str]:
        """Return the revision of the weights that a `question` names, and the fingerprint that
        `layout` has under them.

        Raises:
            NoFiles: they have to be read from another engine.
            MooncakeError: they cannot take the place of those that were served.
        """
        signature, revision = self._read(question)
        with self._lock:
            served = self._served
        assert served is not None, "only a worker that sleeps checks weights"
        signature.check_replaces(served, Path(question.model))
        spec = signature.spec
        named = KvLayout.for_model(
            spec,
            block_tokens=layout.block_tokens,
            dtype=layout.dtype,
            weights_revision=revision,
            with_mtp=layout.num_layers > spec.num_hidden_layers,
        )
        return revision, named.fingerprint

    def close(self) -> None:
        """End other ranks, if there are any."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
            del source
            gc.collect()  # what refers to itself would hold the weights
