"""Says whether others may write to a directory of compiled code, which is run. Needs no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path


class Untrusted(Exception):
    """Others may have written the code in a directory; the message says why."""


def checked(folder: Path) -> Path:
    """Return the place of `folder` without links, if code in it may be run. Read the code from
    there: a link on the way to it may lie where others can change it.

    All in it, and each directory above it, must belong to this user or to root, and nobody else may
    write to it. In a directory above it others may write if it is sticky, as /tmp is: what lies
    there cannot be replaced by them. Links within `folder` are refused.

    Raises:
        Untrusted: it must not be run.
    """
    try:
        folder = folder.resolve(strict=True)
        for above in folder.parents:
            _check(above, os.stat(above), in_sticky=True)
        for place, names, files in os.walk(folder, onerror=_raise):
            for path in (Path(place), *(Path(place, name) for name in (*names, *files))):
                _check(path, os.lstat(path))
    except OSError as error:
        raise Untrusted(f"{error.filename}: {error.strerror}") from error
    return folder


def _raise(error: OSError) -> None:
    raise error


def _check(path: Path, seen: os.stat_result, *, in_sticky: bool = False) -> None:
    if stat.S_ISLNK(seen.st_mode):
        raise Untrusted(f"{path} is a link")
    if seen.st_uid not in (0, os.getuid()):
        raise Untrusted(f"{path} belongs to user {seen.st_uid}")
    if seen.st_mode & 0o022 and not (in_sticky and seen.st_mode & stat.S_ISVTX):
        raise Untrusted(f"others may write to {path}: chmod go-w it")
