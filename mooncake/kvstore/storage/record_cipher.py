"""Encrypts the contents of a slot: the block with its tenant's key, its header with a key of the
disk.

The header page is `block_record`'s, encrypted, behind a magic and the id of the operator's key from
which the other keys are derived. It hides key, tenant and checksum of the block, and holds the salt
from which the block's own key is derived. So once a header is erased, the block cannot be decrypted
any more. Pure, except for random salts; knows no files.
"""

from __future__ import annotations

import os
import struct
from functools import lru_cache
from typing import NamedTuple

from mooncake.crypto.aead import (
    SALT_BYTES,
    TAG_BYTES,
    Altered,
    decrypt_into,
    encrypt_into,
    record_key,
    seal,
    unseal,
)
from mooncake.crypto.keys import ID_BYTES, KEY_BYTES, Key, KeyRing
from mooncake.kvstore.storage.block_record import (
    MAX_HEADER_BYTES,
    BlockHeader,
    unpack_block_header,
)

_MAGIC = b"MCKVENC1"
_LEAD = struct.Struct(f"<8s{ID_BYTES}s")
_BLOCK = struct.Struct(f"<{SALT_BYTES}s{TAG_BYTES}s")
"""salt and tag of the block"""
HEADER_END = _LEAD.size + SALT_BYTES + MAX_HEADER_BYTES + _BLOCK.size + TAG_BYTES
"""End of an encrypted header in its page; the rest of the page is zero."""
_OPENER = struct.Struct(f"<{KEY_BYTES}s{TAG_BYTES}sQ")
"""key of the block's own, its tag, its checksum"""

EXTRA_BYTES = TAG_BYTES
"""Memory needed behind a block to encrypt it."""


class OtherKey(Exception):
    """The record was encrypted with a key that is not here."""


class Opener(NamedTuple):
    """The secrets that decrypt one block, as its header holds them."""

    key: bytes
    """The key of this block alone."""
    tag: bytes
    checksum: int
    """The checksum of the plain block: it tells which block it is."""


class Openers:
    """Keeps the opener of each slot of a disk in memory, so that reads need no headers: 56 bytes
    for each slot. A slot has one operation under way at a time.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = bytearray(num_slots * _OPENER.size)

    def get(self, slot: int) -> Opener | None:
        """Return the opener of a slot, or None if only its header has it."""
        opener = Opener._make(_OPENER.unpack_from(self._known, slot * _OPENER.size))
        return opener if any(opener.key) else None

    def put(self, slot: int, opener: Opener) -> None:
        """Keep the opener of a slot."""
        _OPENER.pack_into(self._known, slot * _OPENER.size, *opener)

    def forget(self, slot: int) -> None:
        """Forget the opener of a slot."""
        self._known[slot * _OPENER.size : (slot + 1) * _OPENER.size] = bytes(_OPENER.size)


class RecordCipher:
    """Encrypts and decrypts the slots of one disk. Threads may share it."""

    def __init__(self, keys: KeyRing, fingerprint: str) -> None:
        """`fingerprint` is that of the KV layout. Records of another layout do not decrypt."""
        self._keys = keys
        self._context = fingerprint.encode()

    def seal(
        self, tenant: str, checksum: int, block: memoryview, out: memoryview
    ) -> tuple[bytes, Opener]:
        """Fill `out` with the encrypted `block`, and EXTRA_BYTES more.

        Returns (what its header must hold about it, its opener).
        """
        salt = os.urandom(SALT_BYTES)
        key = record_key(_tenant_key(self._keys.first, tenant), salt)
        encrypt_into(key, block, out, self._context)
        tag = bytes(out[len(block) :])
        return _BLOCK.pack(salt, tag), Opener(key, tag, checksum)

    def seal_header(self, page: memoryview, of_block: bytes) -> None:
        """Turn a header page into an encrypted one, with what `seal` returned."""
        key = self._keys.first
        plain = bytes(page[:MAX_HEADER_BYTES]) + of_block
        _LEAD.pack_into(page, 0, _MAGIC, key.id)
        page[_LEAD.size : HEADER_END] = seal(_header_key(key), plain, self._context)

    def open_header(self, page: memoryview) -> tuple[BlockHeader, Opener] | None:
        """Return the contents of a header page and the opener of its block, or None if it is not a
        header.

        Raises:
            OtherKey: it may be a header, but its key is not here.
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
        header = unpack_block_header(memoryview(plain)[:MAX_HEADER_BYTES])
        if header is None:
            return None
        salt, tag = _BLOCK.unpack_from(plain, MAX_HEADER_BYTES)
        own = record_key(_tenant_key(key, header.tenant), salt)
        return header, Opener(own, tag, header.checksum)

    def open(self, opener: Opener, block: memoryview, out: memoryview) -> bool:
        """Decrypt `block` into `out`, which may be the same memory. Return False if it is not the
        block that the opener belongs to; `out` may then hold anything.
        """
        try:
            decrypt_into(opener.key, opener.tag, block, out, self._context)
        except Altered:
            return False
        return True


@lru_cache(4096)
def _tenant_key(key: Key, tenant: str) -> bytes:
    return key.derive("mooncake ssd blocks 1", tenant.encode())


@lru_cache(64)
def _header_key(key: Key) -> bytes:
    return key.derive("mooncake ssd headers 1")
