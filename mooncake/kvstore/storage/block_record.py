"""The format of a file of blocks: a page about the file, a header page for each slot, then the
blocks.

Pure bytes in, values out; no I/O. Integers are little-endian. A header names what follows and its
hash, and has its own hash. So torn, damaged or foreign bytes are not taken for a block.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import xxhash

from mooncake.base import KEY_BYTES, BlockKey

PAGE_BYTES = 4096
"""Unit of direct I/O. Each header takes one page."""

BLANK_PAGE = bytes(PAGE_BYTES)
"""The header of a slot that was never written, or erased."""

MAX_TENANT_BYTES = 1024
MAX_SEQUENCE_GAP = 2**48
"""Two blocks of a disk never have more writes between them: at a million writes a second this is
nine years.
"""

_BLOCK_MAGIC = b"MCKVBLK2"
_FILE_MAGICS = {b"MCKVSEG2": False, b"MCKVSEC2": True}
"""Magic numbers of files with plain and with encrypted slots."""
_BLOCK = struct.Struct(f"<8s{KEY_BYTES}sQQQI")
"""magic, key, checksum, bytes, sequence number, bytes of the tenant's name"""
_FILE = struct.Struct("<8sQQI")
"""magic, bytes of a block, slots, bytes of the fingerprint"""
_DIGEST = struct.Struct("<Q")


MAX_HEADER_BYTES = _BLOCK.size + MAX_TENANT_BYTES + _DIGEST.size
"""Bytes of a block's header in its page; the rest of the page is zero."""


class BlockHeader(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a slot."""

    key: BlockKey
    checksum: int
    """The checksum of the block's bytes, see `kvstore.block_checksum`."""
    num_bytes: int
    sequence_no: int
    """Grows with every write to this directory. If two blocks have one key, the newer one
    counts.
    """
    tenant: str


class FileHeader(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a file."""

    fingerprint: str
    """The fingerprint of the KV layout: model, weights, dtype, shape."""
    block_bytes: int
    num_slots: int
    is_encrypted: bool = False


def aligned(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def pack_block_header(page: memoryview, header: BlockHeader) -> None:
    """Fill the page that describes a block. The tenant's name must not be too long."""
    key, checksum, num_bytes, sequence_no, name = msgspec.structs.astuple(header)
    tenant = name.encode()
    if len(tenant) > MAX_TENANT_BYTES:
        raise ValueError(f"a tenant's name of {len(tenant)} bytes does not fit a block header")
    end = _BLOCK.size + len(tenant)
    page[:] = BLANK_PAGE
    _BLOCK.pack_into(page, 0, _BLOCK_MAGIC, key, checksum, num_bytes, sequence_no, len(tenant))
    page[_BLOCK.size : end] = tenant
    _DIGEST.pack_into(page, end, xxhash.xxh3_64_intdigest(page[:end]))


def unpack_block_header(page: memoryview) -> BlockHeader | None:
    """Return the contents of a page, or None when it is not a block's header."""
    magic, key, checksum, num_bytes, sequence_no, tenant_bytes = _BLOCK.unpack_from(page)
    end = _BLOCK.size + tenant_bytes
    if magic != _BLOCK_MAGIC or tenant_bytes > MAX_TENANT_BYTES or not _is_sealed(page, end):
        return None
    try:
        tenant = str(page[_BLOCK.size : end], "utf-8") if tenant_bytes else ""
    except UnicodeDecodeError:
        return None
    return BlockHeader(key, checksum, num_bytes, sequence_no, tenant)


def num_counted(numbers: Sequence[int]) -> int:
    """Return how many of a disk's sequence numbers, in ascending order, were counted normally.
    Numbers behind a gap were not: they were altered or forged. Counting on from them would hide
    what is written later.
    """
    before = 0
    for index, number in enumerate(numbers):
        if number - before > MAX_SEQUENCE_GAP:
            return index
        before = number
    return len(numbers)


def pack_file_header(header: FileHeader) -> bytes:
    """Return the page a file begins with."""
    fingerprint = header.fingerprint.encode()
    [magic] = [magic for magic, kind in _FILE_MAGICS.items() if kind is header.is_encrypted]
    fields = _FILE.pack(magic, header.block_bytes, header.num_slots, len(fingerprint))
    return _sealed(fields + fingerprint)


def unpack_file_header(page: bytes | memoryview) -> FileHeader | None:
    """Return the contents of a page, or None when it is not a file's header."""
    is_encrypted = _FILE_MAGICS.get(bytes(page[:8]))
    if is_encrypted is None:
        return None
    _, block_bytes, num_slots, name_bytes = _FILE.unpack_from(page)
    end = _FILE.size + name_bytes
    if end > PAGE_BYTES - _DIGEST.size or not _is_sealed(page, end):
        return None
    try:
        fingerprint = str(page[_FILE.size : end], "utf-8")
    except UnicodeDecodeError:
        return None
    return FileHeader(fingerprint, block_bytes, num_slots, is_encrypted)


def _sealed(fields: bytes) -> bytes:
    """Return a page of these fields and their hash."""
    page = fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields))
    if len(page) > PAGE_BYTES:
        raise ValueError("a header does not fit its page")
    return page.ljust(PAGE_BYTES, b"\0")


def _is_sealed(page: bytes | memoryview, end: int) -> bool:
    (digest,) = _DIGEST.unpack_from(page, end)
    return bool(xxhash.xxh3_64_intdigest(page[:end]) == digest)
