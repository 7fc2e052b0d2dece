"""Names that a package imports when they are first used, so that who needs one of its modules does
not import them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return what a package's `__getattr__` does. `modules`: the modules below the package, each
    with the names that it defines, separated by spaces.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return attribute
