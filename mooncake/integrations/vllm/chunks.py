"""Maps vLLM's blocks to blocks of the pool, and makes their keys. Pure.

The pool has blocks of one size, whatever engines use it. A *chunk* is the smallest number of vLLM's
blocks that fills a pool block well: several small ones in one pool block, or one large one in
several, its *parts*. The keys of a prompt's chunks form a chain and are derived from its tokens.
The key of a part is derived from that key and from the engine's kind, so engines of two kinds never
share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b

import msgspec

from mooncake.base import BlockKey
from mooncake.base.blocks import KEY_BYTES, chain_root, extend_chain


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """Everything that the bytes of a rank's KV depend on, besides the tokens before them."""

    engine: str
    """Name and version of the engine: its kernels define the values."""
    weights: str
    """A name for the model's weights, equal only for equal bytes."""
    config: str
    """The model's configuration as it runs, overrides included."""
    dtype: str
    quantization: str
    kv_dtype: str
    pages: str
    """Names, shapes and types of the layers of one block."""
    attention: str
    """The attention kernels, which may pack a page in an order of their own."""
    tp_size: int
    pp_size: int
    rank: int

    @property
    def fingerprint(self) -> bytes:
        return blake2b(msgspec.json.encode(asdict(self)), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class RankKv:
    """The KV that a rank keeps. The scheduler needs it to ask for the rank's blocks."""

    fingerprint: bytes
    block_bytes: int
    """KV of one of vLLM's blocks, all layers of this rank."""


@dataclass(frozen=True)
class Packing:
    """How vLLM's blocks are packed into the pool's blocks; it is the same for all ranks of an
    engine.
    """

    pool_block_bytes: int
    blocks: int
    """Blocks of vLLM in one chunk."""

    @classmethod
    def of(cls, pool_block_bytes: int, ranks: Sequence[RankKv]) -> Packing:
        """Return the packing for a pool with blocks of this size."""
        fit = min(pool_block_bytes // rank.block_bytes for rank in ranks)
        return cls(pool_block_bytes, max(1, fit))

    def num_parts(self, rank: RankKv) -> int:
        """Return how many pool blocks a chunk of this rank takes."""
        return -(-self.blocks * rank.block_bytes // self.pool_block_bytes)

    def part_keys(self, rank: RankKv, chain: Sequence[BlockKey]) -> list[BlockKey]:
        """Return the keys of all parts of these chunks, chunk after chunk."""
        head = rank.fingerprint + self.pool_block_bytes.to_bytes(8, "little")
        return [
            blake2b(head + key + part.to_bytes(4, "little"), digest_size=KEY_BYTES).digest()
            for key in chain
            for part in range(self.num_parts(rank))
        ]


class TokenChain:
    """The keys of a request's chunks, made as its tokens become known."""

    def __init__(self, namespace: str, salt: str, chunk_tokens: int) -> None:
        self._root = chain_root(f"vllm {chunk_tokens}", namespace, salt)
        self.chunk_tokens = chunk_tokens
        self._keys: list[BlockKey] = []

    def upto(self, tokens: Sequence[int], num_chunks: int) -> list[BlockKey]:
        """Return the keys of the first `num_chunks` chunks of a request with these tokens. The
        tokens begin with those given before.
        """
        known = len(self._keys)
        if num_chunks > known:
            size = self.chunk_tokens
            last = self._keys[-1] if self._keys else self._root
            self._keys += extend_chain(last, list(tokens[known * size : num_chunks * size]), size)
        return self._keys[:num_chunks]
