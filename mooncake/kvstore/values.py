"""Values of any size by name, as blocks: what a value's blocks are called and what they hold. Pure.

The blocks of a value are named by its content, so blocks of two values never mix; one more, the
head, is named by the value's name and is written last. Equal keys mean equal bytes but for heads:
of two values of one name the one whose head was first is the value.
"""

from __future__ import annotations

import struct

import xxhash

from mooncake.base import BlockKey, KvLayout
from mooncake.base.blocks import chain_root, extend_chain

_HEAD = struct.Struct("<8sQ16s")
_MAGIC = b"mcvalue1"


class ValueHead:
    """What the head block says: how long the value is and which blocks hold it."""

    def __init__(self, num_bytes: int, digest: bytes) -> None:
        self.num_bytes = num_bytes
        self.digest = digest

    @classmethod
    def of(cls, data: bytes) -> ValueHead:
        """Return the head of a value."""
        return cls(len(data), xxhash.xxh3_128_digest(data))

    @classmethod
    def unpack(cls, block: bytes) -> ValueHead | None:
        """Return what a head block says; None: it is not one."""
        magic, num_bytes, digest = _HEAD.unpack_from(block)
        return cls(num_bytes, digest) if magic == _MAGIC else None

    def pack(self, layout: KvLayout) -> bytes:
        """Return the head block."""
        return _HEAD.pack(_MAGIC, self.num_bytes, self.digest).ljust(layout.block_bytes, b"\0")

    def is_of(self, data: bytes) -> bool:
        """Whether `data` is the value that was put."""
        return len(data) == self.num_bytes and xxhash.xxh3_128_digest(data) == self.digest

    def keys(self, layout: KvLayout, tenant: str) -> list[BlockKey]:
        """Return the keys of the blocks that hold the value, first one first."""
        count = -(-self.num_bytes // layout.block_bytes)
        root = chain_root(layout.fingerprint, tenant, f"value {self.digest.hex()}")
        return extend_chain(root, range(count), 1)


def head_key(layout: KvLayout, name: str, tenant: str) -> BlockKey:
    """Return the key of the head of the value of that name."""
    return chain_root(layout.fingerprint, tenant, f"head {name}")


def fits(layout: KvLayout) -> bool:
    """Whether a block of this layout can hold a head."""
    return layout.block_bytes >= _HEAD.size
