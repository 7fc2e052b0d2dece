"""Nothing that prints settings prints the cluster secret: not repr, not rich, not a log line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.pretty import pretty_repr

from mooncake.base import KvLayout, Role
from mooncake.engine.config import EngineConfig
from mooncake.kvstore.config import KvStoreConfig
from mooncake.launch.pool_client.session import PoolSessionConfig
from mooncake.launch.worker.process import WorkerSettings
from mooncake.model.options import ModelOptions

LAYOUT = KvLayout(num_layers=1, block_tokens=4, kv_width=8, dtype="float32", fingerprint="f")
ENGINE = EngineConfig(
    num_blocks=4, max_num_seqs=1, max_batched_tokens=4, max_chunk_tokens=4, max_model_len=4,
    max_waiting=1,
)  # fmt: skip
SETTINGS = (
    WorkerSettings(
        role=Role.DECODE, worker_id="decode-0", node_id="n", host="h", bind_host="127.0.0.1",
        gateway_address="tcp://127.0.0.1:1", cluster_secret="hush", transfer_protocols=["tcp"],
        model=str(Path("m")), dtype="float32", weights_revision="r", layout=LAYOUT,
        engine=ENGINE, kvstore=KvStoreConfig(), num_threads=1,
        self_profile=False, log_level="info", log_format="text", options=ModelOptions(),
    ),
    PoolSessionConfig(gateway_address="tcp://127.0.0.1:1", cluster_secret="hush", layout=LAYOUT),
)  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: type(settings).__name__)
def test_the_secret_is_not_shown(settings: object) -> None:
    for shown in (repr(settings), str(settings), pretty_repr(settings), pretty_repr([settings])):
        assert "hush" not in shown
        assert type(settings).__name__ in shown
