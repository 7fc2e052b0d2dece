"""A kernel with Soft-RoCE for the test machine: fetched as a package, never installed.

Kept in a cache folder: the kernel image and the modules the guest needs, in the order they load.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WANTED_MODULES = (
    "virtio_pci", "9pnet_virtio", "9p", "overlay", "dummy", "crc32_generic", "crc32c_generic",
    "ib_uverbs", "rdma_rxe", "veth", "bridge",
)  # fmt: skip
"""What the guest needs besides what Debian builds in; names some kernels build in are left out."""


class CannotPrepare(Exception):
    """Something the test machine needs is not to be had; the message names it."""


@dataclass(frozen=True)
class GuestKernel:
    """A kernel image and its modules."""

    image: Path
    modules: list[Path]
    """In an order in which each finds what it depends on."""


def cache_folder() -> Path:
    """Return the folder that keeps what was fetched."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mooncake-rdma-tests"


def fetch_kernel() -> GuestKernel:
    """Return the distribution's stock kernel, fetched with apt at first. Raises CannotPrepare."""
    wanted = hashlib.sha256(" ".join(WANTED_MODULES).encode()).hexdigest()[:8]
    folder = cache_folder() / f"kernel-{wanted}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _fetch_into(Path(scratch))
            kept = _keep_needed(Path(scratch))
            try:
                os.rename(kept, folder)
            except OSError:  # another run was faster
                if not folder.exists():
                    raise
    order = (folder / "order").read_text().split()
    return GuestKernel(folder / "vmlinuz", [folder / name for name in order])


def _run(command: Sequence[str], folder: Path) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=240
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise CannotPrepare(f"{' '.join(command)}: {str(detail).strip()[-300:]}") from error
    return done.stdout


def _fetch_into(folder: Path) -> None:
    depends = _run(["apt-cache", "depends", "linux-image-amd64"], folder)
    found = re.search(r"Depends: (linux-image-\S+)", depends)
    if found is None:
        raise CannotPrepare("apt knows no package linux-image-amd64 (a stock kernel with rdma_rxe)")
    _run(["apt-get", "download", found.group(1)], folder)
    (package,) = folder.glob("linux-image-*.deb")
    _run(["dpkg-deb", "-x", str(package), "tree"], folder)


def _keep_needed(folder: Path) -> Path:
    """Return a folder with image, modules and their order, out of the unpacked package."""
    tree, kept = folder / "tree", folder / "kept"
    kept.mkdir()
    (image,) = (tree / "boot").glob("vmlinuz-*")
    shutil.copy(image, kept / "vmlinuz")
    files = {}
    for path in tree.rglob("*.ko*"):
        files[_module_name(path.name)] = path
    order: list[str] = []
    for wanted in WANTED_MODULES:
        if wanted in files:
            _add_with_dependencies(wanted, files, order)
    if "rdma_rxe" not in order:
        raise CannotPrepare("the distribution's kernel comes without the module rdma_rxe")
    for name in order:
        (kept / f"{name}.ko").write_bytes(_module_bytes(files[name]))
    (kept / "order").write_text("\n".join(f"{name}.ko" for name in order))
    return kept


def _module_name(file_name: str) -> str:
    return file_name.partition(".ko")[0].replace("-", "_")


def _module_bytes(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _add_with_dependencies(name: str, files: dict[str, Path], order: list[str]) -> None:
    if name in order:
        return
    # Every module says in its own text what it needs: "depends=one,two".
    found = re.search(rb"\0depends=([^\0]*)\0", _module_bytes(files[name]))
    for needed in found.group(1).decode().split(",") if found else []:
        if needed.replace("-", "_") in files:
            _add_with_dependencies(needed.replace("-", "_"), files, order)
    order.append(name)


def pack_archive(files: dict[str, tuple[int, bytes]]) -> bytes:
    """Return an initial RAM disk ("newc" archive) of name -> (mode, content).

    A folder is a mode with the folder bit and no content; folders come before what is in them.
    """
    out = bytearray()
    for number, (name, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        text = name.encode() + b"\0"
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(text), 0)
        out += b"070701" + b"".join(b"%08X" % value for value in fields) + text
        out += bytes(-len(out) % 4) + content
        out += bytes(-len(out) % 4)
    return bytes(out)
