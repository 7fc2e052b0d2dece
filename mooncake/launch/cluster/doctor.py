"""What `mooncake doctor` checks on this machine: each check gives a state and says what to do.

It reads the system and, if a cluster's file is given, asks its gateways. It changes nothing, except
that it writes a file to time a disk and removes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import io
import ipaddress
import os
import platform
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import msgspec

from mooncake.base import ConfigError, MooncakeError, format_bytes
from mooncake.identity.certificates import Pem, expiry, names_in
from mooncake.launch.cluster.up import asking, machine_credential, own_machine
from mooncake.launch.config import options
from mooncake.launch.config.cluster_file import (
    AUTHORITY,
    CERTIFICATE,
    KEY,
    ClusterFile,
    Machine,
    read_cluster_file,
)
from mooncake.launch.config.config import resolve
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import machine_facts
from mooncake.transfer.rdma.verbs import has_pyverbs
from mooncake.transfer.topology import gid_to_use, list_rdma_devices, read_ports

OK, WARN, FAIL = "ok", "warn", "fail"
FILES = 65536
"""Number of descriptors that a gateway with thousands of clients needs."""
SOON_DAYS = 30
CONNECT_S = 3.0
DISK_BYTES = 64 * 2**20
SLOW_DISK = 200 * 2**20
"""Bytes a second below which reading a block may take longer than computing it."""
UNSYNCHRONIZED = 5
"""The result of adjtimex(2) for a clock that nothing keeps right."""
SYSFS = Path("/sys")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """`ok`, `warn` (it works, not at its best or not for long) or `fail`."""
    found: str
    todo: str = ""


def judged(name: str, found: str, todo: str = "", *, fails: bool = True) -> Finding:
    """Return the result of a check: all is well if there is nothing to do."""
    state = OK if not todo else FAIL if fails else WARN
    return Finding(name=name, state=state, found=found, todo=todo)


def examine(file: str | None, machine: str | None, labels: Collection[str] = ()) -> list[Finding]:
    """Check this machine and, if `file` describes a cluster, its part of the cluster. `machine` or
    `labels` say which one it is there.

    Raises:
        ConfigError: the file describes no cluster, or this machine has no part in it.
    """
    looks: list[Callable[[], Iterator[Finding]]] = [
        system, gpus, nics, limits, huge_pages, clock,
    ]  # fmt: skip
    if file is not None:
        cluster = read_cluster_file(file)
        own = own_machine(cluster, machine, labels)
        folder = Path(file).resolve().parent
        looks += [
            lambda: certificates(folder, own),
            lambda: ports(own),
            lambda: peers(cluster, own, folder),
            lambda: disks(cluster, own, folder),
        ]
    return [finding for look in looks for finding in look()]


def system() -> Iterator[Finding]:
    """Check the machine and its programs."""
    memory = machine_facts.available_bytes()
    free = "unknown" if memory is None else format_bytes(memory)
    yield judged(
        "system",
        f"{platform.system()} {platform.release()}, Python {sys.version.split()[0]}, "
        f"{machine_facts.num_cores()} cores, {free} of memory free",
    )


def gpus() -> Iterator[Finding]:
    """Check the GPUs, and whether their driver answers."""
    number = machine_facts.num_gpus()
    if not number:
        yield judged("gpu", "none: engines compute on the CPU")
        return
    program = shutil.which("nvidia-smi")
    query = [str(program), "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        yield judged("gpu", "; ".join(done.stdout.strip().splitlines()))
    except (OSError, subprocess.SubprocessError) as error:
        found = f"{number} devices, and the driver does not answer: {error}"
        yield judged(
            "gpu", found, "install the driver that fits the kernel, or reboot after its update"
        )


def nics(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """Check RDMA devices, the state of their ports, and the GID at which peers reach each."""
    devices = list_rdma_devices(sysfs)
    if not devices:
        yield judged("rdma", "no device: KV moves by TCP between machines")
        return
    if not has_pyverbs():
        found = f"{', '.join(devices)}, and pyverbs is not installed"
        yield judged("rdma", found, "pip install 'mooncake-serve[rdma]'")
    for device in devices:
        for port in read_ports(device, sysfs):
            index, todo = gid_to_use(port), ""
            found = "its link is up" if port.active else "its link is down"
            if index is None:
                found += ", no GID that peers reach"
                todo = "give its interface an IP address, or leave it out: --rdma-device"
            else:
                at = ipaddress.IPv6Address(port.gids[index][0])
                found += f", peers reach GID {index} ({at.ipv4_mapped or at})"
            if not port.active:
                todo = "bring its link up, or leave it out: --rdma-device"
            yield judged(f"rdma {device} port {port.port}", found, todo, fails=False)


def limits() -> Iterator[Finding]:
    """Check the limits of this user's processes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = files == resource.RLIM_INFINITY or files >= FILES
    todo = "" if enough else f"ulimit -n {FILES}, or LimitNOFILE={FILES} in the unit"
    yield judged("open files", str(files), todo, fails=False)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = locked == resource.RLIM_INFINITY
    needs = bool(list_rdma_devices()) or machine_facts.num_gpus() > 0
    todo = "NICs and GPUs lock memory: ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit"
    found = "unlimited" if free else format_bytes(locked)
    yield judged("locked memory", found, todo if needs and not free else "")
    yield judged("/dev/shm", f"{format_bytes(shutil.disk_usage('/dev/shm').free)} free")


