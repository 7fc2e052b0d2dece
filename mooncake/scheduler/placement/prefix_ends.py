"""Explains why blocks of a prompt are not reused: it compares what placement knew about each with
what happened.

Pure. Only keys of the request's own chain are looked up. They depend on its tenant and salt, so the
reasons reveal nothing about what others cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mooncake.base.request import CacheHits, CacheMisses, CacheUse


@dataclass(frozen=True, slots=True)
class PrefixEnds:
    """Positions along the blocks of a prompt. Each field says where one stretch ends; it begins
    where the one before ends. Nothing is known about the blocks after the last.
    """

    planned: int
    """The placement counted on the blocks before this position."""
    fetchable: int
    """Pools hold the blocks from `planned` to here."""
    held: int
    """Workers hold the blocks from `fetchable` to here."""
    removed: int
    """The last block before here was removed lately. No worker holds the block at `held`."""

    def use(
        self, num_tokens: int, block_tokens: int, num_cached_tokens: int, fetched: CacheHits | None
    ) -> CacheUse:
        """Return what became of a prompt of `num_tokens`, in tokens, when its worker reused this
        many of them, including `fetched` blocks.
        """
        stop = (num_tokens - 1) // block_tokens
        have = min(num_cached_tokens // block_tokens, stop)
        hits = msgspec.structs.asdict(fetched or CacheHits())
        left = have
        for tier in hits:  # never more than were reused, whatever the worker says
            hits[tier] = min(hits[tier], left)
            left -= hits[tier]
        hits["hbm"] += left
        misses = dict.fromkeys(CacheMisses.__struct_fields__, 0)
        for reason, end in (
            ("fetch_failed", self.planned),
            ("recomputed", self.fetchable),
            ("out_of_reach", self.held),
            ("evicted", self.removed),
            ("not_seen", stop),
        ):
            misses[reason] = max(0, min(end, stop) - have)
            have += misses[reason]
        return CacheUse(
            hits=CacheHits(**{name: number * block_tokens for name, number in hits.items()}),
            misses=CacheMisses(**{name: n * block_tokens for name, n in misses.items()}),
        )
