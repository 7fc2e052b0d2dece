"""Seals what passes over a proven connection, so that its bytes arrive unaltered, in order and
once.

AES-256-GCM, as a MAC (GMAC) or as a cipher: one key for each direction of each connection, from the
handshake, and the numbers of message and chunk as nonce. If a message was altered, dropped,
repeated or moved, its own check or that of the next message fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from mooncake.base.errors import ProtocolError
from mooncake.transfer.net.endpoint import Protection

KEY_BYTES = 32
TAG_BYTES = 16
CHUNK_BYTES = 2**20
"""Bytes that are sealed at a time, just before the kernel copies them or just after. Much of them
is in the core's cache then. (With 256 KiB, calls and turns of the loop cost a fifth of the speed.)
"""
MAX_CHUNKS = 500
"""Chunks that are sealed at a time when payload is in small pieces."""
_NUMBER_BYTES, _INDEX_BYTES = 8, 4
_ALTERED = "bytes were altered on their way"


class Seals:
    """Seals, or opens, the messages of one direction of one connection; both ends count alike."""

    def __init__(self, protection: Protection, key: bytes) -> None:
        """`key` has KEY_BYTES. Protection.NONE, which seals nothing, does not use it."""
        self.protection = protection
        self.num_tag_bytes = 0 if protection is Protection.NONE else TAG_BYTES
        self._key = key
        self._gcm = None if protection is Protection.NONE else AESGCM(key)
        self._num_messages = 0
        self._hidden = memoryview(b"")
        """Memory in which chunks are encrypted before they are sent; used once payloads are
        sent.
        """

    def _next_number(self) -> bytes:
        self._num_messages += 1
        return self._num_messages.to_bytes(_NUMBER_BYTES, "little")

    def seal(self, message: bytes, secret: bytes = b"") -> bytes:
        """Return a message, which stays readable, and one tag. `secret` follows the message and is
        encrypted where payloads are.
        """
        if self._gcm is None:
            return message + secret
        nonce = self._next_number() + bytes(_INDEX_BYTES)
        if self.protection is not Protection.ENCRYPT:
            message, secret = message + secret, b""
        return message + self._gcm.encrypt(nonce, secret, message)

    def open(
        self, sealed: bytes | memoryview, num_readable: int | None = None
    ) -> bytes | memoryview:
        """Return what was sealed, of which the first `num_readable` bytes are the message and the
        others the secret. All of it is the message if `num_readable` is None. Raises
        ProtocolError when it was altered.
        """
        if self._gcm is None:
            return sealed
        stop = len(sealed) - TAG_BYTES
        if num_readable is not None and self.protection is Protection.ENCRYPT:
            stop = num_readable
        message, rest = sealed[:stop], sealed[stop:]
        try:
            secret = self._gcm.decrypt(self._next_number() + bytes(_INDEX_BYTES), rest, message)
        except InvalidTag as error:
            raise ProtocolError(_ALTERED) from error
        return bytes(message) + secret if secret else message

    def begin(self) -> PayloadSeal:
        """Return the seal of the next message, a payload. All earlier messages must have been
        sent.
        """
        if self._gcm is None:
            return PayloadSeal(self, None, b"")
        return PayloadSeal(self, self._gcm, self._next_number())

    def room(self) -> memoryview:
        """Return memory for the chunks that are sealed at a time; it is the same at every call."""
        if not self._hidden:
            self._hidden = memoryview(bytearray(CHUNK_BYTES + MAX_CHUNKS * TAG_BYTES))
        return self._hidden

    def decipher(self, nonce: bytes, chunk: memoryview, tag: memoryview) -> None:
        """Decrypt a chunk in place. Raises InvalidTag."""
        opening = Cipher(AES256(self._key), GCM(nonce, bytes(tag))).decryptor()
        opening.update_into(chunk, chunk)
        opening.finalize()


class PayloadSeal:
    """Seals, or opens, one payload chunk by chunk."""

    def __init__(self, seals: Seals, gcm: AESGCM | None, number: bytes) -> None:
        """`gcm`: None = chunks are sent as they are. `number`: the payload's number among the
        messages.
        """
        self._seals = seals
        self._gcm = gcm
        self._is_hidden = seals.protection is Protection.ENCRYPT
        self._number = number
        self._num_chunks = 0

    def _nonce(self) -> bytes:
        self._num_chunks += 1
        return self._number + self._num_chunks.to_bytes(_INDEX_BYTES, "little")

    def seal(self, chunks: Sequence[memoryview]) -> list[memoryview]:
        """Return what to send for the next chunks: each chunk, or its encrypted form, and its tag.

        chunks: at most MAX_CHUNKS, of CHUNK_BYTES together. All earlier ones must have been sent.
        """
        gcm = self._gcm
        if gcm is None:
            return list(chunks)
        ready: list[memoryview] = []
        if not self._is_hidden:
            for chunk in chunks:
                ready += (chunk, memoryview(gcm.encrypt(self._nonce(), b"", chunk)))
            return ready
        room, start = self._seals.room(), 0
        for chunk in chunks:
            stop = start + len(chunk) + TAG_BYTES
            gcm.encrypt_into(self._nonce(), chunk, None, room[start:stop])
            start = stop
        return [room[:start]]

    def open(self, chunk: memoryview, tag: memoryview) -> None:
        """Check the next chunk, and decrypt it in place if it is encrypted. Raises
        ProtocolError.
        """
        if self._gcm is None:
            return
        try:
            if self._is_hidden:
                self._seals.decipher(self._nonce(), chunk, tag)
            else:
                self._gcm.decrypt(self._nonce(), tag, chunk)
        except InvalidTag as error:
            raise ProtocolError(_ALTERED) from error


def session_keys(agreed: bytes, transcript: bytes) -> tuple[bytes, bytes]:
    """Return the keys (client to owner, owner to client) of a connection.

    agreed: the secret that only its two ends know.
    transcript: all of its handshake that both proofs cover, both nonces among it.
    """
    derived = HKDF(SHA256(), 2 * KEY_BYTES, salt=transcript, info=b"mooncake transfer 2 keys")
    keys = derived.derive(agreed)
    return keys[:KEY_BYTES], keys[KEY_BYTES:]
