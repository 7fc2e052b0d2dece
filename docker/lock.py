"""Writes the lock of an image: every package that pip installs there, each with its hash.

From the root of the repository, with the Python and pip that the image has, on x86-64:

    python docker/lock.py cpu --extra-index-url https://download.pytorch.org/whl/cpu
    python docker/lock.py cuda

Versions are those of the files of constraints. What follows a package is what its metadata asks
for. Nothing is installed, and of most packages nothing but metadata is fetched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[1]
LOCKS = Path(__file__).with_name("locks")
EXTRAS = {"cpu": ("api", "ray", "s3", "otlp"), "cuda": ("api", "ray", "s3", "otlp", "gpu")}
"""The extras of our package that each image has."""
CONSTRAINTS = {"cpu": "constraints-cpu.txt", "cuda": "constraints-gpu.txt"}
"""Constraints of each image besides those of all."""
TOOLS = ("pip", "setuptools")


def wanted(image: str) -> list[str]:
    """Return what pip is asked for: what our package needs, and what builds it."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = (name for each in EXTRAS[image] for name in extras[each])
    return sorted({*project["dependencies"], *TOOLS, *ours})


def normalized(name: str) -> str:
    """Return a package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lines(report: dict[str, Any]) -> list[str]:
    """Return the lines of a lock for what pip's report would install."""
    found = []
    for each in sorted(report["install"], key=lambda each: normalized(each["metadata"]["name"])):
        about = each["metadata"]
        digest = each["download_info"]["archive_info"]["hashes"]["sha256"]
        found.append(f"{normalized(about['name'])}=={about['version']} --hash=sha256:{digest}")
        asked = (need for need in about.get("requires_dist", []) if "extra ==" not in need)
        found += [f"#   {need}" for need in asked]
    return found


def main(image: str, *words: str) -> None:
    """Write the lock of `image`; `words` go to pip."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.json")
        files = (TOP / "constraints.txt", TOP / CONSTRAINTS[image])
        constraints = [word for file in files for word in ("--constraint", str(file))]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
             "--only-binary", ":all:", "--report", str(report), *constraints, *words,
             *wanted(image)],
            check=True,
        )  # fmt: skip
        text = "\n".join(lines(json.loads(report.read_text())))
    head = f"# Made by `python docker/lock.py {' '.join((image, *words))}`.\n"
    (LOCKS / f"{image}.txt").write_text(f"{head}{text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
