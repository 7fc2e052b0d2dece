"""Drafts that are taken whatever they cost on this machine now: what a row of a step costs is
measured, and on a busy machine none may seem worth its time.
"""

from __future__ import annotations

import pytest

from mooncake.engine import speculation


def drafts_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines of this process find rows and drafts free until the test ends."""
    monkeypatch.setattr(speculation.RowCost, "line", property(lambda _: (1.0, 0.0)))
    monkeypatch.setattr(speculation._Beyond, "seconds", property(lambda _: 0.0))
