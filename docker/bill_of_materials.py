"""Prints what an image consists of, as a CycloneDX 1.5 document: Python's and Debian's packages,
and the code that was compiled for it, each with a hash.

Runs in the image while it is built, with the standard library alone:
`python bill_of_materials.py LOCK`. The hash of a package of Python is that of the wheel that was
installed, by the lock; of one of Debian that of the list of its files' checksums, as dpkg has it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

PRODUCT = "mooncake-serve"
DPKG = Path("/var/lib/dpkg/info")


def document(lock: Path) -> dict[str, object]:
    """Return the document; the product itself is what the others are components of.

    Raises:
        ValueError: something is installed that the lock does not name.
    """
    packages = python_packages()
    product = {"type": "container", "name": PRODUCT, "version": packages.pop(PRODUCT)}
    hashes = locked(lock)
    if foreign := [f"{name}=={version}" for name, version in packages.items()
                   if (name, version) not in hashes]:  # fmt: skip
        raise ValueError(f"{lock} does not name {', '.join(sorted(foreign))}")
    components = [
        *(
            _component(name, version, "pypi", "", hashes[name, version])
            for name, version in sorted(packages.items())
        ),
        *(
            _component(name, version, "deb/debian", f"?arch={kind}", debian_digest(name, kind))
            for name, version, kind in debian_packages()
        ),
        *({"type": "file", "name": str(path), **_hashed(digest)} for path, digest in compiled()),
    ]
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": product}, "components": components,
    }  # fmt: skip


def locked(lock: Path) -> dict[tuple[str, str], str]:
    """Return the SHA-256 of each wheel that a lock names."""
    found = re.findall(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", lock.read_text(), re.M)
    return {(name, version): digest for name, version, digest in found}


def python_packages() -> dict[str, str]:
    """Return normalized names and versions of what is installed."""
    return {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in importlib.metadata.distributions()
    }


def debian_packages() -> list[tuple[str, str, str]]:
    """Return names, versions and architectures of what is installed."""
    words = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted((name, version, kind) for name, version, kind in map(str.split, lines))


def debian_digest(name: str, architecture: str) -> str:
    """Return the SHA-256 of dpkg's list of checksums of a package's files; empty: it has none."""
    for file in (DPKG / f"{name}.md5sums", DPKG / f"{name}:{architecture}.md5sums"):
        if file.exists():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    return ""


def compiled() -> Iterator[tuple[Path, str]]:
    """Yield the code that was compiled for the image, and its SHA-256."""
    for file in importlib.metadata.distribution(PRODUCT).files or []:
        if file.name == "__init__.py" and file.parts[0] == "mooncake_kernels":
            for made in sorted(Path(file.locate()).parent.glob("compiled/*.so")):
                yield made, hashlib.sha256(made.read_bytes()).hexdigest()


def _hashed(digest: str) -> dict[str, object]:
    return {"hashes": [{"alg": "SHA-256", "content": digest}]} if digest else {}


def _component(name: str, version: str, kind: str, more: str, digest: str) -> dict[str, object]:
    purl = f"pkg:{kind}/{name}@{quote(version, safe='.:')}{more}"
    return {
        "type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl,
        **_hashed(digest),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(document(Path(sys.argv[1])), indent=1))
