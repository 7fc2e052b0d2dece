"""How many tokens of a prompt one step computes: so many that gaps of the streams beside it keep a
limit, and in a pipeline so many that the prompt is through all stages soonest.

A pipeline takes the sum of its steps, and each stage but one waits once for the longest: sum and
longest step are traded here. Later chunks of equal size are slower, as they attend to more, so
that chunks shrink towards the end of a long prompt, at most until they take the time of a first
one; but each reads the whole context and all weights again, so that they stay large where this
costs more than the tail saves. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mooncake.engine.cost import StepCostModel

UNIT = 64
"""Chunks are whole blocks of this many tokens."""
LEAST_SHARE = 2
"""No chunk is smaller than this part of the largest: what a step costs as such, the reading of all
experts above all, would prevail.
"""
LIMITS = (1.0, 0.875, 0.75, 0.625, 0.5)
"""Of the time that the last chunk would take in full: the limits of a step that are compared."""


def chunk_sizes(
    cost: StepCostModel, most: int, num_context_tokens: int, num_tokens: int
) -> Sequence[int]:
    """Return the chunks in which a pipeline computes the `num_tokens` tokens of a prompt that lie
    behind `num_context_tokens` others, so that the last is through all stages soonest.

    most: of one chunk. All but the last are multiples of `UNIT` where `most` is larger, and as
    large as may be where there is one stage.
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
    """Return the largest chunk behind `num_context_tokens` that takes no longer than `limit_s`,
    from `least` to `most` tokens; a multiple of `UNIT` where it is between them.

    By the cost model x tokens behind L take fixed + context L + (token + pair L) x + square x²:
    solved for x.
    """
    fixed, token, pair, square, of_context = cost.coefficients
    left_s = limit_s - fixed - of_context * num_context_tokens
    if left_s <= 0:
        return least
    linear = token + pair * num_context_tokens
    root = linear + math.sqrt(linear**2 + 4 * square * left_s)
    found = 2 * left_s / root if root > 0 else most
    return most if found >= most else max(least, int(found) // UNIT * UNIT)
