"""Why blocks of a prompt are not reused: what placement knew of each, compared with what was.

Pure. Only keys of the request's own chain are asked for, which begin with its tenant and salt: so
the reasons say nothing about what others cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mooncake.base.request import CacheHits, CacheMisses, CacheUse


@dataclass(frozen=True, slots=True)
class PrefixEnds:
    """Where, along the blocks of a prompt, each thing that a placement knew of them ends; each
    stretch begins where the one before ends, and nothing is known of what follows the last.
    """

    planned: int
    """Blocks that it counted on."""
    fetchable: int
    """Then blocks that pools hold."""
    held: int
    """Then blocks that any worker holds."""
    removed: int
    """Then blocks up to the last that was removed lately; no worker holds the first of them."""

    def use(
        self, num_tokens: int, block_tokens: int, num_cached_tokens: int, fetched: CacheHits | None
    ) -> CacheUse:
        """Return what became of a prompt of `num_tokens`, in tokens, when its worker reused so many
        of them, `fetched` blocks among these.
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
