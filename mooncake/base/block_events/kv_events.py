"""Block events for routers outside the cluster, and where to publish them. The names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from mooncake.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    """The content of `--kv-events-config`; the keys have vLLM's names.

    Raises:
        ConfigError: a value is out of range; the message names the key.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    """The address of the events. Whoever connects can read the tokens of prompts and answers."""
    replay_endpoint: str | None = None
    """The address at which routers ask for missed batches; None: there is none."""
    buffer_steps: int = 10_000
    """How many batches are kept for replays."""
    topic: str = ""

    def __post_init__(self) -> None:
        if self.publisher != "zmq":
            raise ConfigError(
                f"publisher: {self.publisher!r} is not known; write zmq, or leave it out"
            )
        if not isinstance(self.buffer_steps, int) or self.buffer_steps < 1:
            raise ConfigError(
                f"buffer_steps: {self.buffer_steps!r} is not a whole number of at least 1"
            )
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not str(value).startswith(("tcp://", "ipc://")):
                raise ConfigError(f"{name}: {value!r} does not begin with tcp:// or ipc://")


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A chain of blocks that can be reused from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The hash of the block before the first; None: there is none."""
    token_ids: list[int]
    """The tokens of all blocks, `block_size` each."""
    block_size: int
    medium: str
    """GPU (an engine's memory), CPU, STORAGE or OBJECT (a pool node's memory, SSD or bucket)."""
    lora_id: None = None
    lora_name: None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Blocks that no memory of this medium in the cluster holds any more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No block that was published before can be reused any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
