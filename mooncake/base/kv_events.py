"""Block events for routers outside the cluster, in vLLM's words, and where to publish them."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mooncake.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    """What `--kv-events-config` says, by vLLM's names.

    Raises:
        ConfigError: a value is out of range; the key is named.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    """The address of the events. Whoever connects reads the tokens of prompts and answers."""
    replay_endpoint: str | None = None
    """Where missed batches can be asked for; None: nowhere."""
    buffer_steps: int = 10_000
    """Batches kept for replays."""
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher != "zmq":
            raise ConfigError(f"publisher: {self.publisher!r} is not zmq")
        if not isinstance(self.buffer_steps, int) or self.buffer_steps < 1:
            raise ConfigError(f"buffer_steps: {self.buffer_steps!r} is not a number above 0")
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not str(value).startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name}: {value!r} does not begin with tcp:// or ipc://")


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A chain of blocks that can be reused from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Names the block before the first; None: there is none."""
    token_ids: list[int]
    """The tokens of all blocks, `block_size` each."""
    block_size: int
    medium: str
    """GPU (an engine's memory), CPU (a pool node's) or STORAGE (its SSD)."""
    lora_id: None = None
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that are in no such memory of the cluster any more."""

    block_hashes: list[int]
    medium: str


KvEvent = BlockStored | BlockRemoved
