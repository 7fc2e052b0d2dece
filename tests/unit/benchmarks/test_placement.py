"""The benchmark of placements runs."""

from __future__ import annotations

import json

import pytest

from benchmarks import placement


def test_all_requests_are_placed(capsys: pytest.CaptureFixture[str]) -> None:
    small = {
        "workers": 4, "blocks": 20, "index-blocks": 2000, "conversations": 8, "placements": 40,
        "warm-up": 80,
    }  # fmt: skip
    assert placement.main([f"--{name}={value}" for name, value in small.items()] + ["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placements"] == 40
    assert found["blocks"] >= 2000
