"""How much of what may be tried a test tries: all, unless MOONCAKE_TEST_EXAMPLES says less."""

from __future__ import annotations

import os

PARTS = {"few": 10, "some": 3}
"""One of so many examples is tried: `few` after a change, `some` on the build machine."""
LEAST = 5


def tries_all() -> bool:
    """Whether a test tries also what is much like something else that it tries."""
    return _one_of() == 1


def examples(full: int) -> int:
    """Return how many examples a property gets of its full number: `LEAST` at least."""
    return max(LEAST, full // _one_of())


def _one_of() -> int:
    return PARTS.get(os.environ.get("MOONCAKE_TEST_EXAMPLES", ""), 1)
