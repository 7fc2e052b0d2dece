"""How many tokens of a prompt one step computes. The gaps of the streams beside it must keep a
limit, and in a pipeline the prompt should be through all stages as soon as possible.

A pipeline needs the sum of its steps' times, and each stage but one waits once for the longest
step. So this module trades the sum against the longest step. Later chunks of equal size are slower,
because they attend to more tokens. Chunks therefore shrink towards the end of a long prompt, until
they take as long as a first one. But each chunk reads the whole context and all weights again, so
chunks stay large where this costs more than the shorter tail saves. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mooncake.engine.cost import StepCostModel

UNIT = 64
"""Chunks are whole blocks of this many tokens."""
LEAST_SHARE = 2
"""No chunk is smaller than the largest divided by this. Otherwise a step's fixed cost, above all
reading all experts, would dominate.
"""
LIMITS = (1.0, 0.875, 0.75, 0.625, 0.5)
"""The time limits of a step that are compared, as parts of the time that a full last chunk would
take.
"""


def chunk_sizes(
    cost: StepCostModel, most: int, num_context_tokens: int, num_tokens: int
) -> Sequence[int]:
    """Return the chunks in which a pipeline computes `num_tokens` tokens of a prompt that come
    after `num_context_tokens` others, so that the last chunk is through all stages soonest.

    most: the largest size of a chunk. All chunks but the last are multiples of `UNIT` if `most` is
    larger than that; with one stage they are as large as possible.
    """
    if cost.num_stages == 1 or num_tokens <= most or most <= UNIT:
        return _equal(most, num_tokens)
    first_s = cost.step_s(most, 0, 1)
    slowest_s = cost.step_s(most, num_context_tokens + num_tokens - most, 1)
    least = max(UNIT, most // LEAST_SHARE // UNIT * UNIT)
    best: Sequence[int] = ()
    best_s = math.inf
    for limit in LIMITS:
        sizes, sum_s, longest_s = [], 0.0, 0.0
        context, left = num_context_tokens, num_tokens
        while left:
            size = min(
                left, largest_chunk(cost, most, least, context, max(first_s, limit * slowest_s))
            )
            step_s = cost.step_s(size, context, 1)
            sizes.append(size)
            sum_s += step_s
            longest_s = max(longest_s, step_s)
            context, left = context + size, left - size
        if (through_s := sum_s + (cost.num_stages - 1) * longest_s) < best_s:
            best, best_s = sizes, through_s
    return best


def _equal(most: int, num_tokens: int) -> list[int]:
    full, rest = divmod(num_tokens, most)
    return [most] * full + [rest] * (rest > 0)


def largest_chunk(
    cost: StepCostModel, most: int, least: int, num_context_tokens: int, limit_s: float
) -> int:
    """Return the largest chunk after `num_context_tokens` that takes no longer than `limit_s`, from
    `least` to `most` tokens. It is a multiple of `UNIT` when it lies between them.

    In the cost model, x tokens after L take fixed + context L + (token + pair L) x + square x².
    This is solved for x.
    """
    fixed, token, pair, square, of_context = cost.coefficients
    left_s = limit_s - fixed - of_context * num_context_tokens
    if left_s <= 0:
        return least
    linear = token + pair * num_context_tokens
    root = linear + math.sqrt(linear**2 + 4 * square * left_s)
    found = 2 * left_s / root if root > 0 else most
    return most if found >= most else max(least, int(found) // UNIT * UNIT)
