"""Compiled kernels that came with an image or a volume, made by `ahead`. They are read, never
written: what they lack is compiled into Triton's own cache, as ever.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections import Counter
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.runtime.cache import FileCacheManager

from mooncake_kernels import trusted

_log = logging.getLogger(__name__)
_SOURCES = Path(__file__).parent
_READ, _COMPILED = "read", "compiled"
_MEMBERS = "__grp__"
"""Triton's prefix for the file that lists what belongs to one kernel."""

_folders: list[Path] = []
_counts: Counter[str] = Counter()
_counting = threading.Lock()


def name_of(arch: int) -> str:
    """Return the name of the folder with kernels for GPUs of this capability, this Triton, this
    torch and these sources.
    """
    files = [*_SOURCES.glob("*.py"), _SOURCES.parent / "tuning.py"]
    files += (_SOURCES.parent / "tuned").glob("*.json")
    text = b"".join(path.name.encode() + path.read_bytes() for path in sorted(files))
    source = hashlib.sha256(text).hexdigest()[:12]
    return f"sm_{arch}-triton_{triton.__version__}-torch_{torch.__version__}-{source}"


def use(folder: Path, arch: int) -> bool:
    """Have Triton look for compiled kernels in `folder` first, in the part for this capability,
    Triton, torch and sources. Return whether there is one; if not, a log line says why.
    """
    _folders.clear()
    wanted = name_of(arch)
    reason = None
    try:
        place = trusted.checked(folder)
    except trusted.Untrusted as error:
        reason = str(error)
    else:
        if not (place / wanted).is_dir():
            others = ", ".join(sorted(each.name for each in place.glob("sm_*"))) or "none"
            reason = f"it has no {wanted} (it has: {others})"
    if reason is not None:
        _log.warning(
            "the compile cache %s is not used: %s; kernels are compiled now", folder, reason
        )
        return False
    _folders.append(place / wanted)
    knobs.cache.manager_class = ShippedFirst
    _log.info("compiled kernels are read from %s", _folders[0])
    return True


def log_use() -> None:
    """Log how many kernels were read from the shipped ones so far, and how many were not among
    them.
    """
    if _folders:
        _log.info(
            "%d kernels were read from the compile cache, %d were not in it and were compiled, or "
            "read from Triton's own cache", _counts[_READ], _counts[_COMPILED],
        )  # fmt: skip


class ShippedFirst(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Triton's cache of one kernel: the shipped files if they are whole, else Triton's own."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._shipped = None if override or dump or not _folders else _folders[0] / key

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the files of a kernel by name; None: it must be compiled."""
        found = None if self._shipped is None else _group(self._shipped, filename)
        with _counting:
            _counts[_COMPILED if found is None else _READ] += 1
        if found is not None:
            return found
        own: dict[str, str] | None = super().get_group(filename)
        return own


def _group(folder: Path, filename: str) -> dict[str, str] | None:
    """Return the shipped files of a kernel. Their list names the place where they were made, so
    only their names count.
    """
    try:
        listed = json.loads((folder / f"{_MEMBERS}{filename}").read_text(encoding="utf-8"))
        names = [os.path.basename(name) for name in listed["child_paths"]]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    found = {name: str(folder / name) for name in names}
    return found if found and all(map(os.path.exists, found.values())) else None
