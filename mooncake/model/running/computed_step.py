"""A step as every rank of an instance computes it: forward pass, logits and what is kept, with all
exchanges in one order. The pass is replayed when the step is short, else run eagerly. The lead
samples from the logits; the others compute their part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from mooncake_kernels.dispatch import TRITON

from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.backends import Backends
from mooncake.model.copies import Copies
from mooncake.model.device.graphs import DecodeGraphs, GraphPort
from mooncake.model.device.prefill_graphs import MOST_TOKENS, PrefillGraphs
from mooncake.model.drafts.model_drafts import DraftLayer, ModelDrafts
from mooncake.model.inputs import PageTables, StepInputs, build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.options import ModelOptions


@dataclass(frozen=True)
class CapturedSteps:
    """The captured steps of one model over some pages."""

    decode: DecodeGraphs
    prompts: PrefillGraphs | None = None


def captured_sizes(
    model: KimiK2,
    backends: Backends,
    options: ModelOptions,
    config: EngineConfig,
    reads: tuple[int, ...],
) -> CapturedSizes:
    """Return what steps a GPU captures: none where the backends do not allow any, or the host
    computes experts. None with prompts where `reads` names states that drafts are made from, or
    ranks share contexts out and gather those of prompts, are stages, or share experts with ranks of
    other instances, which have prompts of other sizes. None at all yet where other workers hold the
    experts.
    """
    shape = options.shape
    can = (backends.attention, backends.moe) == (TRITON, TRITON) and model.spec.rope_interleave
    if not (can and options.graphs) or options.experts_apart or shape.experts:
        return CapturedSizes()
    alone = config.num_homes == shape.pp == shape.dp == 1 and not reads
    most_tokens = min(MOST_TOKENS, config.max_batched_tokens) if alone else 0
    pages, drafts = config.num_pages(config.max_model_len), config.speculation
    most_drafts = 0 if drafts is None else drafts.num_speculative_tokens
    return CapturedSizes(config.max_num_seqs, pages, most_tokens, most_drafts)


def capture_steps(
    model: KimiK2,
    kv: KvTensors,
    port: GraphPort,
    sizes: CapturedSizes,
    copies: Copies | None,
    layer: DraftLayer | None = None,
    reads: tuple[int, ...] = (),
) -> CapturedSteps:
    """Capture steps of these sizes, and of the layer that drafts. All ranks call this at once. The
    rest: see `DecodeGraphs`.
    """
    rows, pages, tokens = sizes.most_rows, sizes.most_pages, sizes.most_tokens
    with torch.inference_mode():
        decode = DecodeGraphs(
            model, kv, port, most_sequences=rows, most_pages=pages, copies=copies,
            most_drafts=sizes.most_drafts, reads=reads,
        )  # fmt: skip
        if layer is not None:
            layer.capture(port, sizes)
        if not tokens:
            return CapturedSteps(decode)
        prompts = PrefillGraphs(
            model, kv, port,
            most_tokens=tokens, most_sequences=rows, most_pages=pages, copies=copies,
        )  # fmt: skip
        return CapturedSteps(decode, prompts)


class ForwardPass:
    """The passes of one model over some pages, in order."""

    def __init__(self, model: KimiK2, kv: KvTensors, captured: PrefillGraphs | None = None) -> None:
        """`captured`: short steps over the same pages; None: each step runs eagerly."""
        self._model = model
        self._kv = kv
        self._captured = captured
        self._tables = PageTables()

    def __call__(
        self,
        slots: Sequence[StepSlot],
        whole: frozenset[int],
        after_write: Callable[[int], None] | None = None,
        read: ReadStates | None = None,
    ) -> tuple[StepInputs, torch.Tensor]:
        """Return a step's inputs and the final hidden states of its output rows.

        whole: the sequences for which all rows are wanted. after_write, read: see `KimiK2.forward`.
        In a replayed step all layers are written before the last is reported.

        All ranks decide alike whether a step is replayed.
        """
        model, kv, captured = self._model, self._kv, self._captured
        model.between_steps()
        if captured is None or read is not None or not captured.takes(slots):
            rule = model.prefers_absorbed
            inputs = build_inputs(slots, whole, kv.page_shape, rule, self._tables, kv.home)
            return inputs, model.forward(inputs.to(model.device), kv, after_write, read)
        inputs = build_inputs(slots, whole, kv.page_shape, _absorbed, self._tables, kv.home)
        states = captured.states(inputs)
        if after_write is not None:
            after_write(model.stage.layers[-1])
        return inputs, states


def _absorbed(_new: int, _context: int) -> bool:
    return True


_LOGPROB_ROWS = 128
"""How many prompt positions get logits at once. This bounds their memory."""


class ComputedStep:
    """One step. Creating this runs the forward pass. All ranks of the last stage then call the
    methods in their order.
    """

    def __init__(
        self,
        model: KimiK2,
        forward: ForwardPass,
        copies: Copies,
        drafts: ModelDrafts | None,
        reads: tuple[int, ...],
        slots: Sequence[StepSlot],
        prompt_rows: Mapping[int, int],
        after_write: Callable[[int], None] | None,
    ) -> None:
        """prompt_rows: the sequences for which all rows are wanted -> how many of these become
        logits. drafts: has made the drafts that a plan left to the model; None: nothing drafts, or
        only ranks of another stage. reads: the layers whose states it reads. after_write: see
        `KimiK2.forward`.
        """
        self._model = model
        self._copies = copies
        self._drafts = drafts
        self._prompt_rows = prompt_rows
        wanted = frozenset(prompt_rows)
        if model.spec.num_hidden_layers in reads:
            wanted = frozenset(slot.sequence_id for slot in slots)
        self._read = ReadStates(reads) if reads else None
        self._inputs, self._hidden = forward(slots, wanted, after_write, self._read)

    @property
    def sampled(self) -> list[StepSlot]:
        """The slots after which a token is sampled, with their drafts."""
        return [rows.slot for rows in self._inputs.output_rows if rows.slot.sample]

    def prompt_logits(self) -> Iterator[tuple[StepSlot, int, torch.Tensor]]:
        """Yield (slot, place of the first row in it, logits) in pieces, for the wanted prompts."""
        for rows in self._inputs.output_rows:
            count = self._prompt_rows.get(rows.slot.sequence_id, 0)
            for begin in range(0, count, _LOGPROB_ROWS):
                first = rows.first + begin
                states = self._hidden[first : first + min(_LOGPROB_ROWS, count - begin)]
                yield rows.slot, begin, self._model.logits(states)

    def sampled_logits(self) -> torch.Tensor | None:
        """Return the logits of the rows from which tokens may be sampled: for each slot in
        `sampled` those of its last token and of its drafts. Return None if there are none.
        """
        rows: list[int] = []
        for each in self._inputs.output_rows:
            if each.slot.sample:
                end = each.first + each.num_rows
                rows.extend(range(end - 1 - each.slot.num_drafts, end))
        if not rows:
            return None
        places = self._copies.send(torch.tensor(rows, dtype=torch.int64))
        return self._model.logits(self._hidden.index_select(0, places))

    def keep(self, sampled: Mapping[int, list[int]] | None, *, handed_on: bool) -> bool:
        """Keep what drafts are made from (see `ModelDrafts.keep`). Return whether pages were
        written.

        sampled: the lead's tokens by sequence; None: this is another rank, which gets them from
        the lead.
        """
        if self._drafts is None or self._read is None:
            return False
        rows, states = self._inputs.input_rows, self._read.rows
        return self._drafts.keep(rows, states, sampled, handed_on=handed_on)
