"""Environment variables that must be set before a process starts or torch is imported.

OpenMP threads sleep while they wait: several workers share few cores, and spinning costs more than
waking. The heap keeps its memory: glibc otherwise returns large buffers after each step, and page
faults then take much of a prefill on CPU. Threads share two heaps: otherwise each thread keeps a
heap as large as its largest request. The heap asks for huge pages: reading weights from small pages
takes a sixth longer. No library looks anything up on a network.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mooncake.base import ConfigError

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
}
"""Variables for every process of ours, Ray's own included."""

EARLY = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Variables that still help after a process has started, if torch was not imported yet."""

OWN_SIGNALS = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""Variables for processes that handle signals themselves: Ray would print stacks on SIGTERM."""

RAY_WORKERS = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
"""Ray otherwise runs its workers, and with them engines that they start, behind all other
processes; and where pools take nearly all memory, it kills what looks after workers, again and
again: that frees none.
"""

BARE_LINES = {"RAY_DISABLE_WORKER_LOG_PREFIX": "1"}
"""Has Ray print workers' log lines unchanged, for machines to read. Set it before ray is
imported.
"""

LOOPBACK_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray's own sockets on 127.0.0.1, as on systems where Ray only runs on one machine. Set it
before ray is imported.
"""

COMPUTE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Variables for processes that run the model."""

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Variables of processes of workers, unless the user has set them, as Ray sets them in processes
that ask for no CPU. torch reads them when it is imported. Engines set their own number.
"""

SEEN_GPUS = "CUDA_VISIBLE_DEVICES"
"""The GPUs a process may see, by number or name; unset: all."""


def variables() -> Mapping[str, str]:
    """Return the environment of this process, for packages that must not read it themselves."""
    return os.environ


def missing(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `wanted` that `environ` lacks. Variables that are set stay as they
    are.
    """
    return {name: value for name, value in wanted.items() if name not in environ}


def with_ray(environ: Mapping[str, str], *, here_only: bool) -> dict[str, str]:
    """Return `environ` with the variables that must be set before a process imports ray.
    `here_only`: this Ray has no other machine.
    """
    wanted = {
        **QUIET, **OWN_SIGNALS, **RAY_WORKERS, **(LOOPBACK_RAY if here_only else {}),
    }  # fmt: skip
    return {**wanted, **environ}


def prepare_ray(environ: Mapping[str, str], *, here_only: bool, bare_lines: bool = False) -> None:
    """Set in this process, on top of `environ`, the variables that must be set before ray is
    imported.

    `here_only`: this Ray has no other machine. `bare_lines`: workers' log lines are printed without
    Ray's prefix.
    """
    wanted = with_ray(environ, here_only=here_only)
    os.environ.update(wanted | (BARE_LINES if bare_lines else {}))


def cache_dir() -> Path:
    """Return the folder for files that can be computed again: `$XDG_CACHE_HOME/mooncake`, otherwise
    `~/.cache/mooncake`. It is a folder that does not exist if the user has no home.
    """
    default = f"{os.environ.get('HOME', '/nonexistent')}/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default) / "mooncake"


def is_loopback(host: str) -> bool:
    """Return whether `host` is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


RAY_TLS = "RAY_USE_TLS"
RAY_TLS_FILES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Variables that name Ray's certificate, its key, and the certificates of those it trusts."""


def with_ray_tls(
    environ: Mapping[str, str], certfile: str, keyfile: str, ca_certs: str
) -> dict[str, str]:
    """Return `environ` with the variables that have Ray use TLS with these PEM files."""
    paths = [str(Path(path).absolute()) for path in (certfile, keyfile, ca_certs)]
    return {**environ, RAY_TLS: "1", **dict(zip(RAY_TLS_FILES, paths, strict=True))}


def ray_tls(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the files of `RAY_TLS_FILES`, or None if Ray does not use TLS.

    Raises:
        ConfigError: a file is missing.
    """
    if environ.get(RAY_TLS, "0").lower() not in ("1", "true"):
        return None
    for name in RAY_TLS_FILES:
        if not Path(environ.get(name) or "/nonexistent").is_file():
            raise ConfigError(f"{name}: {RAY_TLS}=1 needs it to name a file in PEM form")
    certfile, keyfile, ca_certs = (environ[name] for name in RAY_TLS_FILES)
    return certfile, keyfile, ca_certs


def check_ray_tls(host: str, environ: Mapping[str, str], *, without_tls: bool) -> None:
    """Refuse a Ray that would talk to other machines without TLS. `without_tls`: the operator
    allows that.

    Raises:
        ConfigError: other machines can reach `host`, and TLS is not set up or its files are
            missing.
    """
    if ray_tls(environ) is None and not (without_tls or is_loopback(host.strip("[]"))):
        raise ConfigError(
            f"ray-without-tls: at {host} Ray would speak without TLS, and anyone who reads its "
            f"token can run programs on all machines: set {RAY_TLS}=1, {', '.join(RAY_TLS_FILES)} "
            "on all machines (`mooncake certificates` makes the files), or give --ray-without-tls "
            "if the network is private"
        )


def restart_with(environ: Mapping[str, str]) -> None:
    """Start this process anew with the settings of a computing process, if it lacks any.

    glibc reads its settings when a process starts, so they cannot be set later. Returns when there
    is nothing to set.
    """
    lacking = missing({**QUIET, **COMPUTE}, environ)
    if lacking:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**environ, **lacking})
