"""Converts between plain and encrypted weights, for `mooncake model encrypt`, `decrypt` and
`rekey`.

`encryption` defines the format. Several threads each hold one piece. The new directory appears
whole or not at all. Owns nothing once it returns.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from mooncake.base import CheckpointError, ConfigError
from mooncake.crypto.aead import TAG_BYTES, Chunks
from mooncake.crypto.keys import KEY_BYTES, KeyRing
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles
from mooncake.model.checkpoint.files.encryption import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    SUFFIX,
    StoredFile,
    data_key_of,
    file_chunks,
    new_manifest,
    read_manifest,
    rewrapped,
    write_manifest,
)
from mooncake.model.checkpoint.files.file_bytes import FileBytes
from mooncake.model.checkpoint.files.revision import PIECE_BYTES, Progress, pieces_of
from mooncake.model.checkpoint.files.whole_directory import copy_beside, whole_directory

MAX_THREADS = 16
WRITTEN_BYTES = 8 * 2**20
"""How much one thread decrypts at a time."""

Piece = Callable[[FileBytes, int, int, int], bytes]
"""Called with (source, descriptor of the new file, begin, end) for each piece of a file."""


def encrypt_checkpoint(
    source: Path,
    out: Path,
    keys: KeyRing,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Path:
    """Write `source` to the directory `out` with its weights encrypted. The first of `keys`
    encrypts them. The files beside the weights stay plain.

    progress: is called with (bytes done, bytes in all). chunk_bytes: how much is encrypted in one
    piece; a divisor of PIECE_BYTES.

    Raises:
        ConfigError: `source` is encrypted already, or `out` holds something or cannot be written.
        CheckpointError: `source` cannot be read.
    """
    source, out = Path(source), Path(out)
    if read_manifest(source) is not None:
        raise ConfigError(f"{source}: is encrypted already; `mooncake model rekey` changes its key")
    contents = CheckpointFiles.open(source).contents
    if not contents:
        raise CheckpointError(f"{source}: it holds no tensors, so there is nothing to encrypt")
    data_key = os.urandom(KEY_BYTES)
    with whole_directory(out) as staging:
        copy_beside(source, staging)
        digests = {}
        for content, told in _each(contents, progress):
            name = content.path.name
            chunks = file_chunks(data_key, name, content.num_bytes, chunk_bytes)
            seal = partial(_seal_piece, chunks, chunk_bytes)
            pieces = _write(content, staging / f"{name}{SUFFIX}", seal, PIECE_BYTES, told)
            digests[name] = hashlib.sha256(b"".join(pieces)).hexdigest()
        files = {
            content.path.name: StoredFile(content.num_bytes, digests[content.path.name])
            for content in contents
        }
        write_manifest(staging, new_manifest(files, chunk_bytes, data_key, keys))
    return out


def decrypt_checkpoint(
    source: Path, out: Path, keys: KeyRing, progress: Progress | None = None
) -> Path:
    """Write `source` to the directory `out` with plain weights, byte for byte as they were before
    encryption.

    Raises:
        ConfigError: these are not its keys, or `out` holds something or cannot be written.
        CheckpointError: `source` cannot be read, is not encrypted, or was altered.
    """
    source, out = Path(source), Path(out)
    contents = CheckpointFiles.open(source, keys).contents
    with whole_directory(out) as staging:
        copy_beside(source, staging, skip=(MANIFEST_NAME,))
        for content, told in _each(contents, progress):
            name = content.path.name.removesuffix(SUFFIX)
            _write(content, staging / name, _open_piece, WRITTEN_BYTES, told)
    return out


def rekey_checkpoint(path: Path, keys: KeyRing) -> None:
    """Re-encrypt the data key of the weights in `path` with the first of `keys`. Any of the given
    keys may decrypt it now. The weights themselves do not change.

    Raises:
        ConfigError: none of these keys decrypts it, or it cannot be written.
        CheckpointError: it is not encrypted, or was altered.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise CheckpointError(f"{path}: its weights are not encrypted")
    data_key = data_key_of(path, manifest, keys)
    try:
        write_manifest(path, rewrapped(manifest, data_key, keys))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror or error})") from error


def _each(
    contents: Sequence[FileBytes], progress: Progress | None
) -> list[tuple[FileBytes, Callable[[int], None]]]:
    """Pair each file with a function that takes the number of its bytes done."""
    whole = sum(content.num_bytes for content in contents)

    def told(before: int, done: int) -> None:
        if progress is not None:
            progress(before + done, whole)

    pairs: list[tuple[FileBytes, Callable[[int], None]]] = []
    before = 0
    for content in contents:
        pairs.append((content, partial(told, before)))
        before += content.num_bytes
    return pairs


def _write(
    content: FileBytes, path: Path, work: Piece, piece_bytes: int, told: Callable[[int], None]
) -> list[bytes]:
    """Make the file `path` by calling `work` on each piece of `content`. Return the results."""
    made = []
    pieces = pieces_of(content.num_bytes, piece_bytes)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            results = threads.map(lambda ends: work(content, fd, *ends), pieces)
            for (_, end), result in zip(pieces, results, strict=True):
                made.append(result)
                told(end)
        os.fsync(fd)
    finally:
        os.close(fd)
    return made


def _seal_piece(
    chunks: Chunks, chunk_bytes: int, content: FileBytes, fd: int, begin: int, end: int
) -> bytes:
    """Write the chunks of a piece; return the digest of its plain bytes."""
    plain = content.read(begin, end)
    sealed = memoryview(bytearray(chunk_bytes + TAG_BYTES))
    for first, last in pieces_of(len(plain), chunk_bytes):
        number = (begin + first) // chunk_bytes
        out = sealed[: last - first + TAG_BYTES]
        chunks.seal_into(number, plain[first:last], out)
        _write_all(fd, out, number * (chunk_bytes + TAG_BYTES))
    return hashlib.sha256(plain).digest()


def _open_piece(content: FileBytes, fd: int, begin: int, end: int) -> bytes:
    _write_all(fd, content.read(begin, end), begin)
    return b""


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
