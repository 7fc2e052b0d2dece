"""Measures the memory that is left for KV pages, by all ranks of an instance together. The largest
steps run once, so that libraries and exchanges allocate what they keep; the second run is measured.
Steps of all sizes come first, so that no request later waits for a kernel to be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from mooncake.base.kv_layout import Home
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import Measure
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.memory import GpuMemory
from mooncake.model.parallel.group import Group

_ABSORBED_ROWS = 128
"""Rows of a chunk that is absorbed over any much longer context."""
_EXPANDED_ROWS = 256
"""Rows of a chunk that is expanded over any context."""
_FRESH_PROMPTS = 8
"""How many prompts share such a step. Each has keys of its own, which are expanded together."""


class MemoryMeter(Protocol):
    """Measures the memory of a device."""

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        """Return the memory in use now, and the extra memory that `step` takes while it runs."""


def measure_memory(
    model: KimiK2,
    meter: MemoryMeter,
    asked: Measure,
    group: Group | None = None,
    sample: Callable[[torch.Tensor], None] = lambda _: None,
    open_drafts: Callable[[KvTensors], ModelDrafts | None] = lambda _: None,
) -> list[GpuMemory]:
    """Return the memory of each rank, in their order. All ranks call this at once.

    The steps use temporary pages, which count as free. All sequences share the pages of one
    context, and all layers share one layer. There are logits for as many rows as there may be
    sequences. `sample` handles them as the sampling rank does. A rank that holds only routed
    experts computes these for the others. open_drafts: returns what drafts over some pages, if this
    rank has it. It keeps the states of each step, and computes its rows, too; in the largest steps
    all sequences have as many rows left as they can have.

    Raises:
        GroupError: another rank was lost.
    """
    home = Home(0 if group is None else group.rank % asked.num_homes, asked.num_homes)
    with torch.inference_mode():
        model.connect()
        kv = _shared_pages(model, asked, home)
        drafts = open_drafts(kv)
        rule = model.prefers_absorbed

        def step(slots: Sequence[StepSlot]) -> None:
            whole = frozenset(slot.sequence_id for slot in slots)
            if model.spec.num_hidden_layers not in asked.reads and len(slots) > 1:
                whole = frozenset()
            inputs = build_inputs(slots, whole, kv.page_shape, rule, home=home)
            read = ReadStates(asked.reads) if asked.reads else None
            hidden = model.forward(inputs.to(model.device), kv, read=read)
            logits = None
            if model.stage.is_last:
                logits = model.logits(hidden[: asked.step_sequences])
                sample(logits)
            if drafts is not None and read is not None:
                drafts.keep(inputs.input_rows, read.rows, None, handed_on=False)
            del logits  # as in a step that is served, they are there until then

        def run(slots: Sequence[StepSlot], *, with_most_left: bool = False) -> None:
            if not model.has_rest:
                model.serve_pass()
                return
            like = torch.empty(0, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            if drafts is not None and with_most_left:
                drafts.leave_most([slot for slot in slots if len(slot.tokens) == 1], like)
            step(slots)
            if drafts is not None:
                drafts.try_out(slots, like)
                drafts.forget(slot.sequence_id for slot in slots)

        def largest() -> None:
            for slots in largest_steps(asked):
                run(slots, with_most_left=True)

        for slots in steps_of_all_sizes(asked):
            run(slots)
        largest()
        found = meter.measure(largest)
        own = found.beside(-kv.layout.slice_bytes * kv.num_pages)
        if group is None:
            return [own]
        mine = [own.total_bytes, own.resident_bytes, own.step_bytes]
        everyone = group.gather(torch.tensor(mine, device=model.device))
    return [GpuMemory(*each) for each in everyone.view(-1, 3).tolist()]


def largest_steps(asked: Measure) -> list[list[StepSlot]]:
    """Return the steps that need the most memory: the last chunk of a prompt alone; as many
    sequences as possible, each with one token, beside a chunk that is expanded or absorbed; several
    prompts.
    """
    alone = asked.step_tokens
    singles = min(asked.step_sequences, alone) - 1
    beside = alone - singles
    prompts = max(1, min(_FRESH_PROMPTS, asked.step_sequences, alone))
    return [
        _step(asked, [alone]),
        _step(asked, [1] * singles + [beside]),
        _step(asked, [1] * singles + [min(beside, _ABSORBED_ROWS)]),
        _step(asked, [alone // prompts] * prompts),
    ]


def steps_of_all_sizes(asked: Measure) -> list[list[StepSlot]]:
    """Return a step of each size for which other kernels may be chosen: prompts of one token, two,
    four and so on, equally short chunks of long prompts, and chunks whose context is merged from
    fewer parts than the longest.
    """
    sizes = [1]
    while 2 * sizes[-1] <= asked.step_tokens:
        sizes.append(2 * sizes[-1])
    found = [_step(asked, [size], size) for size in sizes]
    found += [_step(asked, [size]) for size in sizes if size <= _ABSORBED_ROWS]
    context, rows = asked.context_tokens, min(_EXPANDED_ROWS, asked.step_tokens)
    while context > rows:
        found.append(_step(asked, [rows], context))
        context //= 2
    return found


def _step(asked: Measure, rows: Sequence[int], context: int | None = None) -> list[StepSlot]:
    """Return a slot for each of `rows`: the last `rows` tokens of `context` tokens. None: of the
    longest context.
    """
    pages = _table(asked)
    return [
        StepSlot(
            sequence_id=number, start=max(context or asked.context_tokens, new) - new,
            tokens=[0] * new, pages=pages, sample=True,
        )
        for number, new in enumerate(rows)
    ]  # fmt: skip


def _num_pages(asked: Measure) -> int:
    """Return how many pages of one context each home holds."""
    tokens = max(asked.context_tokens, asked.step_tokens)
    return -(-asked.layout.num_blocks(tokens) // asked.num_homes)


def _table(asked: Measure) -> list[int]:
    """Return the page table of the longest context, with its pages dealt to all homes in turn."""
    each = _num_pages(asked)
    return [home * each + page for page in range(each) for home in range(asked.num_homes)]


def _shared_pages(model: KimiK2, asked: Measure, home: Home) -> KvTensors:
    """Return pages of one context that all layers of this rank's stage share."""
    one = KvTensors.allocate(asked.layout, _num_pages(asked), model.device, home, range(1))
    layers = model.stage.kv_layers(asked.layout.num_layers)
    return KvTensors(asked.layout, one.pages.expand(len(layers), -1, -1, -1), home, layers.start)
