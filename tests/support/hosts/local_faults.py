"""What is wrong with a host besides its network: a clock that is off, a disk that is slow or full.

`local_faults.c` is loaded into its programs before libc. A small file in memory tells it what to
do, so faults begin and end while programs run. Without a C compiler hosts have no such faults.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import shlex
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
_LIBRARY, _FILE, _DISK = "/home/faults.so", "/home/faults", "/home/disk"
_FORMAT = struct.Struct("=qqq")


@functools.cache
def _library() -> Path | None:
    """Return the compiled library; None where there is no compiler."""
    if (compiler := shutil.which("cc")) is None:
        return None
    folder = tempfile.mkdtemp(prefix="host-faults-")
    atexit.register(shutil.rmtree, folder)
    library = Path(folder) / "faults.so"
    flags = ["-O2", "-Wall", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(_SOURCE), "-o", str(library), "-ldl"], check=True)
    return library


class LocalFaults:
    """The faults of one host. It has none at first."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "faults"
        self._values: dict[str, float] = {"clock_s": 0.0, "disk_s": 0.0, "full": False}
        self._write()

    def set(self, **values: float) -> None:
        """Change some. The test is skipped where that is not possible."""
        if _library() is None:
            pytest.skip("no C compiler, so no faults of clocks and disks")
        self._values |= values
        self._write()

    def _write(self) -> None:
        clock_s, disk_s, full = self._values.values()
        packed = _FORMAT.pack(round(clock_s * 1e9), round(disk_s * 1e9), int(full))
        with self._file.open("a+b") as file:
            file.truncate(_FORMAT.size)
            with mmap.mmap(file.fileno(), _FORMAT.size) as shown:
                shown[:] = packed

    @property
    def lines(self) -> list[str]:
        """What a host does at its boot, in its shell."""
        library = _library()
        found = [(self._file, _FILE), *([(library, _LIBRARY)] if library is not None else [])]
        return [
            line
            for source, target in found
            for line in (
                f"touch {target}", f"mount --bind {shlex.quote(str(source))} {target}",
            )
        ]  # fmt: skip

    @property
    def variables(self) -> list[str]:
        """What its programs have in their environment, for env(1)."""
        if _library() is None:
            return []
        return [f"LD_PRELOAD={_LIBRARY}", f"FAULTS_FILE={_FILE}", f"FAULTS_DISK={_DISK}"]
