"""The revision of a checkpoint: a name for its weights, equal only for equal bytes.

Every file is hashed whole, once. The digests are kept in a cache file, under the identity that the
file system gives each file (device, inode, size and times). A file that was changed or replaced
since it was opened is hashed without the cache. Needs no tensors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import xxhash

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files.file_bytes import (
    DIGEST,
    FILE_NAME,
    PlainBytes,
    identity_of,
    read_statement,
)

STATED_NAME = "weights-digests.json"
"""A file beside config.json with the digests of weights, which may themselves be missing."""
CACHE_NAME = "file-digests.json"
LOCK_NAME = "file-digests.lock"
MAX_CACHED = 8192
"""How many entries the cache has, two for each file; the oldest are forgotten first."""
PIECE_BYTES = 64 * 2**20
"""How much one thread hashes at a time. This is part of the definition of a file's digest."""
MAX_THREADS = 16
SUM_BYTES = 16
_SUMS = ":sums"
"""Appended to a file's identity, it names the entry of the cache with the sums of its pieces."""

_CHANGED = "changed:"
"""Prefix of the identity of a file that has changed since it was opened; the cache keeps no entry
for it.
"""

FoundT = TypeVar("FoundT")
Progress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes to hash)."""

logger = logging.getLogger(__name__)


class StatedDigests(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `weights-digests.json`."""

    format: Literal["mooncake-weights-digests-1"] = "mooncake-weights-digests-1"
    files: dict[str, str]
    """The digest of each weights file by its name, as `file_digests` returns it."""


def stated_digests(directory: Path) -> Mapping[str, str] | None:
    """Return the checkpoint's statement about its plain weights, or None if it has none.

    Raises:
        CheckpointError: it cannot be read, or makes no sense.
    """
    path = directory / STATED_NAME
    stated = read_statement(path, StatedDigests, "digests of weights")
    if stated is None:
        return None
    for name, digest in stated.files.items():
        if not FILE_NAME.fullmatch(name) or not DIGEST.fullmatch(digest):
            raise CheckpointError(f"{path}: {name!r:.200} is not a file of weights with a digest")
    if not stated.files:
        raise CheckpointError(f"{path}: names no file of weights")
    return stated.files


def weights_revision(config: bytes, digests: Mapping[str, str]) -> str:
    """Return 16 hex digits of SHA-256 over `config` (the bytes of config.json) and the `digests` of
    all files by name. How the files are stored, encrypted or not, makes no difference.
    """
    whole = hashlib.sha256(config)
    for name in sorted(digests):
        whole.update(f"\n{name} {digests[name]}".encode())
    return whole.hexdigest()[:16]


def file_digests(
    files: Sequence[PlainBytes], cache_dir: Path | None = None, progress: Progress | None = None
) -> dict[str, str]:
    """Return the digest of each file by its name: the SHA-256 of its pieces' SHA-256.

    Digests of files that have not changed since they were last hashed come from `cache_dir`;
    without one, nothing is kept. When several processes start together, one hashes and the others
    wait for its results. A cache that cannot be read or written costs time and nothing else.
    """
    return _hashed(files, cache_dir, progress, _Cache.digest)


def piece_sums(
    files: Sequence[PlainBytes], cache_dir: Path | None = None, progress: Progress | None = None
) -> dict[str, bytes]:
    """Return the checksums (`sum_of`) of each file's pieces, one behind the other, by the file's
    name. They were made when the file was hashed, and are kept as its digest is.
    """
    return _hashed(files, cache_dir, progress, _Cache.sums)


def sum_of(piece: memoryview) -> bytes:
    """Return the checksum of a piece, of `SUM_BYTES`. It costs a tenth of a SHA-256, and finds
    what changed by accident.
    """
    return xxhash.xxh3_128_digest(piece)


