"""The layer that drafts for a model: an EAGLE-3 head, or the checkpoint's MTP layer. Every rank of
an engine opens its own, and all compute it in the same way.
"""

from __future__ import annotations

from pathlib import Path

from mooncake.model.backends import Backends
from mooncake.model.checkpoint.eagle3 import Eagle3Files
from mooncake.model.copies import Copies
from mooncake.model.drafts.eagle3 import Eagle3Head, Eagle3Rows
from mooncake.model.drafts.model_drafts import DraftLayer
from mooncake.model.drafts.mtp import MtpRows
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors


def load_head(path: str | None, model: KimiK2, backends: Backends) -> Eagle3Head | None:
    """Return the EAGLE-3 head in the directory `path`; None: there is none, or ranks of a later
    stage have it.

    Raises:
        CheckpointError: it is not complete, or the head of another model.
    """
    if path is None or not model.stage.is_last:
        return None
    return Eagle3Head(Eagle3Files.open(Path(path), model.spec), model, backends)


def draft_layer(
    model: KimiK2, head: Eagle3Head | None, kv: KvTensors, num_sequences: int, copies: Copies
) -> DraftLayer | None:
    """Return the layer that drafts over these pages, if this rank has one.

    num_sequences: the most sequences whose KV a head keeps; 0: the head is not used.
    """
    if head is not None and num_sequences:
        return Eagle3Rows(head, num_sequences, copies)
    return None if model.mtp is None else MtpRows(model, kv, copies)
