"""Which test files hold tests that are run apart, said without importing them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
INTEGRATION = TESTS / "integration"
SLOW_FOLDERS = [INTEGRATION / name for name in ("install", "model", "pool", "serve")]
"""Their tests start many processes, install, or compare with transformers: all are slow."""
APART = ("slow", "alone")
"""Markers of tests that are run apart: few files hold some."""
LONGEST = (
    "integration/kubelet/test_guide.py", "integration/hosts/test_up.py",
    "integration/launch/test_ranks.py", "integration/serve", "integration/kubelet",
    "integration/hosts", "integration/image", "integration/model", "integration/install",
    "integration/pool", "sim", "fuzz", "property",
)  # fmt: skip
"""Files and folders that take minutes, the longest first. They begin before the others, so that
none of them still runs in one process after the others have ended.
"""


@cache
def is_in_slow_folder(path: Path) -> bool:
    return any(folder == path or folder in path.parents for folder in SLOW_FOLDERS)


@cache
def may_hold(path: Path, marker: str) -> bool:
    """Whether the file names the marker, or all its tests have it."""
    return f"mark.{marker}" in path.read_text() or (marker == "slow" and is_in_slow_folder(path))


@cache
def turn(path: Path) -> int:
    """Return which of `LONGEST` the file belongs to; all others come after these."""
    named = [each for each in LONGEST if path.is_relative_to(TESTS / each)]
    return LONGEST.index(named[0]) if named else len(LONGEST)
