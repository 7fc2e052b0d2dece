"""Settings of one kvstore worker: how much memory, when to evict, how long to wait. Frozen."""

from __future__ import annotations

import msgspec

from mooncake.base import ConfigError, KvLayout, format_bytes
from mooncake.kvstore.eviction import POLICIES

SHARES = {
    "ssd_write_at": True, "hard_pin_share": True, "high_watermark": False, "evict_fraction": False,
    "client_share": False, "client_quota_share": False, "kept_share": True,
    "tenant_kept_share": True,
}  # fmt: skip
"""Settings that are shares, and whether 0 makes sense."""


MAX_KEEP_S = 3600.0
"""A block is kept for so long at most after the last request that asks for it."""

MAX_PREFIX_BYTES = 256
"""The names of objects have 1,024 bytes at most, and the names of tenants are in them."""

LEAST_CLIENT_BLOCKS = 16
"""Blocks that one transfer of a client carries. A client's bounds are never smaller, however small
the pool.
"""


class SsdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One directory of the SSD tier. No other node uses it."""

    directory: str
    num_bytes: int
    """Byte limit of the files in it."""

    def __post_init__(self) -> None:
        if not self.directory or self.num_bytes <= 0:
            raise ConfigError(
                f"kvstore.ssd: {self.directory!r} with {self.num_bytes} bytes; name a directory "
                "and a size above 0"
            )


MAX_OBJECTS = 1 << 18
"""Blocks of a bucket that one node uses at most: it remembers where each is."""


class ObjectStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of an object store that speaks S3. Nodes of several clusters may share it."""

    bucket: str
    num_bytes: int
    """Bytes of the blocks that a node uses. Nothing is erased to keep to it."""
    prefix: str = ""
    """The names of all objects begin with it."""
    endpoint: str | None = None
    """URL of the server; None: what the settings of AWS say."""

    def __post_init__(self) -> None:
        if not self.bucket or self.num_bytes <= 0 or len(self.prefix.encode()) > MAX_PREFIX_BYTES:
            raise ConfigError(
                f"kvstore.object_store: {self.num_bytes} bytes in {self.bucket!r}, "
                f"{self.prefix!r}: give a bucket, a size above 0, and a prefix of "
                f"{MAX_PREFIX_BYTES} bytes at most"
            )


class KvStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in bytes, times in seconds. Raises ConfigError, which names the wrong key."""

    dram_bytes: int = 1 << 30
    """Byte limit of the DRAM tier; the arena is the largest whole number of blocks within it."""
    eviction: str = "lru"
    """Name of the policy, see `kvstore.eviction`."""
    high_watermark: float = 0.95
    """Share of the blocks in use above which blocks are evicted ahead of need."""
    evict_fraction: float = 0.05
    """Share of all blocks that such an eviction goes below the watermark."""
    quarantine_s: float = 30.0
    """Memory granted to a lost writer is not reused before this time. A writer that is cut off but
    alive may go on writing until its transfers time out.
    """
    put_timeout_s: float = 60.0
    """A grant that is open for longer, while its writer lives, counts as overdue. A pool client
    loses it: what it writes later is refused.
    """
    report_interval_s: float = 0.25
    """Seconds between two heartbeats with load reports."""
    doubt_interval_s: float = 5.0
    """How often the gateway is asked about workers that have held something for this long. What a
    lost worker held is reclaimed even if the message of its loss was lost.
    """
    max_tickets_per_worker: int = 4_096
    """Puts and pins that one worker may have open; further ones are granted nothing."""
    max_tickets_per_client: int = 1_024
    """The same limit for all pool clients together that share a credential."""
    max_keys_per_client: int = 1 << 18
    """Blocks that these puts and pins may name in all, with those before them: 16 million tokens.
    The node remembers each name until the put or pin ends."""
    client_share: float = 0.5
    """Share of the DRAM blocks that these clients may hold by puts and pins."""
    client_quota_share: float = 0.5
    """Share of the DRAM blocks, and of the SSD blocks, that the pool clients of one tenant may
    store when the tenant has no quota of its own."""
    checksums: bool = True
    """Hash every block once it is complete, so that its readers and disks can detect damage."""
    ssd: list[SsdConfig] = []
    """Directories of the SSD tier. Each should be on its own disk."""
    ssd_min_uses: int = 2
    """Blocks asked for this often are written to SSD (the request that wrote them counts); 1: all
    blocks.
    """
    ssd_write_at: float = 0.7
    """Share of the DRAM blocks in use above which blocks are written to SSD; 0: at once."""
    ssd_eviction: str = "lru"
    """Name of the policy of the SSD tier."""
    ssd_load_timeout_s: float = 2.0
    """A reader is answered after this time with what has been loaded by then."""
    ssd_retry_s: float = 10.0
    """A disk that failed or was full gets no writes for this long."""
    ssd_queue_bytes: int = 256 << 20
    """Bytes that may be written to disks at a time, and as many that may be read."""
    ssd_threads: int = 4
    """Operations under way at once on each disk."""
    object_store: ObjectStoreConfig | None = None
    """The tier below SSD; None: there is none. What is said of disks holds for it too, except that
    blocks are written to it at once.
    """
    object_min_uses: int = 2
    """Blocks asked for this often are written to it; 1: all blocks."""
    object_list_s: float = 300.0
    """Seconds between two listings, which show the blocks that other clusters have written."""
    object_threads: int = 8
    """Operations under way at once on it."""
    replicate_timeout_s: float = 10.0
    """The copy of another node's blocks is given up if it has not come by then."""
    replica_idle_s: float = 300.0
    """Copies that were not read for this long are dropped."""
    drain_s: float = 30.0
    """How long a draining node may copy the blocks that only it holds to other nodes."""
    drain_queue_bytes: int = 64 << 20
    """Bytes of such blocks that may be under way."""
    drain_bytes_per_s: int = 1 << 30
    """The largest rate of a drain's copies, because others use the network too."""
    hard_pin_share: float = 0.5
    """Share of the DRAM blocks that may have hard pins; the rest remains a cache."""
    kept_share: float = 0.25
    """Share of the DRAM blocks that may be kept for requests that ask for it (`cache_control`,
    `prompt_cache_key`, `session_id`); 0: nothing is kept.
    """
    tenant_kept_share: float = 0.125
    """The same for any one tenant. A tenant with a quota may keep half of it at most."""
    tenant_quota_bytes: dict[str, int] = {}
    """Most bytes of DRAM that a tenant may hold. A tenant at its quota evicts its own blocks.
    Tenants that are not named have no quota.
    """
    tenant_ssd_quota_bytes: dict[str, int] = {}
    """The same for all disks together."""

    def __post_init__(self) -> None:
        for name in (
            "dram_bytes", "put_timeout_s", "report_interval_s", "doubt_interval_s",
            "max_tickets_per_worker", "max_tickets_per_client", "max_keys_per_client",
            "ssd_min_uses", "ssd_load_timeout_s", "ssd_queue_bytes", "ssd_threads",
            "object_min_uses", "object_list_s", "object_threads",
            "replicate_timeout_s", "replica_idle_s", "drain_queue_bytes", "drain_bytes_per_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ConfigError(f"kvstore.{name}: {getattr(self, name)} is not above 0")
        for name in ("quarantine_s", "ssd_retry_s", "drain_s"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"kvstore.{name}: {getattr(self, name)} is negative; give 0 or more"
                )
        for name, may_be_0 in SHARES.items():
            share = getattr(self, name)
            if not 0 <= share <= 1 or (share == 0 and not may_be_0):
                where = "[0, 1]" if may_be_0 else "(0, 1]"
                raise ConfigError(f"kvstore.{name}: {share} is not a share in {where}")
        directories = [ssd.directory for ssd in self.ssd]
        if len(set(directories)) < len(directories):
            raise ConfigError(f"kvstore.ssd: a directory is named twice: {', '.join(directories)}")
        for name in ("eviction", "ssd_eviction"):
            if getattr(self, name) not in POLICIES:
                raise ConfigError(
                    f"kvstore.{name}: {getattr(self, name)!r} is not one of {', '.join(POLICIES)}"
                )
        for name in ("tenant_quota_bytes", "tenant_ssd_quota_bytes"):
            for tenant, quota in getattr(self, name).items():
                if quota < 0:
                    raise ConfigError(
                        f"kvstore.{name}: {tenant!r} has the negative quota {quota}; give 0 or "
                        "more bytes"
                    )

    def client_blocks(self, num_blocks: int) -> int:
        """Return how many of the DRAM blocks one credential of clients may hold at once."""
        return max(LEAST_CLIENT_BLOCKS, int(num_blocks * self.client_share))

    def client_quota(self, num_blocks: int) -> int:
        """Return how many blocks of a tier the clients of a tenant without a quota may store."""
        return max(LEAST_CLIENT_BLOCKS, int(num_blocks * self.client_quota_share))

    def num_blocks(self, layout: KvLayout) -> int:
        """Return how many blocks fit into `dram_bytes`. Raises ConfigError when none does."""
        num_blocks = self.dram_bytes // layout.block_bytes
        if num_blocks == 0:
            raise ConfigError(
                f"kvstore.dram_bytes: {format_bytes(self.dram_bytes)} is less than one block of "
                f"this model ({format_bytes(layout.block_bytes)}); give more"
            )
        return num_blocks
