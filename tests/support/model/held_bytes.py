"""The memory of all tensors that an object reaches, as a loaded model does its weights."""

from __future__ import annotations

import gc
import types
from typing import Any

import torch
from mooncake_kernels.onednn import linear as onednn


def held_bytes(root: object) -> int:
    """Return the bytes of all tensors within reach of `root`, each memory once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, types.ModuleType | type):
            continue
        seen.add(id(each))
        if isinstance(each, types.FunctionType):  # without the module that it is of
            todo += [*(each.__closure__ or ()), *(each.__defaults__ or ())]
        elif not isinstance(each, torch.Tensor):
            todo += gc.get_referents(each)
        elif each.layout == torch._mkldnn:  # type: ignore[attr-defined]
            memory = onednn.memory_of(each)
            found[memory.data_ptr()] = memory.nbytes
        else:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
