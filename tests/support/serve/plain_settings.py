"""Settings of a worker that is never started."""

from __future__ import annotations

from typing import Any

import msgspec

from mooncake.base import KvLayout, Role
from mooncake.engine.config import EngineConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.model.options import ModelOptions

LAYOUT = KvLayout(num_layers=1, block_tokens=4, kv_width=8, dtype="float32", fingerprint="f")
_ENGINE = EngineConfig(
    num_blocks=4, max_num_seqs=1, max_batched_tokens=4, max_chunk_tokens=4, max_model_len=4,
    max_waiting=1,
)  # fmt: skip
_SETTINGS = WorkerSettings(
    role=Role.DECODE, worker_id="decode-0", node_id="n", host="h", bind_host="127.0.0.1",
    gateway_address="tcp://127.0.0.1:1", cluster_secret="", transfer_protocols=["tcp"], model="m",
    dtype="float32", weights_revision="r", layout=LAYOUT, engine=_ENGINE, kvstore=KvStoreConfig(),
    self_profile=False, log_level="info", log_format="text", options=ModelOptions(),
)  # fmt: skip


def worker_settings(**changes: Any) -> WorkerSettings:
    """Return settings of a decode worker with `changes`."""
    return msgspec.structs.replace(_SETTINGS, **changes)
