"""Triton's code for the host, compiled when an image is built, so that it needs no C compiler
later.

When a process first uses a GPU, Triton compiles one module, `cuda_utils`, which loads and launches
kernels. `python -m mooncake_kernels.triton.host_code` compiles it beforehand, without a GPU. Then
Triton uses the result (`use_compiled`); otherwise it compiles as usual. Needs no torch.
"""

from __future__ import annotations

import hashlib
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import triton
from triton import knobs

COMPILED = Path(__file__).with_name("compiled")
NAME = "cuda_utils"
SOURCE = Path(triton.__file__).with_name("backends") / "nvidia" / "driver.c"
_DRIVER = "libcuda.so.1"
_GCC = ("gcc", "-shared", "-fPIC")


def use_compiled() -> None:
    """Make Triton load what was compiled beforehand, if anything was."""
    if COMPILED.is_dir():
        knobs.build.impl = _found


def _found(name: str, source: str, *_: object) -> str:
    """Return the file of a module that Triton asks for, in the form of Triton's `BuildImpl`.

    Raises:
        RuntimeError: it was compiled from another source, or not at all.
    """
    found = _kept(COMPILED, name, Path(source))
    if not found.exists():
        raise RuntimeError(
            f"{name} of Triton {triton.__version__} is not among what was compiled beforehand "
            f"({COMPILED}): run `python -m mooncake_kernels.triton.host_code` with a C compiler"
        )
    return str(found)


def _kept(folder: Path, name: str, source: Path) -> Path:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return folder / f"{name}-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_into(folder: Path) -> Path:
    """Compile `cuda_utils`. It is linked with the driver of the machine on which it runs."""
    folder.mkdir(parents=True, exist_ok=True)
    target = _kept(folder, NAME, SOURCE)
    includes = (SOURCE.parent / "include", sysconfig.get_paths()["include"])
    with tempfile.TemporaryDirectory() as place:
        stand_in = f"{place}/{_DRIVER}"  # has only the name of the driver's library
        own = ["-x", "c", "/dev/null", f"-Wl,-soname,{_DRIVER}", "-o", stand_in]
        subprocess.run([*_GCC, *own], check=True)
        own = [str(SOURCE), "-O3", "-Wno-psabi", *(f"-I{each}" for each in includes)]
        linked = [f"-L{place}", "-Wl,--no-as-needed", f"-l:{_DRIVER}"]
        subprocess.run([*_GCC, *own, "-o", str(target), *linked], check=True)
    target.chmod(0o755)
    return target


if __name__ == "__main__":
    print(compile_into(COMPILED))
