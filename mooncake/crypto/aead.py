"""AES-256-GCM over bytes that lie on disks: what was altered, cut or moved does not decrypt.

No nonce is ever drawn twice for one key, whatever crashes, restarts, or is copied: a *record* has a
key of its own, which follows from 32 random bytes beside it; the *chunks* of a file are numbered
under a key that encrypts this one file once. Calls release the interpreter for all but few bytes.
The `cryptography` package is imported at the first call: machines that only compute lack it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

from mooncake.crypto.keys import derive

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SALT_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12
_ONLY_NONCE = bytes(_NONCE_BYTES)

Buffer = bytes | bytearray | memoryview


class Altered(Exception):
    """These bytes were not made with this key and context, or were altered since."""


def seal_into(key: bytes, data: Buffer, out: memoryview, context: bytes = b"") -> bytes:
    """Fill `out` with the encrypted `data` and its tag, TAG_BYTES longer; return the salt, without
    which even the key does not decrypt it.

    context: must be given again to decrypt; is not stored.
    """
    salt = os.urandom(SALT_BYTES)
    _record(key, salt).encrypt_into(_ONLY_NONCE, data, context, out)
    return salt


def unseal_into(
    key: bytes, salt: bytes, sealed: Buffer, out: memoryview, context: bytes = b""
) -> None:
    """Decrypt what `seal_into` made into `out`, which may hold anything after an error.

    Raises:
        Altered: another key, salt or context, or other bytes.
    """
    _decrypt(_record(key, salt), _ONLY_NONCE, sealed, out, context)


def seal(key: bytes, data: Buffer, context: bytes = b"") -> bytes:
    """Return salt, encrypted `data` and tag as one piece."""
    sealed = bytearray(SALT_BYTES + len(data) + TAG_BYTES)
    sealed[:SALT_BYTES] = seal_into(key, data, memoryview(sealed)[SALT_BYTES:], context)
    return bytes(sealed)


def unseal(key: bytes, sealed: Buffer, context: bytes = b"") -> bytes:
    """Return what `seal` encrypted.

    Raises:
        Altered: another key or context, or other bytes.
    """
    if len(sealed) < SALT_BYTES + TAG_BYTES:
        raise Altered
    data = bytearray(len(sealed) - SALT_BYTES - TAG_BYTES)
    salt, rest = bytes(sealed[:SALT_BYTES]), memoryview(sealed)[SALT_BYTES:]
    unseal_into(key, salt, rest, memoryview(data), context)
    return bytes(data)


class Chunks:
    """The numbered chunks of one file. Threads may share it."""

    def __init__(self, key: bytes) -> None:
        """`key`: encrypts the chunks of this one file, and each of them once."""
        self._gcm = _aes_gcm(key)

    def seal_into(self, number: int, data: Buffer, out: memoryview) -> None:
        """Fill `out` with chunk `number`, encrypted, and its tag: TAG_BYTES more than `data`."""
        self._gcm.encrypt_into(_nonce(number), data, None, out)

    def unseal_into(self, number: int, sealed: Buffer, out: memoryview) -> None:
        """Decrypt chunk `number` into `out`, which may hold anything after an error.

        Raises:
            Altered: it is not this chunk as it was encrypted.
        """
        _decrypt(self._gcm, _nonce(number), sealed, out, None)


def _record(key: bytes, salt: bytes) -> AESGCM:
    return _aes_gcm(derive(key, "mooncake record 1", salt))


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


def _aes_gcm(key: bytes) -> AESGCM:
    return _library()[0](key)


@cache
def _library() -> tuple[type[AESGCM], type[Exception]]:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM, InvalidTag


def _decrypt(
    gcm: AESGCM, nonce: bytes, sealed: Buffer, out: memoryview, context: bytes | None
) -> None:
    try:
        gcm.decrypt_into(nonce, sealed, context, out)
    except _library()[1] as error:
        raise Altered from error
