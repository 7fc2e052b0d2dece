"""Says whether others may write to a directory of compiled code, which is run. Needs no torch."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def why_not(folder: Path) -> str | None:
    """Return why code in `folder` must not be run, None if it may be.

    All in it, and each directory above it, must belong to this user or to root, and nobody else may
    write to it. In a directory above it others may write if it is sticky, as /tmp is: what lies
    there cannot be replaced by them. Links within `folder` are refused.
    """
    try:
        folder = folder.resolve(strict=True)
        for above in folder.parents:
            if reason := _of(above, os.stat(above), in_sticky=True):
                return reason
        for place, names, files in os.walk(folder, onerror=_raise):
            for path in (Path(place), *(Path(place, name) for name in (*names, *files))):
                if reason := _of(path, os.lstat(path)):
                    return reason
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _raise(error: OSError) -> None:
    raise error


def _of(path: Path, seen: os.stat_result, *, in_sticky: bool = False) -> str | None:
    if stat.S_ISLNK(seen.st_mode):
        return f"{path} is a link"
    if seen.st_uid not in (0, os.getuid()):
        return f"{path} belongs to user {seen.st_uid}"
    if seen.st_mode & 0o022 and not (in_sticky and seen.st_mode & stat.S_ISVTX):
        return f"others may write to {path}: chmod go-w it"
    return None
