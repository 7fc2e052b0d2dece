"""Which rows of a step's hidden states become logits, in which calls. Ranks that share a model make
the same calls in the same order, as each is an exchange.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mooncake.model.inputs import SlotRows

_LOGPROB_ROWS = 128
"""Prompt positions whose logits are made at once: bounds their memory."""


def prompt_pieces(rows: SlotRows, count: int) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of the pieces in which the logits of the first `count` rows
    of a slot are made.
    """
    for begin in range(0, count, _LOGPROB_ROWS):
        yield rows.first + begin, min(_LOGPROB_ROWS, count - begin)


def sampled_rows(output_rows: Sequence[SlotRows]) -> torch.Tensor:
    """Return the rows that tokens may be sampled from: of each slot that samples that of its last
    token and those of its drafts, int64.
    """
    rows: list[int] = []
    for each in output_rows:
        if each.slot.sample:
            end = each.first + each.num_rows
            rows.extend(range(end - 1 - each.slot.num_drafts, end))
    return torch.tensor(rows, dtype=torch.int64)
