"""A small virtual machine with two Soft-RoCE devices, over this machine's own files.

    python -m tests.rdma.machine [--memory-mb N] [--timeout-s N] -- COMMAND ...
    python -m tests.rdma.machine --prepare

Real verbs without RDMA hardware: the distribution's stock kernel has `rdma_rxe`. The guest sees our
root file system read-only, with a throw-away layer on top, and runs COMMAND in the current folder
as root. Devices: rxe0 on eth0 (10.0.0.1/24), rxe1 on eth1 (10.0.1.1/24); COMMAND can make others,
and bridges between namespaces. Exit status: that of COMMAND; 125 when the guest did not finish; 0
with "skipped: ..." where no guest can be had, or 77 with --required. `--prepare` installs and
fetches what a guest needs, and starts none.

Emulation is several times slower on some processors than on others. The guest times a loop of plain
Python before COMMAND and takes REFERENCE_LOOP_S as one: `--timeout-s`, the limit of a single test
(pytest-timeout's PYTEST_TIMEOUT) and what tests wait for (MOONCAKE_GUEST_SLOWNESS) grow with it.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.rdma.kernel import CannotPrepare, GuestKernel, fetch_kernel, pack_archive

PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "rdma": "iproute2",
    "ibv_devinfo": "ibverbs-utils",
    "/usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so": "ibverbs-providers",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
}
"""What must be here, a command or a file -> the Debian package it comes with."""
BOOT_S = 480.0
"""Ten seconds on an idle machine."""
REFERENCE_LOOP_S = 0.5
"""What the loop of `_GUEST` takes in a guest on an idle AMD EPYC of 2024."""
TEST_S = 300.0
"""What one test may take there; the longest takes ten, but other work may share the host."""
DID_NOT_FINISH = 125
NOT_TO_BE_HAD = 77

_FIRST_INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev
for module in $(cat /order); do insmod /modules/$module || echo "cannot load $module"; done
plan9="trans=virtio,version=9p2000.L,msize=524288,cache=loose"
mount -t 9p -o ro,$plan9 hostroot /below || echo "cannot mount the host's files"
mount -t tmpfs tmpfs /above; mkdir /above/files /above/work
mount -t overlay -o lowerdir=/below,upperdir=/above/files,workdir=/above/work overlay /root
for kind in proc sysfs devtmpfs; do
  case $kind in proc) at=proc;; sysfs) at=sys;; devtmpfs) at=dev;; esac
  mount -t $kind $kind /root/$at
done
for at in /dev/shm /run; do mkdir -p /root$at; mount -t tmpfs tmpfs /root$at; done
cp /guest.sh /root/run/guest.sh
exec switch_root /root /bin/bash /run/guest.sh
"""

_GUEST = """\
export PATH={path} HOME=/tmp LANG=C.UTF-8 MOONCAKE_RDMA_GUEST=1
ulimit -l unlimited
ip link set lo up
for number in 0 1; do
  ip link add eth$number type dummy
  ip address add 10.0.$number.1/24 dev eth$number
  ip link set eth$number up
  rdma link add rxe$number type rxe netdev eth$number
done
export MOONCAKE_GUEST_SLOWNESS=$({python} -ISc '
import time
start, total = time.monotonic(), 0
for number in range(1_000_000):
    total += number & 7
print(round(max(1.0, (time.monotonic() - start) / {reference_s}), 2))')
export PYTEST_TIMEOUT=$({python} -ISc "print({test_s} * $MOONCAKE_GUEST_SLOWNESS)")
echo "{mark} begins $MOONCAKE_GUEST_SLOWNESS"
cd {folder}
{command}
echo "{mark} $?"
sync
echo 1 > /proc/sys/kernel/sysrq
echo o > /proc/sysrq-trigger
sleep 60
"""


def missing_packages() -> list[str]:
    """Return the packages whose commands or files are not here."""
    return [
        package
        for need, package in PACKAGES.items()
        if not (Path(need).exists() if need.startswith("/") else shutil.which(need))
    ]


def install_missing() -> None:
    """Install what is missing, as root on Debian and its like. Raises CannotPrepare."""
    missing = missing_packages()
    if not missing:
        return
    names = ", ".join(missing)
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise CannotPrepare(f"{names} not installed, and only root on Debian can do that here")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", "-qq", *command], env=environment, capture_output=True, text=True
        )
        if done.returncode and command[0] == "install":
            raise CannotPrepare(f"apt-get cannot install {names}: {done.stderr.strip()[-300:]}")
    if missing_packages():
        raise CannotPrepare(f"{', '.join(missing_packages())} still missing after installing")


