"""`python -m benchmarks pool-questions` with a pool node in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_it_prints_a_table_and_writes_each_round(tmp_path: Path) -> None:
    out = tmp_path / "figures" / "of.json"
    words = ["--sizes", "64KiB", "--keys", "1,8", "--rounds", "2", "--no-upstream"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "pool-questions", *words, "--json", str(out)],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert "| 64 KiB | " in done.stdout
    assert "| 8 x 8 KiB | " in done.stdout
    assert "without upstream (not asked for)" in done.stdout
    figures = json.loads(out.read_text())
    assert list(figures) == ["64 KiB", "8 x 8 KiB"]
    assert all(len(rounds) == 2 for row in figures.values() for rounds in row.values())
