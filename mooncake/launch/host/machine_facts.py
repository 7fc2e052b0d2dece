"""Reads what this machine has: memory, cores, names. It reads /proc and cgroup files and asks the
GPUs' driver; it decides nothing.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from pathlib import Path

from mooncake.base import ConfigError, Unavailable
from mooncake.launch.host.environment import SEEN_GPUS

FOREIGN_PACKAGES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
"""Distributions on PyPI that also install a top-level package `mooncake`."""
CONTROL_GROUP = Path("/sys/fs/cgroup")
"""The control group of this container, if the container sees only its own; the machine's has no
limits.
"""


def available_bytes() -> int | None:
    """Return how much memory new processes can use, or None if the system does not say."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except OSError:
        return None
    group = _cgroup_left()
    if group is not None:
        found.append(group)
    return min(found, default=None)


def _cgroup_left() -> int | None:
    """Return how much the control group (a container's limit) leaves, or None without a limit."""
    root = CONTROL_GROUP
    try:
        limit = (root / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((root / "memory.current").read_text())
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # The page cache of files is given back when memory is asked for.
    return max(0, int(limit) - used + int(stat.get("inactive_file", 0)))


def num_cores(group: Path = CONTROL_GROUP) -> int:
    """Return how many cores this process may use: those it may run on, or the CPU time that its
    control group (a container's limit) allows, rounded up, if that is less.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def host_name() -> str:
    return socket.gethostname()


def address_towards(address: str) -> str:
    """Return the address of this machine to which a peer at "tcp://HOST:PORT#KEY" can answer. It
    asks the routing table and sends nothing.

    Raises Unavailable when there is no route to the peer.
    """
    place = address.removeprefix("tcp://").partition("#")[0]
    host, _, port = place.rpartition(":")
    try:
        [(family, kind, _, _, peer), *_] = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_DGRAM
        )
        with socket.socket(family, kind) as probe:
            probe.connect(peer)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise Unavailable(f"this machine has no route to {address}: {error}") from error


def boot_id(shm_directory: str = "") -> str:
    """Return a name for this boot of this machine. It is equal exactly for processes that can share
    memory: which find each other in `shm_directory`, or have one /dev/shm.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = host_name()
    try:
        found = os.stat(shm_directory or "/dev/shm")
    except OSError:
        return f"{boot}-0"
    # Every tmpfs has the same number for its root: only the device tells two containers apart.
    return f"{boot}-{found.st_dev}-{found.st_ino}"


def num_gpus() -> int:
    """Return how many NVIDIA GPUs a process started here sees, without loading the tensor
    library.
    """
    there = sum(name.name[6:].isdigit() for name in Path("/dev").glob("nvidia*"))
    allowed = os.environ.get(SEEN_GPUS)
    if allowed is None:
        return there
    return min(there, sum(bool(name.strip()) for name in allowed.split(",")))


def seen_gpus() -> list[str]:
    """Return those GPUs by the names that CUDA_VISIBLE_DEVICES has for them."""
    there, allowed = num_gpus(), os.environ.get(SEEN_GPUS)
    names = map(str, range(there)) if allowed is None else allowed.split(",")
    return [name.strip() for name in names if name.strip()][:there]


def gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU that the driver names, or None if the driver does not
    say.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return min(int(line) for line in done.stdout.split("\n") if line.strip()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def check_system() -> None:
    """Raise ConfigError if this software cannot run here at all."""
    if platform.system() != "Linux":
        raise ConfigError(f"mooncake runs on Linux, not on {platform.system()}")
    for name in FOREIGN_PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        raise ConfigError(
            f"{name} {version} is installed beside this package and both are called `mooncake`; "
            f"take an environment of its own, or: pip uninstall {name}"
        )


def check_port(host: str, port: int, host_flag: str = "host", port_flag: str = "port") -> None:
    """Raise ConfigError when `host`:`port` cannot be listened on now (0 is always free). The
    message names the flags that gave them.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ConfigError(
            f"{host_flag}: {host!r} is not an address of this machine ({error}); give one that is"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{host_flag}: {host} is not an address of this machine; give one that is"
                ) from error
            raise ConfigError(
                f"{port_flag}: cannot listen on {host}:{port} ({error.strerror}); "
                f"stop what uses it or take another with --{port_flag}"
            ) from error