def build_ram_disk(kernel: GuestKernel, command: Sequence[str], mark: str) -> bytes:
    """Return the RAM disk of a guest that runs `command` and says its status after `mark`."""
    guest = _GUEST.format(
        path=shlex.quote(os.environ["PATH"] + ":/usr/sbin:/sbin"),
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join(command),
        mark=mark,
        python=shlex.quote(sys.executable),
        reference_s=REFERENCE_LOOP_S,
        test_s=TEST_S,
    )
    folder, program = stat.S_IFDIR | 0o755, stat.S_IFREG | 0o755
    busybox = shutil.which("busybox")
    assert busybox is not None
    folders = ("bin", "modules", "proc", "sys", "dev", "below", "above", "root")
    files: dict[str, tuple[int, bytes]] = dict.fromkeys(folders, (folder, b""))
    files["bin/busybox"] = (program, Path(busybox).read_bytes())
    files["init"] = (program, _FIRST_INIT.encode())
    files["guest.sh"] = (program, guest.encode())
    files["order"] = (program, " ".join(path.name for path in kernel.modules).encode())
    for path in kernel.modules:
        files[f"modules/{path.name}"] = (program, path.read_bytes())
    return pack_archive(files)


def run(command: Sequence[str], *, memory_mb: int, timeout_s: float) -> int:
    """Run `command` in a fresh guest, its output to ours; return its exit status.

    timeout_s: what `command` may take in a guest of the reference's speed; a slower one gets more.
    Raises CannotPrepare when the guest does not boot.
    """
    kernel = fetch_kernel()
    mark = f"guest-ended-{secrets.token_hex(8)}"
    with tempfile.TemporaryDirectory() as scratch:
        ram_disk = Path(scratch) / "ram_disk"
        ram_disk.write_bytes(build_ram_disk(kernel, command, mark))
        # Emulation, not KVM: that is rarely lent to virtual machines, and hangs where half lent.
        # Its processors count the same clock. A guest that does not know that asks a device for
        # the time.
        qemu = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max",
            "-m", str(memory_mb), "-smp", str(min(4, os.cpu_count() or 1)), "-nodefaults",
            "-no-reboot", "-display", "none", "-serial", "stdio", "-kernel", str(kernel.image),
            "-initrd", str(ram_disk), "-append",
            "console=ttyS0 quiet loglevel=3 panic=-1 tsc=reliable clocksource=tsc",
            "-virtfs",
            "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap",
        ]  # fmt: skip
        guest = subprocess.Popen(
            qemu, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert guest.stdout is not None
        lines = (line.decode(errors="replace").rstrip("\r\n") for line in guest.stdout)
        try:
            boot = _until(lines, rf"{mark} begins (\S+)", guest, BOOT_S)
            if boot.ended is None:
                raise CannotPrepare(f"the guest does not boot; its last line: {boot.last!r}")
            slowness = float(boot.ended[1])
            timeout_s *= slowness
            print(f"the guest is {slowness} times slower than the reference, its limit "
                  f"{timeout_s:.0f} s", flush=True)  # fmt: skip
            status = _until(lines, rf"{mark} (\d+)", guest, timeout_s).ended
        finally:
            guest.kill()
            guest.wait()
    if status is None:
        print(f"the guest did not finish in {timeout_s:.0f} s", file=sys.stderr)
        return DID_NOT_FINISH
    return int(status[1])


@dataclass
class _Heard:
    ended: re.Match[str] | None
    last: str


def _until(
    lines: Iterator[str], end: str, guest: subprocess.Popen[bytes], timeout_s: float
) -> _Heard:
    """Print what the guest says until a line that holds `end`; kill it when that takes too long."""
    timer = threading.Timer(timeout_s, guest.kill)
    timer.start()
    last = ""
    try:
        for text in lines:
            ended = re.search(end, text)
            if ended:
                return _Heard(ended, last)
            print(text, flush=True)
            last = text
    finally:
        timer.cancel()
    return _Heard(None, last)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="run a command on a machine with RDMA devices")
    parser.add_argument("--memory-mb", type=int, default=3072)
    parser.add_argument("--timeout-s", type=float, default=240)
    parser.add_argument("--required", action="store_true", help="fail where no guest can be had")
    parser.add_argument("--prepare", action="store_true", help="fetch what a guest needs, no more")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    if bool(options.command) == options.prepare:
        parser.error("give a command, or --prepare")
    try:
        install_missing()
        if options.prepare:
            fetch_kernel()
            return 0
        return run(options.command, memory_mb=options.memory_mb, timeout_s=options.timeout_s)
    except CannotPrepare as error:
        print(f"skipped: no test machine with RDMA: {error}", file=sys.stderr)
        return NOT_TO_BE_HAD if options.required else 0


if __name__ == "__main__":
    sys.exit(main())
