"""The public names of every package, collected for the test that guards them.

`python -m tests.support.public_names --write` records the present state after a deliberate change.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "arch" / "public_names.txt"


def packages() -> list[str]:
    """Return the dotted names of all packages of this repository, sorted."""
    names = []
    for source_root in (ROOT, ROOT / "kernels"):
        for top in ("mooncake", "mooncake_kernels"):
            for path in sorted((source_root / top).rglob("__init__.py")):
                names.append(".".join(path.parent.relative_to(source_root).parts))
    return sorted(names)


def exported(package: str) -> list[str]:
    """Return `__all__` of a package as it stands there (empty when there is none)."""
    return list(getattr(importlib.import_module(package), "__all__", []))


def render() -> str:
    """Return one line a public name, `package: name`, packages and names sorted."""
    lines = [f"{package}: {name}" for package in packages() for name in sorted(exported(package))]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"record in {STORED.name}")
    if parser.parse_args().write:
        STORED.write_text(render())
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
