"""Prints what an image consists of, as a CycloneDX 1.5 document: Python's and Debian's packages.

Runs in the image while it is built, with the standard library alone.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
from urllib.parse import quote

PRODUCT = "mooncake-serve"


def document() -> dict[str, object]:
    """Return the document; the product itself is what the others are components of."""
    packages = python_packages()
    version = next(v for name, v in packages if name == PRODUCT)
    components = [
        *(_component(name, version, "pypi", "") for name, version in packages if name != PRODUCT),
        *(
            _component(name, version, "deb/debian", f"?arch={architecture}")
            for name, version, architecture in debian_packages()
        ),
    ]
    product = {"type": "container", "name": PRODUCT, "version": version}
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1,
        "metadata": {"component": product}, "components": components,
    }  # fmt: skip


def python_packages() -> list[tuple[str, str]]:
    """Return normalized names and versions of what is installed."""
    found = {
        re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(): each.version
        for each in importlib.metadata.distributions()
    }
    return sorted(found.items())


def debian_packages() -> list[tuple[str, str, str]]:
    """Return names, versions and architectures of what is installed."""
    words = ["dpkg-query", "--show", "--showformat=${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted((name, version, kind) for name, version, kind in map(str.split, lines))


def _component(name: str, version: str, kind: str, more: str) -> dict[str, str]:
    purl = f"pkg:{kind}/{name}@{quote(version, safe='.:')}{more}"
    return {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}


if __name__ == "__main__":
    print(json.dumps(document(), indent=1))
