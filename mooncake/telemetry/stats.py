"""Small statistics on plain lists: percentiles and the mean of the slowest gaps. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

SLOW_SHARE = 0.1
"""TBT limits apply to the mean of the slowest 10 % of a request's gaps (Mooncake, FAST'25, 5.1)."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the `percent`-th percentile of `values` (in any order), interpolated linearly.

    Raises:
        ValueError: there are no values, or the percentage is not within 0 to 100.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentage is between 0 and 100, not {percent}")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def slow_gap_mean(gaps: Sequence[float]) -> float:
    """Return the mean of the slowest 10 % of `gaps` (at least one), 0 when there are none.

    This is the TBT of a request.
    """
    if not gaps:
        return 0.0
    num_slow = max(1, math.ceil(SLOW_SHARE * len(gaps)))
    return math.fsum(sorted(gaps)[-num_slow:]) / num_slow
