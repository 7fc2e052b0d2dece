"""Compiles this folder's C++ for this machine and loads it. Needs no torch.

The result is kept as `native-DIGEST.so` if a folder is given; compiling takes a few seconds.
`python -m mooncake_kernels.native.build` compiles beforehand, as our images do. Its result is
loaded from `compiled` if it has these sources and this CPU's instructions; then no compiler is
needed. Calls go by ctypes, so they need neither torch's nor Python's headers, and work with any
release of torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mooncake_kernels import trusted

_log = logging.getLogger(__name__)
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
_HEADERS = ("amx.h", "lanes.h", "rows.h", "tiles.h")
_SOURCES = (
    "experts.cpp",
    "linear.cpp",
    "glue.cpp",
    "fixed.cpp",
    "mla_decode.cpp",
    "mla_prefill.cpp",
    "sampling.cpp",
)
_TELL_S = 30.0
"""A compiler may take as long as it needs, and is logged this often meanwhile."""
_SLOW = (
    "%s has taken %.0f s for %s so far; a start waits for it once, and not at all if `mooncake "
    "compile` has made the code before"
)
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
COMPILED = Path(__file__).with_name("compiled")
"""The folder of an image's compiled code. It is as trusted as the sources beside it."""


@dataclass(frozen=True)
class Isa:
    """A set of instructions for which the sources are compiled."""

    name: str
    needed: frozenset[str]
    """The names of the needed features in /proc/cpuinfo."""
    flags: tuple[str, ...]


AVX512 = Isa(
    "AVX512_BF16",
    frozenset(("avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512vbmi")),
    ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vbmi"),
)
AMX = Isa(
    "AMX_BF16",
    AVX512.needed | {"amx_tile", "amx_bf16"},
    (*AVX512.flags, "-mamx-tile", "-mamx-bf16"),
)
AVX2 = Isa(
    "AVX2",
    frozenset(("avx2", "fma", "f16c")),
    ("-mavx2", "-mfma", "-mf16c"),
)
ISAS = (AMX, AVX512, AVX2)
"""The best first."""
_LIMITS = {
    **dict.fromkeys(("SSE41", "AVX"), frozenset[str]()),
    **dict.fromkeys(
        ("AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"), AVX2.needed
    ),
    **dict.fromkeys(
        ("AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"), AVX2.needed | AVX512.needed
    ),
}
"""The instructions that code may use for these values of ONEDNN_MAX_CPU_ISA; for others, all of
them.
"""
WIDTH = 64
"""The widths of compiled products must be multiples of this, for all instructions."""


def fits(*widths: int) -> bool:
    """Return whether compiled products support matrices of these widths."""
    return not any(width % WIDTH for width in widths)


class CannotBuild(Exception):
    """The code cannot run here; the message says why."""


def why_not() -> str | None:
    """Return why native code cannot run on this machine, None if it can."""
    try:
        code()
    except CannotBuild as error:
        return str(error)
    return None


def unlikely(kept_in: Path | None = None) -> str | None:
    """Return why native code cannot run here, None if it probably can, without compiling it. Plans
    use this. `kept_in`: where code from an earlier start may lie.
    """
    try:
        if not is_made(kept_in):
            _compiler()
    except CannotBuild as error:
        return str(error)
    return None


def is_made(kept_in: Path | None = None) -> bool:
    """Return whether code for this CPU is shipped or lies in `kept_in`. Raises CannotBuild when no
    code supports this CPU.
    """
    places = [COMPILED, *_others, *([] if kept_in is None else [kept_in])]
    return any(_kept(place, isa()).exists() for place in places)


def isa() -> Isa:
    """Return the instructions for which code is compiled here. Raises CannotBuild when there are
    none.
    """
    here = _usable_flags()
    for wanted in ISAS:
        if wanted.needed <= here and (wanted is not AMX or has_amx()):
            return wanted
    raise CannotBuild(f"this CPU has no {', '.join(sorted(AVX2.needed - here))}")


@functools.cache
def _tiles_permitted() -> bool:
    """Ask Linux to let this process use AMX's tiles, which it keeps from processes that do not ask.
    Return whether it does.
    """
    try:
        answer: int = ctypes.CDLL(None).syscall(
            _ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA
        )
    except (OSError, AttributeError):  # no Linux
        return False
    return answer == 0


_limit: list[str] = []


def limit_to(onednn_isa: str | None) -> None:
    """Use no more instructions than this value of ONEDNN_MAX_CPU_ISA allows oneDNN."""
    _limit[:] = [(onednn_isa or "").upper()]


def _usable_flags() -> frozenset[str]:
    limit = _LIMITS.get(_limit[0]) if _limit else None
    return cpu_flags() if limit is None else cpu_flags() & limit


_others: list[Path] = []
"""Folders of code that was compiled elsewhere, besides `COMPILED`."""


def look_in(folder: str | None) -> None:
    """Load code from this folder too, if `compile_all` has left some there for this CPU and these
    sources; None: from no further folder. A folder that others can write to is not used, and the
    log says so.
    """
    _others.clear()
    if folder is not None:
        try:
            _others.append(trusted.checked(Path(folder)))
        except trusted.Untrusted as error:
            _log.warning("the compile cache %s is not used: %s", folder, error)


_kept_in: list[Path] = []


def keep_in(folder: Path) -> None:
    """Keep compiled code in `folder` from now on. Without a folder each process compiles it."""
    _kept_in[:] = [folder]


def kept_in() -> Path | None:
    """Return the folder that keeps the code, if there is one and it belongs to this user alone."""
    try:
        return _checked(_kept_in[0]) if _kept_in else None
    except (CannotBuild, OSError):
        return None