def _hashed(
    files: Sequence[PlainBytes],
    cache_dir: Path | None,
    progress: Progress | None,
    known: Callable[[_Cache, str], FoundT | None],
) -> dict[str, FoundT]:
    """Return what the cache knows of each file by its name, after those of which it knew nothing
    were hashed.
    """
    keys = {file.path: _key(file) for file in files}
    cache = _Cache(cache_dir)
    if any(known(cache, key) is None for key in keys.values()):
        with _one_at_a_time(cache_dir):
            cache = _Cache(cache_dir)  # another process may have hashed meanwhile
            unknown = [file for file in files if known(cache, keys[file.path]) is None]
            if unknown:
                for file, hashed in zip(unknown, _hash_files(unknown, progress), strict=True):
                    cache.put(keys[file.path], *hashed)
                cache.save()
    found = {path.name: known(cache, key) for path, key in keys.items()}
    return {name: each for name, each in found.items() if each is not None}


def _key(file: PlainBytes) -> str:
    """Return the name of a file in the cache."""
    is_same = identity_of(file.path.stat()) == file.identity
    return file.identity if is_same else _CHANGED + file.identity


@contextlib.contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Make other processes that hash for the same cache wait. If no file can be locked, none waits.
    When a process dies, the system ends the wait for it.
    """
    with contextlib.ExitStack() as held:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((folder / LOCK_NAME).open("a"))
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    logger.info("another process hashes weights; waiting for its digests")
                    fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:
                pass  # `save` logs that nothing is kept
        yield


def pieces_of(num_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Return where the pieces of a file begin and end."""
    starts = range(0, num_bytes, piece_bytes)
    return [(begin, min(begin + piece_bytes, num_bytes)) for begin in starts]


def _hash_files(files: Sequence[PlainBytes], progress: Progress | None) -> list[tuple[str, bytes]]:
    """Return the digest of each file and the sums of its pieces; several threads hash pieces of all
    files.
    """
    pieces = [(file, *ends) for file in files for ends in pieces_of(file.num_bytes)]
    digests = {file.path: hashlib.sha256() for file in files}
    sums = {file.path: bytearray() for file in files}
    total, done = sum(file.num_bytes for file in files), 0

    def hashed(piece: tuple[PlainBytes, int, int]) -> tuple[bytes, bytes]:
        content = piece[0].read(*piece[1:])
        return hashlib.sha256(content).digest(), sum_of(content)

    # hashlib releases the interpreter for pieces of this size.
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        for (file, begin, end), (digest, checksum) in zip(
            pieces, threads.map(hashed, pieces), strict=True
        ):
            digests[file.path].update(digest)
            sums[file.path] += checksum
            done += end - begin
            if progress is not None:
                progress(done, total)
    return [(digests[file.path].hexdigest(), bytes(sums[file.path])) for file in files]


class _Cache:
    """Digests of files by their identity in the file system."""

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / CACHE_NAME
        self._digests: dict[str, str] = {}
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError, msgspec.MsgspecError):
                self._digests = msgspec.json.decode(self._path.read_bytes(), type=dict[str, str])

    def digest(self, key: str) -> str | None:
        """Return the digest of a file, or None if it is not known."""
        return self._digests.get(key)

    def sums(self, key: str) -> bytes | None:
        """Return the sums of a file's pieces, or None if they are not known, or an earlier release
        hashed the file.
        """
        found = self._digests.get(key + _SUMS)
        with contextlib.suppress(ValueError):
            return None if found is None else bytes.fromhex(found)
        return None

    def put(self, key: str, digest: str, sums: bytes) -> None:
        """Remember the digest of a file, and the sums of its pieces."""
        self._digests[key] = digest
        self._digests[key + _SUMS] = sums.hex()

    def save(self) -> None:
        """Write the cache whole or not at all."""
        if self._path is None:
            return
        entries = [each for each in self._digests.items() if not each[0].startswith(_CHANGED)]
        kept = dict(entries[-MAX_CACHED:])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._path.parent, delete=False) as file:
                file.write(msgspec.json.encode(kept))
            Path(file.name).replace(self._path)
        except OSError as error:
            logger.warning("digests of weights are not kept: %s: %s", self._path, error.strerror)
