"""Environment variables that must stand before a process starts or torch is imported.

OpenMP threads wait asleep: several workers share few cores and spinning costs more than waking. The
heap is kept: glibc otherwise gives large buffers back after each step, and page faults then take a
good part of a prefill on CPU. Threads share two heaps: each would otherwise keep one that is as
large as the largest request it worked for. The heap asks for huge pages: reading weights from small
ones takes a sixth longer. Nothing looks anything up on a network.
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
"""For every process of ours, Ray's own included."""

EARLY = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""What still helps when a process has started, if torch was not imported yet."""

OWN_SIGNALS = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""For processes that signals end in good order: Ray would print stacks on SIGTERM."""

RAY_AGENTS = {"RAY_enable_pipe_based_agent_to_parent_health_check": "1"}
"""Ray's agents see the end of its raylet by a pipe, not by their parent: that may be ours."""

BARE_LINES = {"RAY_DISABLE_WORKER_LOG_PREFIX": "1"}
"""Has Ray print what workers log as it is, for machines to read. To be set before ray is imported.
"""

LOOPBACK_RAY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Keeps Ray's own sockets on 127.0.0.1, as on systems where it only ever runs on one machine. To be
set before ray is imported."""

COMPUTE = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""For processes that run the model."""

SEEN_GPUS = "CUDA_VISIBLE_DEVICES"
"""The GPUs a process may see, by number or name; unset: all."""


def variables() -> Mapping[str, str]:
    """Return the environment of this process, for packages that must not read it themselves."""
    return os.environ


def missing(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return what `environ` lacks of `wanted`; what is set already stays as it is."""
    return {name: value for name, value in wanted.items() if name not in environ}


def with_ray(bind_host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with what must stand in a process before it imports ray."""
    wanted = {
        **QUIET, **OWN_SIGNALS, **RAY_AGENTS, **(LOOPBACK_RAY if is_loopback(bind_host) else {}),
    }  # fmt: skip
    return {**wanted, **environ}


def prepare_ray(bind_host: str, environ: Mapping[str, str], *, bare_lines: bool = False) -> None:
    """Set what must stand in this process before ray is imported, on top of `environ`.
    `bare_lines`: lines of workers' logs are printed without what Ray puts before them.
    """
    os.environ.update(with_ray(bind_host, environ) | (BARE_LINES if bare_lines else {}))


def cache_dir() -> Path:
    """Return the folder for files that can be computed again: `$XDG_CACHE_HOME/mooncake`, else
    `~/.cache/mooncake`, else (a user without a home) one that is not there.
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
    environ: Mapping[str, str], certfile: str | None, keyfile: str | None, ca_certs: str | None
) -> dict[str, str]:
    """Return `environ` with what has Ray speak TLS with these files in PEM; None: as it is."""
    if certfile is None or ca_certs is None:
        return dict(environ)
    paths = [str(Path(path).absolute()) for path in (certfile, keyfile or certfile, ca_certs)]
    return {**environ, RAY_TLS: "1", **dict(zip(RAY_TLS_FILES, paths, strict=True))}


def ray_tls(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the files of `RAY_TLS_FILES`; None: Ray speaks in clear.

    Raises:
        ConfigError: one is not there.
    """
    if environ.get(RAY_TLS, "0").lower() not in ("1", "true"):
        return None
    for name in RAY_TLS_FILES:
        if not Path(environ.get(name) or "/nonexistent").is_file():
            raise ConfigError(f"{name}: {RAY_TLS}=1 needs it to name a file in PEM form")
    certfile, keyfile, ca_certs = (environ[name] for name in RAY_TLS_FILES)
    return certfile, keyfile, ca_certs


def check_ray_tls(host: str, environ: Mapping[str, str], *, without_tls: bool) -> None:
    """Refuse a Ray that would speak in clear with other machines.

    Raises:
        ConfigError: `host` is not this machine alone, and TLS is not set up, or its files are not
            there. `without_tls`: the operator wants it so.
    """
    if ray_tls(environ) is None and not (without_tls or is_loopback(host.strip("[]"))):
        raise ConfigError(
            f"ray-without-tls: at {host} Ray would speak without TLS, and who reads its token can "
            "run programs on all machines: give --ray-ssl-certfile, --ray-ssl-keyfile and "
            "--ray-ssl-ca-certs on all machines (`mooncake certificates` makes the files), or say "
            "--ray-without-tls where the network is private"
        )


def restart_with(environ: Mapping[str, str]) -> None:
    """Replace this process by itself with the settings of a computing process, if it lacks any.

    glibc reads its settings when a process starts, so they cannot be set later. Returns when there
    is nothing to set.
    """
    lacking = missing({**QUIET, **COMPUTE}, environ)
    if lacking:
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**environ, **lacking})
