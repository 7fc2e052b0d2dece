"""The HiCache backend with real pool nodes, and a stand-in of SGLang: two servers share prefixes,
go on when a node is killed, and find them again after a restart of the node with its disk.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.support.integrations.hicache import (
    BACKEND,
    Controller,
    HostMemory,
    StorageConfig,
    stand_in,
)
from tests.support.kvstore.forked_node import ForkedNode
from tests.support.kvstore.pool_process import SECRET, until
from tests.support.model.checkpoints import write_config_only

HASHES = [f"{n:064x}" for n in range(12)]
PLACES = range(12)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_config_only(tmp_path / "model", num_hidden_layers=2)


def server(urls: list[str], secret: Path) -> Controller:
    settings = {"pool_urls": urls, "cluster_secret_file": str(secret), "revision": "abc"}
    limits = {"lookup_timeout_s": 20.0, "load_timeout_s": 20.0}
    extra = {**BACKEND, "mooncake": {**settings, **limits}}
    config = StorageConfig(model_name="org/model", extra_config=extra)
    return Controller(config, HostMemory(num_pages=12, layer_num=8, head_dim=64))


def test_servers_share_prefixes_and_compute_what_the_pool_lost(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    disk = ["--ssd", f"{tmp_path / 'disk'}:64MiB", "--ssd-min-uses", "1", "--ssd-write-at", "0"]
    (tmp_path / "disk").mkdir()
    with stand_in():
        with ForkedNode(model, tmp_path / "log", "--dram", "16MiB", *disk) as node:
            one, other = server([node.url], secret), server([node.url], secret)
            for page in PLACES:
                one.memory.fill(page, page)
            assert one.backup(HASHES, PLACES) == 12
            assert other.prefetch(HASHES, PLACES) == 12
            assert torch.equal(other.memory.kv_buffer, one.memory.kv_buffer)
            assert other.prefetch(HASHES[::-1], PLACES) == 12, "each page stands for itself"
            assert torch.equal(other.memory.page(0), one.memory.page(11))
            with node.session() as session:
                until(
                    lambda: session.stat().num_ssd_stored == session.stat().load.num_cached_blocks,
                    "all blocks lie on the disk",
                )
            node.stop(signal.SIGKILL)
            assert one.prefetch(HASHES, PLACES) == 0
            assert one.backup(HASHES[:1], PLACES[:1]) == 0
        for each in (one, other):
            each.backend.close()
        with ForkedNode(model, tmp_path / "log2", "--dram", "16MiB", *disk) as node:
            third = server([node.url], secret)
            assert third.prefetch(HASHES, PLACES) == 12
            assert torch.equal(third.memory.kv_buffer, one.memory.kv_buffer)
            third.backend.close()
