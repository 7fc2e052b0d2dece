"""Weights that are encrypted on disk: how they are stored, and how they are read.

`encryption.json` lists the files, the length of each and the digest of its plain bytes. It also
holds the data key, encrypted with the operator's key. `NAME.enc` is the file `NAME` in chunks, each
encrypted (AES-256-GCM) and followed by its tag. A file's key is derived from the data key and the
file's name, length and chunk size, and chunks are numbered. So a chunk that was altered, cut off or
moved, within a file or from another one, does not decrypt.

Reading the manifest needs neither torch nor a key.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from mooncake.base import CheckpointError, ConfigError
from mooncake.crypto.aead import TAG_BYTES, Altered, Chunks, seal, unseal
from mooncake.crypto.keys import KEY_BYTES, KeyRing, derive
from mooncake.model.checkpoint.files.file_bytes import DIGEST, FILE_NAME, mapped, read_statement

MANIFEST_NAME = "encryption.json"
SUFFIX = ".enc"
CHUNK_BYTES = 256 * 2**10
"""The least that a read decrypts. Smaller chunks would suit small tensors, larger ones speed."""
MAX_CHUNK_BYTES = 2**26
_WRAPPING = "mooncake weights data key 1"


class StoredFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as it was before it was encrypted."""

    num_bytes: int
    digest: str
    """The digest as `revision.file_digests` returns it."""


class WrappedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data key, encrypted with an operator's key."""

    key_id: str
    """The id of the operator's key, in hexadecimal."""
    data_key: bytes
    """The wrapped key; JSON has it in base64."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `encryption.json`."""

    format: Literal["mooncake-weights-1"]
    cipher: Literal["AES-256-GCM"]
    chunk_bytes: int
    files: dict[str, StoredFile]
    key: WrappedKey
    tag: str
    """A MAC of files and chunk size, with a key derived from the data key."""

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each file's plain bytes, by its name."""
        return {name: file.digest for name, file in self.files.items()}

    def with_tag(self, data_key: bytes) -> Manifest:
        """Return the manifest with the tag that it should have."""
        said = msgspec.json.encode(
            (self.format, self.cipher, self.chunk_bytes, self.files), order="sorted"
        )
        return msgspec.structs.replace(self, tag=derive(data_key, "manifest", said).hex())


def read_manifest(directory: Path) -> Manifest | None:
    """Return the directory's manifest of encrypted weights, or None if it holds plain weights.

    Raises:
        CheckpointError: it cannot be read, or makes no sense. Only a key shows whether it was
            altered.
    """
    path = directory / MANIFEST_NAME
    manifest = read_statement(path, Manifest, "how weights are encrypted")
    if manifest is None:
        return None
    if not 0 < manifest.chunk_bytes <= MAX_CHUNK_BYTES or not manifest.files:
        raise CheckpointError(f"{path}: does not say how weights are encrypted")
    for name, file in manifest.files.items():
        if not FILE_NAME.fullmatch(name) or file.num_bytes < 0 or not DIGEST.fullmatch(file.digest):
            raise CheckpointError(f"{path}: {name!r:.200} is not a file of weights")
    return manifest


def new_manifest(
    files: dict[str, StoredFile], chunk_bytes: int, data_key: bytes, keys: KeyRing
) -> Manifest:
    """Return the manifest of files encrypted with `data_key`, which is itself encrypted with the
    first of `keys`.
    """
    plain = Manifest(
        "mooncake-weights-1", "AES-256-GCM", chunk_bytes, files, _wrap(data_key, keys), ""
    )
    return plain.with_tag(data_key)


