"""How many examples a property gets: its full number, unless MOONCAKE_TEST_EXAMPLES=few."""

from __future__ import annotations

import os

FEW_IN_ALL = 10


def examples(full: int) -> int:
    """Return `full`, or a tenth of it (5 at least) where few are asked for, as `make test` does."""
    if os.environ.get("MOONCAKE_TEST_EXAMPLES") == "few":
        return max(5, full // FEW_IN_ALL)
    return full
