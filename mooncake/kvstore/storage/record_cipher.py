"""Encrypts what lies in a slot: the block under its tenant's key, its header under one of the disk.

The header page is `block_record`'s, encrypted, behind a magic and the id of the operator's key that
the others follow from. It hides key, tenant and checksum of the block, and holds the salt that the
block's own key is made of: once a header is erased, nobody can decrypt the block any more. Pure but
for random salts; knows no files.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from mooncake.crypto.aead import (
    SALT_BYTES,
    TAG_BYTES,
    Altered,
    seal,
    seal_into,
    unseal,
    unseal_into,
)
from mooncake.crypto.keys import ID_BYTES, Key, KeyRing
from mooncake.kvstore.storage.block_record import MAX_HEADER_BYTES

_MAGIC = b"MCKVENC1"
_LEAD = struct.Struct(f"<8s{ID_BYTES}s")
_BLOCK = struct.Struct(f"<{SALT_BYTES}s{TAG_BYTES}s")
"""salt and tag of the block"""
HEADER_END = _LEAD.size + SALT_BYTES + MAX_HEADER_BYTES + _BLOCK.size + TAG_BYTES
"""Of an encrypted header page; the rest of it is zero."""
EXTRA_BYTES = TAG_BYTES
"""Memory behind a block that encrypting and decrypting it take."""


class OtherKey(Exception):
    """The record was made with a key that is not here."""


class Sealed(NamedTuple):
    """What decrypts a block, besides its tenant."""

    key: Key
    salt: bytes
    tag: bytes


class RecordCipher:
    """Encrypts and decrypts the slots of one disk. Threads may share it."""

    def __init__(self, keys: KeyRing, fingerprint: str) -> None:
        """`fingerprint`: of the KV layout; records of another one do not decrypt."""
        self._keys = keys
        self._context = fingerprint.encode()

    def seal(self, tenant: str, block: memoryview, out: memoryview) -> bytes:
        """Fill `out` with the encrypted `block`, and EXTRA_BYTES more; return what its header
        must hold of it.
        """
        key = _tenant_key(self._keys.first, tenant)
        salt = seal_into(key, block, out, self._context)
        return _BLOCK.pack(salt, bytes(out[len(block) :]))

    def seal_header(self, page: memoryview, of_block: bytes) -> None:
        """Turn a header page into an encrypted one, with what `seal` returned."""
        key = self._keys.first
        plain = bytes(page[:MAX_HEADER_BYTES]) + of_block
        _LEAD.pack_into(page, 0, _MAGIC, key.id)
        page[_LEAD.size : HEADER_END] = seal(_header_key(key), plain, self._context)

    def open_header(self, page: memoryview) -> tuple[bytes, Sealed] | None:
        """Return the plain header and what opens the block; None: this is no header.

        Raises:
            OtherKey: it may be one, but its key is not here.
        """
        magic, key_id = _LEAD.unpack_from(page)
        if magic != _MAGIC:
            return None
        key = self._keys.get(key_id)
        if key is None:
            raise OtherKey
        try:
            plain = unseal(_header_key(key), page[_LEAD.size : HEADER_END], self._context)
        except Altered:
            return None
        salt, tag = _BLOCK.unpack_from(plain, MAX_HEADER_BYTES)
        return plain[:MAX_HEADER_BYTES], Sealed(key, salt, tag)

    def open(self, sealed: Sealed, tenant: str, block: memoryview, out: memoryview) -> bool:
        """Decrypt `block` into `out`; the EXTRA_BYTES behind it are overwritten. Return False, with
        anything in `out`, unless it is the block that the header was written for.
        """
        block[len(out) :] = sealed.tag
        key = _tenant_key(sealed.key, tenant)
        try:
            unseal_into(key, sealed.salt, block, out, self._context)
        except Altered:
            return False
        return True


@lru_cache(4096)
def _tenant_key(key: Key, tenant: str) -> bytes:
    return key.derive("mooncake ssd blocks 1", tenant.encode())


@lru_cache(64)
def _header_key(key: Key) -> bytes:
    return key.derive("mooncake ssd headers 1")
