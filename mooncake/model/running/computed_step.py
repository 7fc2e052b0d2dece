"""A step as every rank of an instance computes it: drafts, forward pass and logits, with all
exchanges in one order. The lead samples from the logits; the others compute their part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from mooncake.engine.plan import Sample, StepSlot
from mooncake.model.copies import Copies
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.running.forward_pass import ForwardPass

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
        slots: Sequence[StepSlot],
        prompt_rows: Mapping[int, int],
        after_write: Callable[[int], None] | None,
    ) -> None:
        """prompt_rows: the sequences for which all rows are wanted -> how many of these become
        logits. drafts: makes the drafts that the slots leave to the model. after_write: see
        `KimiK2.forward`.
        """
        self._model = model
        self._copies = copies
        self._drafts = drafts
        self._prompt_rows = prompt_rows
        self._read = None
        wanted = frozenset(prompt_rows)
        if drafts is not None:
            slots, self._read = drafts.make(slots), drafts.read_states()
            if drafts.reads_all_outputs:
                wanted = frozenset(slot.sequence_id for slot in slots)
        self._inputs, self._hidden = forward(slots, wanted, after_write, self._read)

    @property
    def has_drafts(self) -> bool:
        """Whether `keep` writes more rows of pages."""
        return self._drafts is not None

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
        `sampled` those of its last token and of its drafts. None: there are none.
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

    def keep(self, samples: Sequence[Sample] | None, *, handed_on: bool) -> bool:
        """Keep what drafts are made from (see `ModelDrafts.keep`). Return whether pages were
        written.

        samples: the lead's samples; None: this is another rank, which gets them from the lead.
        """
        if self._drafts is None or self._read is None:
            return False
        return self._drafts.keep(self._inputs.input_rows, self._read, samples, handed_on=handed_on)
