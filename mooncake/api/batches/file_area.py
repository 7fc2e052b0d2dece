"""The contents of files: one file on disk for each, in the directory of batches.

A file that is being written has another name until it is whole, so a name in `store` always has
its contents. All functions block; they are called in threads, a bounded piece of work at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from mooncake.api.batches.lines import TextLine
from mooncake.base import ConfigError, Unavailable

PART = ".part"
"""The end of the name of a file that is being written."""
ABANDONED_S = 3600.0
"""A file that has no row is deleted after this many seconds without a write to it."""


class FileArea:
    """The folder of all contents."""

    def __init__(self, folder: Path) -> None:
        """Raise ConfigError if the folder cannot be made."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"batch-dir: {folder} cannot be made: {error}") from error

    def writer(self, file_id: str, owner: str) -> FileWriter:
        """Return what writes a new file. `owner` tells two gateways apart that write the same."""
        return FileWriter(self._folder / file_id, self._folder / f"{file_id}.{owner}{PART}")

    def read(self, file_id: str, offset: int, num_bytes: int) -> bytes:
        """Return at most so many bytes of a file.

        Raises:
            Unavailable: the file cannot be read.
        """
        try:
            with (self._folder / file_id).open("rb") as file:
                file.seek(offset)
                return file.read(num_bytes)
        except OSError as error:
            raise _failed("read", error) from error

    def is_gone(self, file_id: str) -> bool:
        """Return whether there is no such file: its disk was lost, or an operator deleted it."""
        return not (self._folder / file_id).exists()

    def delete(self, file_id: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            (self._folder / file_id).unlink()

    def sweep(self, known: Iterable[str], now: float) -> int:
        """Delete what a killed gateway has left: parts, and files that are not `known` and have
        rested for `ABANDONED_S`. Return how many.
        """
        names, count = set(known), 0
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):
                if entry.name not in names and entry.stat().st_mtime < now - ABANDONED_S:
                    os.unlink(entry.path)
                    count += 1
        return count


class FileWriter:
    """Writes one new file, in pieces."""

    def __init__(self, path: Path, part: Path) -> None:
        self._path = path
        self._part = part
        self._file: BinaryIO | None = None
        self.num_bytes = 0

    def write(self, piece: bytes) -> None:
        """Add a piece. Raises Unavailable if it cannot be written."""
        try:
            if self._file is None:
                self._file = self._part.open("wb")
            self._file.write(piece)
        except OSError as error:
            raise _failed("write", error) from error
        self.num_bytes += len(piece)

    def finish(self) -> None:
        """Make the file whole under its own name; it survives a loss of power from now on."""
        self.write(b"")
        assert self._file is not None
        try:
            with self._file as file:
                file.flush()
                os.fsync(file.fileno())
            self._part.replace(self._path)
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise _failed("write", error) from error

    def discard(self) -> None:
        """Delete what was written, unless it was finished."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # it writes what is left, and the disk may be full
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._part.unlink()


class LineReader:
    """Reads the lines of one file, in slices. Empty lines count and are left out."""

    def __init__(self, area: FileArea, file_id: str, max_line_bytes: int) -> None:
        self._area = area
        self._file_id = file_id
        self._max_line_bytes = max_line_bytes
        self._offset = 0
        self._number = 0
        self._rest = b""
        self._is_too_long = False
        self.at_end = False

    def read(self, num_bytes: int) -> list[TextLine]:
        """Read about so many bytes and return the lines that end in them. A line that is longer
        than the limit has no text.
        """
        piece = self._area.read(self._file_id, self._offset, num_bytes)
        self._offset += len(piece)
        self.at_end = not piece
        pieces = (self._rest + piece).split(b"\n")
        self._rest = pieces.pop()
        if self.at_end and (self._rest or self._is_too_long):
            pieces.append(self._rest)
            self._rest = b""
        found: list[TextLine] = []
        for text in pieces:
            self._number += 1
            if self._is_too_long or len(text) > self._max_line_bytes:
                found.append(TextLine(self._number, None))
            elif text.strip():
                found.append(TextLine(self._number, text))
            self._is_too_long = False
        if len(self._rest) > self._max_line_bytes:
            self._is_too_long, self._rest = True, b""
        return found


def _failed(what: str, error: OSError) -> Unavailable:
    return Unavailable(
        f"the server cannot {what} a file in `batch-dir`: {error.strerror or error}",
        retry_after_s=5.0,
    )
