"""AES-256-GCM for data on disks: data that was altered, cut or moved does not decrypt.

No nonce is ever used twice with one key, whatever crashes, restarts, or is copied. A *record* has
its own key, which is derived from 32 random bytes stored beside it. The *chunks* of a file are
numbered, with a key that encrypts only this file, and only once. Calls release the interpreter lock
unless the data is very short.
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
    """The data was not made with this key and context, or was altered since."""


def record_key(key: bytes, salt: bytes) -> bytes:
    """Return the key of one record; `salt`: SALT_BYTES that were drawn for this record alone."""
    return derive(key, "mooncake record 1", salt)


def encrypt_into(record: bytes, data: Buffer, out: memoryview, context: bytes = b"") -> None:
    """Fill `out` with the encrypted `data` and its tag, TAG_BYTES longer.

    record: a `record_key`, which is used only once to encrypt.
    context: must be given again to decrypt; it is not stored.
    """
    AESGCM(record).encrypt_into(_ONLY_NONCE, data, context, out)


def decrypt_into(
    record: bytes, tag: bytes, sealed: Buffer, out: memoryview, context: bytes = b""
) -> None:
    """Decrypt what `encrypt_into` made into `out`; the tag is passed separately. `out` may be the
    same memory, and may hold anything after an error.

    Raises:
        Altered: the key, tag, context or data differs.
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
        Altered: the key, context or data differs.
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
        """`key` encrypts the chunks of this one file, and each of them once."""
        self._gcm = AESGCM(key)

    def seal_into(self, number: int, data: Buffer, out: memoryview) -> None:
        """Fill `out` with the encrypted chunk `number` and its tag: TAG_BYTES more than `data`."""
        self._gcm.encrypt_into(_nonce(number), data, None, out)

    def unseal_into(self, number: int, sealed: Buffer, out: memoryview) -> None:
        """Decrypt chunk `number` into `out`, which may hold anything after an error.

        Raises:
            Altered: it differs from this chunk as it was encrypted.
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