def huge_pages(sysfs: Path = SYSFS) -> Iterator[Finding]:
    """Check whether the kernel gives memory in large pages to processes that ask for them."""
    try:
        told = (sysfs / "kernel/mm/transparent_hugepage/enabled").read_text().strip()
    except OSError:
        told = "[never]"
    never = "[never]" in told
    todo = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" if never else ""
    yield judged("huge pages", told, todo, fails=False)


def clock() -> Iterator[Finding]:
    """Check whether something keeps the clock right: credentials and certificates expire by it."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    bad = state == UNSYNCHRONIZED or state < 0
    found, todo = "nothing keeps it right", "start chronyd or systemd-timesyncd"
    yield judged("clock", found, todo, fails=False) if bad else judged("clock", "synchronized")


def certificates(folder: Path, own: Machine) -> Iterator[Finding]:
    """Check the machine's bundle: whose certificate it is, when it expires, and whether the key
    fits.
    """
    missing = [name for name in own.bundle if not (folder / name).is_file()]
    if missing:
        found = f"{', '.join(missing)} not in {folder}"
        todo = "copy this machine's folder, which `mooncake cluster init` makes"
        yield judged("certificate", found, todo)
        return
    try:
        text = (folder / CERTIFICATE).read_text()
        names, until = names_in(text), expiry(Pem(text, ""))
        context = ssl.create_default_context(cafile=str(folder / AUTHORITY))
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except (ConfigError, OSError, ValueError) as error:
        found = f"{CERTIFICATE}, {KEY}, {AUTHORITY}: {error}"
        yield judged("certificate", found, "copy this machine's folder again")
        return
    days = (until - datetime.datetime.now(datetime.UTC)).days
    is_own, todo = own.address in names, ""
    if not is_own:
        todo = f"it is another machine's: copy the folder of {own.name}"
    elif days < SOON_DAYS:
        todo = "remove it and run `mooncake cluster init` again, with a new authority if need be"
    found = f"of {', '.join(names)}, {days} days left"
    yield judged("certificate", found, todo, fails=not is_own or days < 0)


def ports(own: Machine) -> Iterator[Finding]:
    """Check whether this machine has the address that the file gives it."""
    try:
        machine_facts.check_port(own.address, 0, "address")
        yield judged("address", own.address)
    except ConfigError as error:
        yield judged("address", error.message, "correct it in the file")


def peers(cluster: ClusterFile, own: Machine, folder: Path) -> Iterator[Finding]:
    """Check whether each gateway's port can be reached, and which members the gateways know."""
    for seed in cluster.seeds:
        host, _, port = seed.removeprefix("tcp://").rpartition(":")
        try:
            began_s = time.monotonic()
            with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
                took_ms = 1000 * (time.monotonic() - began_s)
            yield judged(f"gateway {seed}", f"reached in {took_ms:.1f} ms")
        except OSError as error:
            todo = "is `mooncake up` running there, and no firewall between?"
            yield judged(f"gateway {seed}", str(error.strerror or error), todo)
    if not all((folder / name).is_file() for name in own.credentials):
        return
    try:
        with contextlib.closing(asking(cluster, own, machine_credential(own, folder))) as seeds:
            num_wanted = len(seeds.addresses)
            answers = seeds.ask(num_wanted) or seeds.ask(num_wanted) or seeds.ask(num_wanted)
    except MooncakeError as error:
        yield judged("members", error.message, "see above")
        return
    missing = cluster.missing(told.members for told in answers)
    found = f"not there: {', '.join(missing)}" if missing else "all are there"
    todo = "look at the log of `mooncake up` on their machines" if missing else ""
    yield judged("members", found, todo, fails=False)


