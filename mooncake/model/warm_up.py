"""Builds the code that oneDNN would otherwise build during the first requests.

oneDNN builds code for each shape that it multiplies, in half a millisecond on a CPU with AVX-512
and in several with AMX. Shapes are on a ladder, so they are few and known, and each is multiplied
once. GPUs and other dtypes than bfloat16 do not need this, because oneDNN multiplies nothing for
them here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.onednn import mla

from mooncake.model.kimi_k2 import KimiK2

BUDGET_S = 0.25
"""No further size is begun after this time. Short ones come first, and the code for a long one
takes little beside the request that has it. The steps that are timed next build some of them, too.
"""


@dataclass(frozen=True)
class Limits:
    """The limits of a step: how many rows it computes, for how many it samples, and its longest
    context.
    """

    most_rows: int
    most_samples: int
    most_context: int


def warm_up(
    model: KimiK2,
    limits: Limits,
    progress: Callable[[int, int], None],
    budget_s: float = BUDGET_S,
) -> tuple[int, int]:
    """Build the code for steps within `limits`, for at most `budget_s`. Return (sizes built, all
    sizes). `progress` gets the same numbers.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return 0, 0
    calls = _calls(model, limits)
    end_s = time.monotonic() + budget_s
    done = 0
    with torch.inference_mode():
        for call in calls:
            if time.monotonic() > end_s:
                break
            call()
            done += 1
            progress(done, len(calls))
    return done, len(calls)


def _calls(model: KimiK2, limits: Limits) -> list[Callable[[], None]]:
    """Return calls that each multiply one size of rows or keys once, small ones first."""
    layers = model.kinds_of_layers()
    found: list[tuple[int, Callable[[], None]]] = []
    for rows in onednn.rungs(limits.most_rows):
        for layer in layers:
            found.append((rows, functools.partial(layer.prepare, rows, limits.most_rows)))
    for rows in onednn.rungs(limits.most_samples):
        found.append((rows, functools.partial(model.prepare_head, rows)))
    for size in mla.keys_rungs(limits.most_context):
        found.append((size, functools.partial(layers[0].prepare_context, size)))
    return [call for _, call in sorted(found, key=lambda entry: entry[0])]