def code() -> ctypes.CDLL:
    """Return the loaded code. Compile it unless it is kept from an earlier start. This is tried
    only once.

    Raises:
        CannotBuild: the CPU lacks instructions, there is no compiler, or it fails.
    """
    found = _tried(isa())
    if isinstance(found, CannotBuild):
        raise found
    return found[0]


def used() -> str:
    """Return which code is loaded here and for which instructions, or why there is none."""
    if reason := why_not():
        return f"none, and libraries compute instead: {reason}"
    found = _tried(isa())
    assert not isinstance(found, CannotBuild)
    return f"{found[1]}, for {isa().name}"


@functools.cache
def _tried(wanted: Isa) -> tuple[ctypes.CDLL, str] | CannotBuild:
    try:
        return _loaded(wanted)
    except CannotBuild as error:
        return error


def _loaded(wanted: Isa) -> tuple[ctypes.CDLL, str]:
    """Return the code and its origin."""
    try:
        for shipped in (_kept(folder, wanted) for folder in (COMPILED, *_others)):
            if shipped.exists():
                try:
                    return ctypes.CDLL(str(shipped)), f"shipped as {shipped}"
                except OSError as error:  # made for another C library, perhaps
                    _log.warning("%s cannot be loaded, so it is compiled here: %s", shipped, error)
        with tempfile.TemporaryDirectory() as passing:
            kept = _kept(_checked(_kept_in[0]) if _kept_in else Path(passing), wanted)
            with _alone(kept.parent):
                if is_new := not kept.exists():
                    _compile(kept, wanted)
            return ctypes.CDLL(str(kept)), "compiled now" if is_new else f"kept as {kept}"
    except OSError as error:
        raise CannotBuild(f"compiled code cannot be kept or loaded: {error}") from error


def _kept(folder: Path, wanted: Isa) -> Path:
    """Return the file that keeps the code of these sources and flags."""
    return folder / f"native-{digest(wanted)}.so"


def digest(wanted: Isa | None = None) -> str:
    """Return the id of the code of these sources and flags; None: for this CPU."""
    wanted = wanted or isa()
    text = b"".join(_path(name).read_bytes() for name in (*_HEADERS, *_SOURCES))
    return hashlib.sha256(text + " ".join((*_FLAGS, *wanted.flags)).encode()).hexdigest()[:16]


def _path(name: str) -> Path:
    return Path(__file__).with_name(name)


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return this CPU's features, as /proc/cpuinfo names them; nothing when that is missing."""
    return frozenset(_cpu("flags").split())


@functools.cache
def cpu_name() -> str:
    """Return the name of this CPU with its family and model; some machines give all one name."""
    return " ".join(_cpu(field) for field in ("model name", "cpu family", "model"))


def _cpu(field: str) -> str:
    """Return the entry of the first CPU in /proc/cpuinfo; nothing when that is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    parts = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in parts if name.strip() == field), "")


def has_bf16() -> bool:
    """Return whether this CPU multiplies bfloat16. On other CPUs a library emulates it."""
    return bool({"avx512_bf16", "amx_bf16"} & _usable_flags())


def has_amx() -> bool:
    """Return whether this CPU multiplies tiles of bfloat16, and Linux lets this process do it."""
    return "amx_bf16" in _usable_flags() and _tiles_permitted()


def _checked(folder: Path) -> Path:
    """Return a folder that only this user can write to, because its content is run."""
    folder.mkdir(parents=True, exist_ok=True)
    seen = folder.stat()
    if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
        raise CannotBuild(f"others may write to {folder}: chmod go-w it, or set XDG_CACHE_HOME")
    return folder


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        shipped = ", ".join(sorted(file.name for file in COMPILED.glob("native-*.so")))
        other = f" ({COMPILED} has code of other sources or instructions: {shipped})"
        raise CannotBuild(f"there is no C++ compiler: install g++{other if shipped else ''}")
    return compiler


def _compile(target: Path, wanted: Isa) -> None:
    """Compile the sources in parallel, and link them."""
    flags = [_compiler(), *_FLAGS, *wanted.flags]
    with tempfile.TemporaryDirectory(dir=target.parent) as passing:
        made = {str(_path(name)): f"{passing}/{name}.o" for name in _SOURCES}
        with ThreadPoolExecutor() as threads:
            compiled = threads.map(
                lambda source: _run(*flags, "-c", source, "-o", made[source]), made
            )
            list(compiled)
        whole = f"{passing}/whole.so"
        _run(*flags, *made.values(), "-o", whole)
        Path(whole).chmod(0o700)
        os.replace(whole, target)  # whole or not at all, also for another process that compiles


def _run(*words: str) -> None:
    """Run a compiler until it has ended, however slow the machine is. The last word is what it
    makes.
    """
    waited_s, said = 0.0, None
    with subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while said is None:
                try:
                    said = process.communicate(timeout=_TELL_S)[1]
                except subprocess.TimeoutExpired:
                    waited_s += _TELL_S
                    _log.info(_SLOW, words[0], waited_s, Path(words[-1]).name)
        finally:
            process.kill()
    if process.returncode:
        raise CannotBuild(f"{words[0]} failed: {said.strip()[-500:]}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, so that one process at a time compiles for it. Some file systems,
    such as NFS, do not lock folders. Then each process compiles.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: a fork may have it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def compile_all(folder: Path) -> list[Path]:
    """Compile for all instructions that the code supports, whatever this CPU has. Return the files.

    Raises:
        CannotBuild: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = [_kept(folder, wanted) for wanted in ISAS]
    for target, wanted in zip(made, ISAS, strict=True):
        _compile(target, wanted)
        target.chmod(0o755)
    return made


if __name__ == "__main__":
    for path in compile_all(COMPILED):
        print(path)