def disks(cluster: ClusterFile, own: Machine, folder: Path) -> Iterator[Finding]:
    """Measure how fast the directories of this machine's pool are written and read."""
    for part in cluster.parts(own):
        if part.role != "kvstore":
            continue
        given = {**part.given, "cluster_secret": "-"}
        del given["cluster_secret_file"]
        config = resolve(given, None, {})
        for directory, _ in config.ssd:
            yield _disk(folder / directory)


def _disk(directory: Path) -> Finding:
    name = f"disk {directory}"
    there = directory if directory.exists() else directory.parent  # the pool makes the last one
    file = there / f".mooncake-doctor-{os.getpid()}"
    try:
        began_s = time.monotonic()
        opened = os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            for _ in range(DISK_BYTES // 2**20):
                os.write(opened, os.urandom(2**20))
            os.fsync(opened)
            written_s = time.monotonic() - began_s
            os.posix_fadvise(opened, 0, DISK_BYTES, os.POSIX_FADV_DONTNEED)
            began_s = time.monotonic()
            os.lseek(opened, 0, os.SEEK_SET)
            while os.read(opened, 2**20):
                pass
            read_s = time.monotonic() - began_s
        finally:
            os.close(opened)
            file.unlink()
    except OSError as error:
        return judged(name, str(error), "mount or repair it")
    speeds = DISK_BYTES / max(written_s, 1e-9), DISK_BYTES / max(read_s, 1e-9)
    found = f"{format_bytes(int(speeds[0]))}/s written, {format_bytes(int(speeds[1]))}/s read"
    todo = "blocks come from it slower than they are worth; use another disk"
    return judged(name, found, todo if min(speeds) < SLOW_DISK else "", fails=False)


def write_bundle(target: Path, findings: list[Finding], file: str | None) -> None:
    """Write what a helper needs to know, without any secret: no key files, no values of the
    environment, and settings that may hold secrets only as "(set)".

    Raises:
        ConfigError: the file cannot be written, or exists already.
    """
    documents: dict[str, object] = {
        "doctor.json": msgspec.to_builtins(findings),
        "environment.json": sorted(os.environ),
        "packages.json": sorted(
            f"{found.name} {found.version}" for found in importlib.metadata.distributions()
        ),
    }
    if file is not None:
        cluster = read_cluster_file(file)
        documents["cluster.json"] = {
            "model": cluster.model,
            "machines": {
                machine.name: {"address": machine.address, **machine.counts}
                for machine in cluster.machines
            },
            **{
                group: {name: _shown(name, value) for name, value in given.items()}
                for group, given in cluster.settings.items()
            },
        }
    try:
        with tarfile.open(target, "x:gz") as bundle:
            for name, document in documents.items():
                data = msgspec.json.format(msgspec.json.encode(document), indent=2)
                entry = tarfile.TarInfo(f"mooncake/{name}")
                entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                bundle.addfile(entry, io.BytesIO(data))
            for path in ("/proc/meminfo", "/proc/cpuinfo", "/proc/mounts"):
                with contextlib.suppress(OSError):
                    data = Path(path).read_bytes()
                    entry = tarfile.TarInfo(f"mooncake{path}")
                    entry.size, entry.mtime, entry.mode = len(data), int(time.time()), 0o600
                    bundle.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise ConfigError(f"bundle: cannot write {target}: {error.strerror or error}") from error


def _shown(name: str, value: object) -> object:
    option, _ = options.options_of(ServeConfig)[name]
    return "(set)" if option.secret or name.endswith("_command") else value
