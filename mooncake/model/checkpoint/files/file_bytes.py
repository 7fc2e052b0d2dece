"""The bytes of one weights file, mapped, which any number of threads may read at random at once;
and the JSON files in which a checkpoint states what its weights are. Others wrote those, so they
are read with care.
"""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from mooncake.base import CheckpointError


class FileBytes(Protocol):
    """The bytes of one weights file, however they are stored."""

    path: Path
    num_bytes: int

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes [begin, end), which must be within the file, as writable memory. Writing to
        it changes no file.

        Raises:
            CheckpointError: they are not what was stored.
        """


class PlainBytes:
    """Reads the bytes of an unencrypted file. `read` returns views and copies nothing."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError when the file cannot be read."""
        self.path = path
        found, stat = mapped(path, private=True)
        self._view = memoryview(found or b"")
        self.identity = identity_of(stat)
        """The identity of the mapped file. Another file may be at `path` by now."""
        self.num_bytes = len(self._view)

    def read(self, begin: int, end: int) -> memoryview:
        return self._view[begin:end]


def identity_of(stat: os.stat_result) -> str:
    """Return values that change whenever a file's content may have: ctime cannot be set back."""
    return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}"


def mapped(path: Path, *, private: bool = False) -> tuple[mmap.mmap | None, os.stat_result]:
    """Return the mapped file at `path` (None: it is empty), and what the file system says of it.

    private: the memory may be written to, and the file stays unchanged.

    Raises:
        CheckpointError: it cannot be read.
    """
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if file.seek(0, 2) == 0:
                return None, stat
            return mmap.mmap(file.fileno(), 0, access=access), stat
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


FILE_NAME = re.compile(r"[^/\0]{1,240}\.safetensors")
DIGEST = re.compile(r"[0-9a-f]{64}")

Statement = TypeVar("Statement")


def read_statement(path: Path, kind: type[Statement], what: str) -> Statement | None:
    """Return the content of the file at `path`, or None if there is no such file.

    Raises:
        CheckpointError: it cannot be read, or does not state `what`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: does not say {what} ({error!s:.200})") from error
