"""Which test files hold tests that are run apart, said without importing them."""

from __future__ import annotations

from pathlib import Path

INTEGRATION = Path(__file__).parents[1] / "integration"
SLOW_FOLDERS = [INTEGRATION / name for name in ("install", "model", "pool", "serve")]
"""Their tests start many processes, install, or compare with transformers: all are slow."""
APART = ("slow", "alone")
"""Markers of tests that are run apart: few files hold some."""


def is_in_slow_folder(path: Path) -> bool:
    return any(folder == path or folder in path.parents for folder in SLOW_FOLDERS)


def may_hold(path: Path, marker: str) -> bool:
    """Whether the file names the marker, or all its tests have it."""
    return f"mark.{marker}" in path.read_text() or (marker == "slow" and is_in_slow_folder(path))
