"""How many tokens of a prompt one step computes where its chunks follow one another through stages.

A stage waits for the slowest chunk before the next can come, and later chunks of equal size are
slower, as they attend to more. So chunks shrink as the context grows, and all take the time of the
first. Pure.
"""

from __future__ import annotations

import math

from mooncake.engine.cost import StepCostModel

UNIT = 64
"""Chunks are whole blocks of this many tokens."""
LEAST_SHARE = 2
"""No chunk is smaller than this part of the first. What a step costs as such, the reading of all
experts above all, would prevail over the tail that is saved: by the simulator's costs for Kimi-K2 a
prompt of 512k tokens in four stages gains 3.65x with 2, 3.40x with 8, 3.66x with equal chunks; one
of 128k 3.25x, 3.30x, 3.03x (`python -m benchmarks long-prompts`).
"""


def equal_chunk(cost: StepCostModel, most: int, num_context_tokens: int) -> int:
    """Return the size of a chunk behind `num_context_tokens` tokens that takes as long as the first
    one of a prompt, of `most` tokens; a multiple of `UNIT` where `most` is larger.

    By the cost model, x tokens behind L take fixed + token x + pair L x + square x²: solved for x.
    """
    if most <= UNIT or not num_context_tokens:
        return most
    _, token, pair, square = cost.coefficients
    wanted = token * most + square * most**2
    linear = token + pair * num_context_tokens
    root = linear + math.sqrt(linear**2 + 4 * square * wanted)
    found = 2 * wanted / root if root > 0 else most
    smallest = max(UNIT, most // LEAST_SHARE // UNIT * UNIT)
    return min(most, max(smallest, int(found) // UNIT * UNIT))
