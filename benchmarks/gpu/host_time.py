"""The host's time in a decode step that is not captured, before the device can begin: its inputs,
and the page tables that all layers share; kernels are not launched. Needs no GPU: `python -m
benchmarks.gpu.host_time`.
"""

from __future__ import annotations

import statistics
import time
from unittest import mock

import torch
from mooncake_kernels.triton import mla

from mooncake.engine.plan import StepSlot
from mooncake.model.inputs import PageTables, build_inputs

PAGE, LAYERS = 64, 61


def step_ms(sequences: int, context: int, steps: int) -> list[float]:
    """Return the milliseconds of each step of so many sequences, each with a token more than in the
    one before; the first, which reads whole tables, is left out. On one thread.
    """
    each = -(-(context + steps) // PAGE)
    shape = torch.Size((sequences * each, PAGE, 576))
    pages = [list(range(number * each, (number + 1) * each)) for number in range(sequences)]
    q = kv = torch.empty(sequences, 64, 1)
    tables, found = PageTables(), []
    with mock.patch.object(mla, "mla_decode", lambda q, *_, **__: (q, q)):
        for step in range(steps):
            slots = [
                StepSlot(
                    sequence_id=number, start=context + step, tokens=[1],
                    pages=list(table), sample=True,
                )
                for number, table in enumerate(pages)
            ]  # fmt: skip
            begin = time.perf_counter()
            inputs = build_inputs(slots, frozenset(), shape, lambda new, _: new == 1, tables)
            for _layer in range(LAYERS):
                mla.mla_absorbed(q, kv, inputs.queries.absorbed, 512)
            found.append((time.perf_counter() - begin) * 1e3)
    return found[1:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for sequences, context in ((64, 4096), (64, 131_072)):
        took = statistics.median(step_ms(sequences, context, 40))
        print(f"{sequences} sequences of {context} tokens: {took:.2f} ms a step")
