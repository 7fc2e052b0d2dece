"""What became of the tokens of one prompt, as the scheduler tells it and as usage shows it."""

from __future__ import annotations

from mooncake.base.request import CacheHits, CacheMisses, CacheUse

USE = CacheUse(hits=CacheHits(hbm=128, peer=64), misses=CacheMisses(evicted=256))
NUM_CACHED_TOKENS = 192
SHOWN = {
    "hits": {"hbm": 128, "dram": 0, "ssd": 0, "object": 0, "peer": 64},
    "misses": {
        "not_seen": 0, "evicted": 256, "out_of_reach": 0, "recomputed": 0, "fetch_failed": 0,
    },
}  # fmt: skip
