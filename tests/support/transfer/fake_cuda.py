"""The CUDA driver without a GPU (`fake_cuda.c`), compiled when a test asks for it."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mooncake.model.device.cuda_memory import Driver

SOURCE = Path(__file__).with_name("fake_cuda.c")


def headers() -> list[Path]:
    """Return the folders here that hold NVIDIA's cuda.h: a CUDA build of torch brings one."""
    roots = [Path(folder) / "nvidia" for folder in sys.path]
    found = [header for root in roots for header in root.glob("*/include/cuda.h")]
    return [header.parent for header in (*found, Path("/usr/local/cuda/include/cuda.h"))
            if header.exists()]  # fmt: skip


@functools.cache
def _compiled() -> bytes:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: there is no `cc` here")
    checked = [flag for folder in headers()[:1] for flag in ("-DWITH_CUDA_H", f"-I{folder}")]
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "libcuda.so"
        command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, *checked, "-o", str(library), str(SOURCE)], check=True)
        return library.read_bytes()


class FakeCuda:
    """A driver of its own: nothing of another test's is in it."""

    def __init__(self, directory: Path) -> None:
        path = directory / "libcuda.so"
        path.write_bytes(_compiled())
        self.driver = Driver(str(path))
        self._library = ctypes.CDLL(str(path))
        self._library.fake_log.restype = ctypes.c_char_p
        self._library.fake_allocate.argtypes = (ctypes.c_size_t,)
        self._library.fake_allocate.restype = ctypes.c_uint64

    def set(self, *, ordering: int = 0, flushes: int = 1, dmabufs: int = 1) -> None:
        """Be a GPU with these attributes."""
        self._library.fake_gpu(ordering, flushes, dmabufs)

    def fail(self, name: str, code: int) -> None:
        """Have a function fail from now on."""
        self._library.fake_fail(name.encode(), code)

    def allocate(self, num_bytes: int) -> int:
        """Return the address of device memory, which the host cannot touch."""
        return int(self._library.fake_allocate(num_bytes))

    def calls(self) -> list[str]:
        """Return what was asked since the last look, but for contexts; arguments as numbers."""
        log: bytes = self._library.fake_log()
        self._library.fake_forget_log()
        return [line for line in log.decode().splitlines() if "Ctx" not in line]
