"""A benchmark that was stopped goes on behind the runs that it has kept."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.support.kept_runs import KeptRuns


class Run(msgspec.Struct, frozen=True):
    rate: float
    names: list[str] = []


RUNS = [Run(0.5), Run(1 / 3, ["a", "b\n"])]


def test_a_later_call_reads_what_earlier_ones_kept(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    assert KeptRuns(path, Run).read() == []
    for number, run in enumerate(RUNS):
        kept = KeptRuns(path, Run)
        assert kept.read() == RUNS[:number]
        kept.add(run)
        assert kept.read() == RUNS[: number + 1]


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    kept = KeptRuns(None, Run)
    kept.add(RUNS[0])
    assert kept.read() == []
    assert not list(tmp_path.iterdir())
