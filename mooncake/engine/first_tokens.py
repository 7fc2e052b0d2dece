"""Which prompts go first, so that as many first tokens as possible come in time. Pure.

Prompts go in rank order. When not all can be in time, some are postponed so that as few as possible
are late (Moore, An n Job, One Machine Sequencing Algorithm for Minimizing the Number of Late Jobs,
1968): whenever one would be late, the longest up to it is postponed. It is computed when no other
prompt is there. Its chunks are smaller then, because the next prompt waits for the end of its step.
A prompt that has waited for `PATIENCE` times its limit is postponed no more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from mooncake.engine.chunks import UNIT
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel

PATIENCE = 10
"""A prompt is postponed for at most so many times as long as its first token may take. The class
batch has no limit, so the first token of its prompts may take this many times as long.
"""
CROWD = 4
"""When prompts are late, are at least so many, and are no fewer than the streams, they are computed
whatever this costs the streams: there is more to do than can be in time.
"""
SLACK = 1.25
"""A first token is too late for its limit after this many times `first_token_s`, because `launch`
sets that to 0.8 of the limit.
"""
EFFICIENT_LOSS = 0.1
"""Tokens take longer by at most this part in the smallest efficient chunk than in a whole one."""


class Prompt(NamedTuple):
    """What a prompt still has to compute."""

    since_s: float
    """Since when it waits."""
    num_tokens: int
    num_before: int
    """The tokens before these, which are computed or cached."""
    is_batch: bool = False

    def due_s(self, config: EngineConfig, times: float = 1.0) -> float:
        """Return when its first token is due, or would be if it might take so many `times` as
        long.
        """
        if config.first_token_s is None:
            return math.inf
        return self.since_s + times * config.first_token_s * (PATIENCE if self.is_batch else 1)


def postponed(
    config: EngineConfig, cost: StepCostModel, prompts: Sequence[Prompt], now: float
) -> set[int]:
    """Return the places of the prompts that wait until all others are computed. prompts: in the
    order in which they are computed otherwise.
    """
    found: set[int] = set()
    kept: list[tuple[float, int]] = []
    ready_s = now
    for place, prompt in enumerate(prompts):
        seconds = cost.prefill_s(prompt.num_tokens, prompt.num_before, config.max_chunk_tokens)
        ready_s += seconds
        if now <= prompt.due_s(config, PATIENCE):
            heapq.heappush(kept, (-seconds, -place))
        if ready_s > prompt.due_s(config, SLACK) and kept:
            longest_s, other = heapq.heappop(kept)
            ready_s += longest_s
            found.add(-other)
    return found


def efficient_chunk(config: EngineConfig, cost: StepCostModel) -> int:
    """Return the smallest chunk that is efficient: what a step takes in any case is then only
    `EFFICIENT_LOSS` of what its tokens take.
    """
    most = config.max_chunk_tokens
    fixed_s = cost.coefficients[0]
    token_s = (cost.step_s(most, 0, 1) - fixed_s) / most
    if token_s * most * EFFICIENT_LOSS <= fixed_s:
        return most
    return min(most, -(-math.ceil(fixed_s / (EFFICIENT_LOSS * token_s)) // UNIT) * UNIT)
