"""Runs the command line as on a machine that lacks packages: `python -m ... NAME,NAME words…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class Absent:
    """Stands first among the finders and knows of nothing in `names`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ModuleNotFoundError for a package that is not to be there."""
        if name.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


if __name__ == "__main__":
    sys.meta_path.insert(0, Absent(sys.argv[1].split(",")))
    from mooncake.cli.main import run

    sys.exit(run(sys.argv[2:]))
