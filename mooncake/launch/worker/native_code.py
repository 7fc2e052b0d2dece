"""Compiles the engines' native code while the rest of a first start runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from mooncake_kernels.native import build

from mooncake.model.options import ModelOptions

END_S = 10.0
POLL_S = 0.05
"""Compilers that are told to end have this long; then they are told again, because a new one may
just have begun.
"""
_MAIN = """\
import signal, sys
from pathlib import Path
def end(*_):
    signal.signal(signal.SIGTERM, lambda *_: None)  # the next ones are for compilers
    raise KeyboardInterrupt
signal.signal(signal.SIGTERM, end)
from mooncake_kernels.native import build
build.limit_to(sys.argv[2])
build.keep_in(Path(sys.argv[1]))
build.why_not()
"""


@contextlib.contextmanager
def compiled_meanwhile(options: ModelOptions, dtype: str) -> Iterator[None]:
    """Compile what engines of `dtype` will load, unless an earlier start has left it.

    A separate process compiles, and ends with the context. Engines that start meanwhile wait for it
    by the lock of the folder. What it cannot compile they try themselves, and they report why it
    fails.
    """
    if options.cache_dir is None or options.device != "cpu" or dtype != "bfloat16":
        yield
        return
    folder = Path(options.cache_dir)
    build.limit_to(options.cpu_isa)
    build.look_in(options.compile_cache)
    if build.unlikely(folder) is not None or build.is_made(folder):
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _MAIN, str(folder), options.cpu_isa or ""],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,  # its compilers end with it; Ctrl-C is for us
    )  # fmt: skip
    try:
        yield
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its compilers. Its temporary files go with it."""
    for _ in range(round(END_S / POLL_S)):
        os.killpg(process.pid, signal.SIGTERM)  # not collected yet: its number is still its own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