def rewrapped(manifest: Manifest, data_key: bytes, keys: KeyRing) -> Manifest:
    """Return the manifest with its data key encrypted with the first of `keys`."""
    return msgspec.structs.replace(manifest, key=_wrap(data_key, keys))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all. Raises OSError."""
    path = directory / MANIFEST_NAME
    new = directory / f".{MANIFEST_NAME}.{os.getpid()}"
    try:
        with new.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def data_key_of(directory: Path, manifest: Manifest, keys: KeyRing) -> bytes:
    """Return the key that encrypts the files.

    Raises:
        ConfigError: none of `keys` decrypts it.
        CheckpointError: the manifest was altered.
    """
    path = directory / MANIFEST_NAME
    key = keys.get(_from_hex(manifest.key.key_id))
    if key is None:
        raise ConfigError(
            f"weights-key: {directory} was encrypted with another key (its id is "
            f"{manifest.key.key_id:.64}; the id of the key given is {keys.first.id.hex()})"
        )
    try:
        data_key = unseal(key.derive(_WRAPPING), manifest.key.data_key)
    except Altered as error:
        raise CheckpointError(f"{path}: its key was altered; restore the file") from error
    whole = len(data_key) == KEY_BYTES
    wanted = manifest.with_tag(data_key).tag.encode()
    if not (whole and hmac.compare_digest(wanted, manifest.tag.encode(errors="replace"))):
        raise CheckpointError(f"{path}: was altered; restore the file")
    return data_key


def file_chunks(data_key: bytes, name: str, num_bytes: int, chunk_bytes: int) -> Chunks:
    """Return the cipher of one file, bound to its name, length and chunk size."""
    identity = msgspec.json.encode((name, num_bytes, chunk_bytes))
    return Chunks(derive(data_key, "file", identity))


def sealed_bytes(num_bytes: int, chunk_bytes: int) -> int:
    """Return the length of a file after encryption."""
    return num_bytes + -(-num_bytes // chunk_bytes) * TAG_BYTES


class SealedBytes:
    """Reads the plain bytes of one encrypted file (see `FileBytes`). `read` decrypts the chunks
    that it needs, straight from the mapped file into the memory that it returns.
    """

    def __init__(self, directory: Path, name: str, manifest: Manifest, data_key: bytes) -> None:
        """Raises CheckpointError when the file is missing, not listed, or not of its original
        length.
        """
        if name not in manifest.files:
            raise CheckpointError(f"{directory / MANIFEST_NAME}: does not list {name}")
        self.path = directory / f"{name}{SUFFIX}"
        self.num_bytes = manifest.files[name].num_bytes
        self._chunk_bytes = manifest.chunk_bytes
        self._chunks = file_chunks(data_key, name, self.num_bytes, self._chunk_bytes)
        self._sealed = memoryview(mapped(self.path)[0] or b"")
        wanted = sealed_bytes(self.num_bytes, self._chunk_bytes)
        if len(self._sealed) != wanted:
            raise CheckpointError(
                f"{self.path}: has {len(self._sealed)} bytes and was written with {wanted}; "
                "copy it again"
            )

    def read(self, begin: int, end: int) -> memoryview:
        out = np.empty(end - begin, np.uint8).data
        step = self._chunk_bytes
        for number in range(begin // step, -(-end // step)) if begin < end else ():
            first, last = number * step, min((number + 1) * step, self.num_bytes)
            if begin <= first and last <= end:
                self._unseal(number, out[first - begin : last - begin])
                continue
            chunk = np.empty(last - first, np.uint8).data
            self._unseal(number, chunk)
            start, stop = max(begin, first), min(end, last)
            out[start - begin : stop - begin] = chunk[start - first : stop - first]
        return out

    def _unseal(self, number: int, out: memoryview) -> None:
        at = number * (self._chunk_bytes + TAG_BYTES)
        try:
            self._chunks.unseal_into(number, self._sealed[at : at + len(out) + TAG_BYTES], out)
        except Altered as error:
            raise CheckpointError(
                f"{self.path}: the bytes at {at} are not those that were encrypted: they were "
                "altered, or belong to another file or checkpoint; copy the file again"
            ) from error


def _wrap(data_key: bytes, keys: KeyRing) -> WrappedKey:
    return WrappedKey(keys.first.id.hex(), seal(keys.first.derive(_WRAPPING), data_key))


def _from_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
