"""A pool of blocks in memory in place of a session with pool nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mooncake.base import Tier
from mooncake.integrations import pool_link
from mooncake.launch.pool_client.session import PoolSessionConfig
from tests.support.kvstore.node_world import LAYOUT


class Pool:
    """Blocks of a pool, and how it fails."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.error: Exception | None = None
        self.max_blocks = 10_000
        self.num_sessions = 0


class Session:
    """What the backend uses of `PoolSession`."""

    pool: Pool

    def __init__(self, config: PoolSessionConfig) -> None:
        self.block_bytes = config.layout.block_bytes
        self.memory = memoryview(bytearray(b"\xee" * config.num_places * self.block_bytes))
        self.pool.num_sessions += 1

    def _fail(self) -> None:
        if self.pool.error is not None:
            raise self.pool.error

    def match(self, keys: Sequence[bytes]) -> int:
        self._fail()
        return next((n for n, key in enumerate(keys) if key not in self.pool.blocks), len(keys))

    def exists(self, keys: Sequence[bytes]) -> list[Tier | None]:
        self._fail()
        return [Tier.DRAM if key in self.pool.blocks else None for key in keys]

    def get_into(self, keys: Sequence[bytes], offsets: Sequence[int]) -> int:
        count = self.match(keys)
        for key, at in zip(keys[:count], offsets, strict=False):
            self.memory[at : at + self.block_bytes] = self.pool.blocks[key]
        return count

    def put_from(self, keys: Sequence[bytes], offsets: Sequence[int], tenant: str) -> list[bytes]:
        self._fail()
        assert tenant == "acme"
        written = []
        for key, at in zip(keys, offsets, strict=True):
            content = bytes(self.memory[at : at + self.block_bytes])
            if key in self.pool.blocks:
                assert self.pool.blocks[key] == content, "equal keys mean equal bytes"
            elif len(self.pool.blocks) < self.pool.max_blocks:
                self.pool.blocks[key] = content
                written.append(key)
        return written

    def close(self) -> None:
        pass


def in_memory(monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Have integrations use a new pool in memory, and return it."""
    found = Session.pool = Pool()
    config = PoolSessionConfig(gateway_address="-", cluster_secret="-", layout=LAYOUT)
    monkeypatch.setattr(pool_link, "locate", lambda *_, **__: config)
    monkeypatch.setattr(pool_link, "PoolSession", Session)
    monkeypatch.setattr(pool_link, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(pool_link, "read_secret", lambda _: "a secret")
    return found
