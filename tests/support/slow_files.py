"""Which test files hold slow tests, said without importing them."""

from __future__ import annotations

from pathlib import Path

INTEGRATION = Path(__file__).parents[1] / "integration"
SLOW_FOLDERS = [INTEGRATION / name for name in ("install", "model", "pool", "serve")]
"""Their tests start many processes, install, or compare with transformers: all are slow."""


def is_in_slow_folder(path: Path) -> bool:
    return any(folder == path or folder in path.parents for folder in SLOW_FOLDERS)


def may_hold_slow_tests(path: Path) -> bool:
    """Whether all tests of the file are slow, or it names the marker."""
    return is_in_slow_folder(path) or "mark.slow" in path.read_text()
