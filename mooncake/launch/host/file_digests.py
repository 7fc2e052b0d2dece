"""Makes and compares lists of the digests of a checkpoint's files, in the format of `sha256sum`.

Stateless. It ignores files of a download tool (`.cache`), marks that begin with `.complete`, and
the checkpoint's own list (`weights-digests.json`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from mooncake.base import CheckpointError, ConfigError
from mooncake.model.checkpoint.files.revision import STATED_NAME

NUM_THREADS = 4
WEIGHTS = ".safetensors"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_NAMED = 5
"""Files that an error names at most."""


def digests_of(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file below `folder` by its path there, or only of `names` if
    given.

    Raises:
        CheckpointError: a file cannot be read.
    """
    wanted = sorted(files_of(folder) if names is None else names)
    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            found = threads.map(lambda name: _digest(folder / name), wanted)
            return dict(zip(wanted, found, strict=True))
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error


def files_of(folder: Path) -> set[str]:
    """Return the paths of all files below `folder`. Raises CheckpointError when there is no such
    folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: this is not a directory; give that of a checkpoint")
    found = (each.relative_to(folder) for each in folder.rglob("*") if not each.is_dir())
    return {
        each.as_posix()
        for each in found
        if each.parts[0] not in (".cache", STATED_NAME)
        and not each.parts[0].startswith(".complete")
    }


def read_list(file: Path) -> dict[str, str]:
    """Return the digests in a list, by file.

    Raises:
        ConfigError: the list cannot be read, a line is not in `sha256sum`'s format, or a path
            leaves the folder.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"digests: cannot read {file}: {error}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        matched = _LINE.fullmatch(line)
        path = PurePosixPath(matched[2]) if matched else PurePosixPath("..")
        if matched is None or path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"digests: line {number} of {file} is not a digest and a path, as "
                "`sha256sum` prints them; `mooncake model digests DIR` writes such a list"
            )
        found[path.as_posix()] = matched[1]
    if not found:
        raise ConfigError(
            f"digests: {file} lists no file; `mooncake model digests DIR` writes such a list"
        )
    return found


def check(folder: Path, wanted: Mapping[str, str], *, weights: bool = True) -> int:
    """Compare all files below `folder` with a list and return how many there are. The list's files
    of weights may be missing if `weights` is false.

    Raises:
        CheckpointError: a file is missing, is not listed, or has other contents.
    """
    there = files_of(folder)
    needed = {name for name in wanted if weights or not name.endswith(WEIGHTS)}
    problems = [f"{name} is missing" for name in sorted(needed - there)]
    problems += [f"{name} is not in the list" for name in sorted(there - wanted.keys())]
    found = digests_of(folder, there & wanted.keys())
    problems += [
        f"{name} has the SHA-256 {digest}, and the list says {wanted[name]}"
        for name, digest in found.items()
        if digest != wanted[name]
    ]
    if problems:
        more = len(problems) - _NAMED
        raise CheckpointError(
            f"{folder} is not what the list of digests says: {'; '.join(problems[:_NAMED])}"
            f"{f'; and {more} more' if more > 0 else ''}. Delete what is wrong and fetch it again, "
            "or correct the list if you trust these files"
        )
    return len(found)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
