"""Compiles this folder's C++ for the machine at hand and loads it.

Kept as `native-DIGEST.so` in a folder where one is given; compiling takes a few seconds. Calls go
by ctypes, so neither torch's headers nor Python's are needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = [Path(__file__).with_name(f"{name}.cpp") for name in ("experts", "mla_decode", "glue")]
_SHARED = Path(__file__).with_name("tiles.h")
_FLAGS = (
    "-O3", "-std=c++17", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-fopenmp",
    "-shared", "-fPIC",
)  # fmt: skip
_NEEDED = frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16"))
_COMPILE_S = 120.0


class CannotBuild(Exception):
    """The code cannot run here; the message says why."""


def why_not() -> str | None:
    """Return why native code cannot run on this machine, None if it can."""
    try:
        code()
    except CannotBuild as error:
        return str(error)
    return None


_kept_in: list[Path] = []


def keep_in(folder: Path) -> None:
    """Keep compiled code in `folder` from now on; without one it is compiled in each process."""
    _kept_in[:] = [folder]


def code() -> ctypes.CDLL:
    """Return the loaded code, compiling it unless it is kept from an earlier start; tried once.

    Raises:
        CannotBuild: the CPU lacks instructions, or there is no compiler, or it fails.
    """
    found = _tried()
    if isinstance(found, CannotBuild):
        raise found
    return found


@functools.cache
def _tried() -> ctypes.CDLL | CannotBuild:
    try:
        return _loaded()
    except CannotBuild as error:
        return error


def _loaded() -> ctypes.CDLL:
    missing = sorted(_NEEDED - _cpu_flags())
    if missing:
        raise CannotBuild(f"this CPU has no {', '.join(missing)}")
    text = b"".join(path.read_bytes() for path in (_SHARED, *_SOURCES))
    digest = hashlib.sha256(text + " ".join(_FLAGS).encode()).hexdigest()[:16]
    try:
        with tempfile.TemporaryDirectory() as passing:
            folder = _checked(_kept_in[0]) if _kept_in else Path(passing)
            kept = folder / f"native-{digest}.so"
            if not kept.exists():
                _compile(kept)
            return ctypes.CDLL(str(kept))
    except OSError as error:
        raise CannotBuild(f"compiled code cannot be kept or loaded: {error}") from error


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    flags = [line.partition(":")[2] for line in text.splitlines() if line.startswith("flags")]
    return frozenset(flags[0].split()) if flags else frozenset()


def _checked(folder: Path) -> Path:
    """Return a folder that only this user can write to: what lies in it is run."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = folder.stat()
    if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
        raise CannotBuild(f"others may write to {folder}: chmod go-w it, or set XDG_CACHE_HOME")
    return folder


def _compile(target: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotBuild("there is no C++ compiler: install g++")
    descriptor, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        done = subprocess.run(
            [compiler, *_FLAGS, *map(str, _SOURCES), "-o", name],
            capture_output=True, text=True, timeout=_COMPILE_S, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CannotBuild(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        os.replace(name, target)  # whole or not at all, also for one who compiles beside us
    except subprocess.TimeoutExpired as error:
        raise CannotBuild(f"{compiler} took more than {_COMPILE_S:.0f} s") from error
    finally:
        Path(name).unlink(missing_ok=True)
