"""The choice of a decode worker, by predicted gap between tokens and room in blocks.

Pure; facts come from the views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.scheduler.placement.prefill_choice import Query
from mooncake.scheduler.placement.views import InstanceView


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOption:
    """One decode worker, and the consequences of joining its batch."""

    view: InstanceView
    tbt_s: float
    """Predicted gap between tokens with this request in the batch."""
    num_short_blocks: int
    """Blocks that are missing for the expected output; 0 = it fits."""
    push_s: float
    """Predicted seconds to push the blocks that the worker does not hold."""
    full: bool
    """Not even the tokens so far fit now: the request would wait for room."""
    num_output_tokens: int

    @property
    def score_s(self) -> float:
        """The gap plus the push time spread over the expected output; the smallest is best."""
        return self.tbt_s + self.push_s / max(self.num_output_tokens, 1)


def evaluate(query: Query, view: InstanceView) -> DecodeOption:
    """Return what joining this worker means for the request and for those that run there."""
    wanted = query.wanted
    free = view.num_free_blocks()
    limit = view.hello.max_num_seqs
    sequences = view.num_sequences() + 1
    # The batch grows to the worker's limit at most; sequences above it wait.
    batch = min(sequences, limit) if limit else sequences
    context = view.num_context_tokens() + wanted.num_tokens
    missing = max(0, wanted.num_blocks_now - query.own_matches.get(view.worker_id, 0))
    return DecodeOption(
        view=view,
        tbt_s=view.cost.tbt_s(batch, round(context * batch / sequences)),
        num_short_blocks=max(0, wanted.num_blocks_expected - free),
        push_s=missing * wanted.push_s_per_block,
        num_output_tokens=wanted.num_output_tokens,
        full=wanted.num_blocks_now > free or (limit > 0 and sequences > limit),
    )


def choose_decode(query: Query, instances: Sequence[InstanceView]) -> DecodeOption | None:
    """Return the best worker: one with room before one without, then the smallest score.

    If all are full, it is the one that lacks the fewest blocks. Workers too small for the request
    even when empty are never chosen; None when there is no other.
    """
    options = [
        evaluate(query, view)
        for view in instances
        if view.hello.num_blocks >= query.wanted.num_blocks_now
    ]
    return min(options, key=rank, default=None)


def rank(option: DecodeOption) -> tuple[bool, int, float, int, str]:
    """Return the sort key of an option: see `choose_decode`."""
    short = option.num_short_blocks
    view = option.view
    return (
        option.full,
        short if option.full else short > 0,
        option.score_s,
        view.num_assigned,
        view.worker_id,
    )
