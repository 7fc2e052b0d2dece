"""Settings of a kvstore worker: what is refused, and how many blocks a limit holds."""

from __future__ import annotations

import pytest

from mooncake.base import ConfigError
from mooncake.kvstore.config import KvStoreConfig
from tests.support.kvstore.node_world import BLOCK, LAYOUT


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"dram_bytes": 0}, "dram_bytes"),
        ({"put_timeout_s": 0.0}, "put_timeout_s"),
        ({"report_interval_s": -1.0}, "report_interval_s"),
        ({"max_tickets_per_worker": 0}, "max_tickets_per_worker"),
        ({"quarantine_s": -0.1}, "quarantine_s"),
        ({"high_watermark": 1.1}, "high_watermark"),
        ({"evict_fraction": 0.0}, "evict_fraction"),
        ({"eviction": "fifo"}, "eviction: 'fifo' is not one of lru, lfu, length, cost"),
        ({"tenant_quota_bytes": {"a": -1}}, "tenant_quota_bytes: 'a'"),
    ],
)
def test_wrong_settings_are_named(settings, named: str) -> None:
    with pytest.raises(ConfigError, match=f"kvstore.{named}"):
        KvStoreConfig(**settings)


def test_the_arena_is_a_whole_number_of_blocks_within_the_limit() -> None:
    assert KvStoreConfig(dram_bytes=3 * BLOCK + BLOCK - 1).num_blocks(LAYOUT) == 3


def test_a_limit_below_one_block_says_so() -> None:
    with pytest.raises(ConfigError, match="dram_bytes: 63 B is less than one block"):
        KvStoreConfig(dram_bytes=BLOCK - 1).num_blocks(LAYOUT)
