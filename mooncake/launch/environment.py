"""Environment variables that must stand before a process starts or torch is imported.

OpenMP threads wait asleep: several workers share few cores and spinning costs more than waking. The
heap is kept: glibc otherwise gives large buffers back after each step, and page faults then take a
good part of a prefill on CPU. Nothing looks anything up on a network.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""For every process of ours, Ray's own included."""

COMPUTE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
}
"""For processes that run the model."""


def missing(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a computing process lacks; what somebody set on purpose stays as it is."""
    return {name: value for name, value in {**QUIET, **COMPUTE}.items() if name not in environ}


def restart_with(environ: Mapping[str, str]) -> None:
    """Replace this process by itself with the settings of a computing process, if it lacks any.

    glibc reads its settings when a process starts, so they cannot be set later. Returns when there
    is nothing to set.
    """
    lacking = missing(environ)
    if lacking:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**environ, **lacking})
