"""Arguments and results of ops: tensors and other values in tuples, lists and dicts.

`torch.utils._pytree` takes more kinds of containers, and a third of the time of an emulated step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def leaves(tree: Any) -> list[Any]:
    """Return the values in a tree, in order."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return [tree]
    found = []
    for each in tree:
        if isinstance(each, tuple | list | dict):
            found += leaves(each)
        else:
            found.append(each)
    return found


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with `change` of each value in it. Results with names become plain tuples."""
    if isinstance(tree, tuple):
        return tuple(mapped(change, each) for each in tree)
    if isinstance(tree, list):
        return [mapped(change, each) for each in tree]
    if isinstance(tree, dict):
        return {key: mapped(change, each) for key, each in tree.items()}
    return change(tree)
