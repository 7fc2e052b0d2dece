"""Stores values of any size by name, as blocks: this module makes the keys and the content of their
blocks.

A block's key is derived from the content of its value, so that blocks of two values never mix. One
more block, the head, has a key derived from the value's name and is written last. If two values
have the same name, the one whose head was written first is stored.
"""

from __future__ import annotations

import struct

import xxhash

from mooncake.base import BlockKey, KvLayout
from mooncake.base.blocks import chain_root, extend_chain
from mooncake.base.rights import tenant_key

_HEAD = struct.Struct("<8sQ16s")
_MAGIC = b"mcvalue1"


class ValueHead:
    """The content of a head block: the length and the digest of the value."""

    def __init__(self, num_bytes: int, digest: bytes) -> None:
        self.num_bytes = num_bytes
        self.digest = digest

    @classmethod
    def of(cls, data: bytes) -> ValueHead:
        """Return the head of a value."""
        return cls(len(data), xxhash.xxh3_128_digest(data))

    @classmethod
    def unpack(cls, block: bytes) -> ValueHead | None:
        """Return the head in a block; None when the block holds no head."""
        magic, num_bytes, digest = _HEAD.unpack_from(block)
        return cls(num_bytes, digest) if magic == _MAGIC else None

    def pack(self, layout: KvLayout) -> bytes:
        """Return the head block."""
        return _HEAD.pack(_MAGIC, self.num_bytes, self.digest).ljust(layout.block_bytes, b"\0")

    def is_of(self, data: bytes) -> bool:
        """Return whether `data` is the value that was put."""
        return len(data) == self.num_bytes and xxhash.xxh3_128_digest(data) == self.digest

    def keys(self, layout: KvLayout, tenant: str) -> list[BlockKey]:
        """Return the keys of the blocks that hold the value, in order."""
        count = -(-self.num_bytes // layout.block_bytes)
        root = chain_root(layout.fingerprint, tenant, f"value {self.digest.hex()}")
        return [_of_tenant(key, tenant) for key in extend_chain(root, range(count), 1)]


def head_key(layout: KvLayout, name: str, tenant: str) -> BlockKey:
    """Return the key of the head of the value of that name."""
    return _of_tenant(chain_root(layout.fingerprint, tenant, f"head {name}"), tenant)


def _of_tenant(key: BlockKey, tenant: str) -> BlockKey:
    """Return the key under which clients of the tenant may name it too."""
    return tenant_key(key, tenant) if tenant else key


def fits(layout: KvLayout) -> bool:
    """Return whether a block of this layout can hold a head."""
    return layout.block_bytes >= _HEAD.size
