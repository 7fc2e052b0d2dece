"""Tags that show that the bytes of a proven connection arrive unaltered, in order, and once.

AES-256-GCM as a MAC (GMAC): one key for each direction of each connection, from the handshake, and
the number of the message as its nonce. A message that was altered, dropped, repeated or moved
makes the check of it, or of the next one, fail. What is sent is not hidden.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import AEADEncryptionContext, Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mooncake.base.errors import ProtocolError

KEY_BYTES = 32
TAG_BYTES = 16
_NONCE_BYTES = 12
_ALTERED = "bytes were altered on their way"


class Seals:
    """Makes, or checks, the tags of one direction of one connection; both ends count alike."""

    def __init__(self, key: bytes | None) -> None:
        """`key`: KEY_BYTES; None = nothing is sealed, and tags are empty."""
        self.num_tag_bytes = 0 if key is None else TAG_BYTES
        self._aes = None if key is None else AES256(key)
        self._gcm = None if key is None else AESGCM(key)
        self._num_messages = 0

    def _nonce(self) -> bytes:
        self._num_messages += 1
        return self._num_messages.to_bytes(_NONCE_BYTES, "little")

    def seal(self, message: bytes) -> bytes:
        """Return a message and its tag."""
        return (
            message
            if self._gcm is None
            else message + self._gcm.encrypt(self._nonce(), b"", message)
        )

    def open(self, sealed: bytes | memoryview) -> bytes | memoryview:
        """Return the message that was sealed. Raises ProtocolError when it was altered."""
        if self._gcm is None:
            return sealed
        message, tag = sealed[:-TAG_BYTES], sealed[-TAG_BYTES:]
        try:
            self._gcm.decrypt(self._nonce(), tag, message)
        except InvalidTag as error:
            raise ProtocolError(_ALTERED) from error
        return message

    def begin(self) -> PayloadSeal:
        """Return the seal of the next message, whose bytes come in pieces."""
        if self._aes is None:
            return PayloadSeal(None)
        return PayloadSeal(Cipher(self._aes, GCM(self._nonce())).encryptor())


class PayloadSeal:
    """The tag of one long message, made while its bytes pass."""

    def __init__(self, gmac: AEADEncryptionContext | None) -> None:
        self._gmac = gmac

    def update(self, views: Sequence[memoryview], num_bytes: int) -> None:
        """Take in the first `num_bytes` of scattered memory."""
        if self._gmac is None:
            return
        for view in views:
            if num_bytes <= 0:
                return
            self._gmac.authenticate_additional_data(view[:num_bytes])
            num_bytes -= len(view)

    def tag(self) -> bytes:
        """Return the tag; called once, after all bytes."""
        if self._gmac is None:
            return b""
        self._gmac.finalize()
        return self._gmac.tag

    def check(self, tag: bytes | memoryview) -> None:
        """Raise ProtocolError unless this is the tag of what was taken in; called once."""
        if not hmac.compare_digest(self.tag(), tag):
            raise ProtocolError(_ALTERED)


def session_keys(secret: str, transcript: bytes) -> tuple[bytes, bytes]:
    """Return the keys (client to owner, owner to client) of a connection.

    transcript: all of its handshake that both proofs cover, both nonces among it.
    """
    derived = HKDF(SHA256(), 2 * KEY_BYTES, salt=transcript, info=b"mooncake transfer 2 keys")
    keys = derived.derive(secret.encode())
    return keys[:KEY_BYTES], keys[KEY_BYTES:]
