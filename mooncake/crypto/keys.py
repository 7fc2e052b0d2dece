"""Keys that an operator gives: how they are written, and how other keys are derived from them.

Pure: `launch` reads the keys. Nothing here prints a key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from mooncake.base.errors import ConfigError

KEY_BYTES = 32
ID_BYTES = 8

HOW = "32 random bytes in hexadecimal or base64 (`openssl rand -hex 32` makes a key)"


def derive(key: bytes, purpose: str, context: bytes = b"") -> bytes:
    """Return KEY_BYTES for one purpose and context; `key` cannot be computed from them.

    HKDF's expand step with SHA-256 (RFC 5869): `key` is uniformly random, so needs no extract step.
    """
    return hmac.digest(key, purpose.encode() + b"\0" + context + b"\x01", hashlib.sha256)


class KeySource(msgspec.Struct, frozen=True, kw_only=True):
    """The place where a process finds keys. This value travels to the process; the keys do not."""

    name: str
    """The name as in flags: "weights-key"."""
    file: str | None = None
    command: str | None = None
    """The command that prints the keys; no shell runs it."""

    @property
    def variable(self) -> str:
        """The environment variable that may hold the keys if neither a file nor a command is
        given.
        """
        return f"MOONCAKE_{self.name.upper().replace('-', '_')}"

    @property
    def cure(self) -> str:
        """The part of an error that says what an operator can give."""
        return f"`{self.name}-file`, `{self.name}-command` or {self.variable}"


class Key:
    """One key that an operator gave."""

    __slots__ = ("_secret", "id")

    def __init__(self, secret: bytes) -> None:
        """`secret`: KEY_BYTES of random data."""
        self._secret = secret
        self.id = self.derive("mooncake key id 1")[:ID_BYTES]
        """An id that tells keys apart and reveals nothing about the key."""

    def __repr__(self) -> str:
        return f"Key(id={self.id.hex()})"

    def derive(self, purpose: str, context: bytes = b"") -> bytes:
        """Return the key for `purpose`; see `derive`."""
        return derive(self._secret, purpose, context)


class KeyRing:
    """Keys of one purpose: the first encrypts, all decrypt, so that keys can be changed."""

    def __init__(self, keys: Sequence[Key]) -> None:
        """`keys`: at least one; the first one encrypts."""
        self.first = keys[0]
        self._by_id = {key.id: key for key in keys}

    @classmethod
    def parse(cls, text: str, where: str) -> KeyRing:
        """Return the keys in `text`, which are separated by white space.

        Raises:
            ConfigError: there is no key, or something is not a key. The message names `where` and
                repeats nothing of the text.
        """
        words = text.split()
        if not words:
            raise ConfigError(f"{where} contains no key; give {HOW}")
        keys = [_read(word) for word in words]
        found = [key for key in keys if key is not None]
        if len(found) < len(keys):
            number = keys.index(None) + 1
            raise ConfigError(f"{where}: word {number} is not a key; give {HOW}")
        return cls(found)

    @property
    def ids(self) -> list[bytes]:
        """The ids of all keys; the first encrypts."""
        return list(self._by_id)

    def get(self, key_id: bytes) -> Key | None:
        """Return the key with this id, or None."""
        return self._by_id.get(key_id)


def _read(word: str) -> Key | None:
    try:
        secret = (
            bytes.fromhex(word)
            if len(word) == 2 * KEY_BYTES
            else base64.b64decode(word, validate=True)
        )
    except ValueError:
        return None
    return Key(secret) if len(secret) == KEY_BYTES else None
