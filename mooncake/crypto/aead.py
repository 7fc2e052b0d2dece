"""AES-256-GCM over bytes that lie on disks: what was altered, cut or moved does not decrypt.

No nonce is ever drawn twice for one key, whatever crashes, restarts, or is copied: a *record* has a
key of its own, which follows from 32 random bytes beside it; the *chunks* of a file are numbered
under a key that encrypts this one file once. Calls release the interpreter for all but few bytes.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM

from mooncake.crypto.keys import derive

SALT_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12
_ONLY_NONCE = bytes(_NONCE_BYTES)

Buffer = bytes | bytearray | memoryview


class Altered(Exception):
    """These bytes were not made with this key and context, or were altered since."""


def record_key(key: bytes, salt: bytes) -> bytes:
    """Return the key of one record; `salt`: SALT_BYTES that were drawn for it alone."""
    return derive(key, "mooncake record 1", salt)


def encrypt_into(record: bytes, data: Buffer, out: memoryview, context: bytes = b"") -> None:
    """Fill `out` with the encrypted `data` and its tag, TAG_BYTES longer.

    record: a `record_key`, which encrypts this once.
    context: must be given again to decrypt; is not stored.
    """
    AESGCM(record).encrypt_into(_ONLY_NONCE, data, context, out)


def decrypt_into(
    record: bytes, tag: bytes, sealed: Buffer, out: memoryview, context: bytes = b""
) -> None:
    """Decrypt what `encrypt_into` made, whose tag stands apart, into `out`, which may be the same
    memory, and may hold anything after an error.

    Raises:
        Altered: another key, tag or context, or other bytes.
    """
    decryptor = Cipher(AES256(record), GCM(_ONLY_NONCE, tag)).decryptor()
    decryptor.authenticate_additional_data(context)
    decryptor.update_into(sealed, out)
    try:
        decryptor.finalize()
    except InvalidTag as error:
        raise Altered from error


def seal(key: bytes, data: Buffer, context: bytes = b"") -> bytes:
    """Return salt, encrypted `data` and tag as one piece."""
    salt = os.urandom(SALT_BYTES)
    sealed = bytearray(salt + bytes(len(data) + TAG_BYTES))
    encrypt_into(record_key(key, salt), data, memoryview(sealed)[SALT_BYTES:], context)
    return bytes(sealed)


def unseal(key: bytes, sealed: Buffer, context: bytes = b"") -> bytes:
    """Return what `seal` encrypted.

    Raises:
        Altered: another key or context, or other bytes.
    """
    if len(sealed) < SALT_BYTES + TAG_BYTES:
        raise Altered
    data = bytearray(len(sealed) - SALT_BYTES - TAG_BYTES)
    record = AESGCM(record_key(key, bytes(sealed[:SALT_BYTES])))
    _decrypt(record, _ONLY_NONCE, memoryview(sealed)[SALT_BYTES:], memoryview(data), context)
    return bytes(data)


class Chunks:
    """The numbered chunks of one file. Threads may share it."""

    def __init__(self, key: bytes) -> None:
        """`key`: encrypts the chunks of this one file, and each of them once."""
        self._gcm = AESGCM(key)

    def seal_into(self, number: int, data: Buffer, out: memoryview) -> None:
        """Fill `out` with chunk `number`, encrypted, and its tag: TAG_BYTES more than `data`."""
        self._gcm.encrypt_into(_nonce(number), data, None, out)

    def unseal_into(self, number: int, sealed: Buffer, out: memoryview) -> None:
        """Decrypt chunk `number` into `out`, which may hold anything after an error.

        Raises:
            Altered: it is not this chunk as it was encrypted.
        """
        _decrypt(self._gcm, _nonce(number), sealed, out, None)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "little")


def _decrypt(
    gcm: AESGCM, nonce: bytes, sealed: Buffer, out: memoryview, context: bytes | None
) -> None:
    try:
        gcm.decrypt_into(nonce, sealed, context, out)
    except InvalidTag as error:
        raise Altered from error
