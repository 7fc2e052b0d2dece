"""The published comparison of sizes and rules, on a few made-up requests."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import autoscale
from mooncake.sim.workload import TraceLine


def test_the_command_writes_table_plots_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures, page, svg = (tmp_path / name for name in ("figures.json", "page.html", "plot.svg"))
    words = ["--requests", "40", "--sizes", "2:1", "--json", str(figures), "--report", str(page)]
    words += ["--svg", str(svg)]
    assert autoscale.main(words) == 0
    assert "40 requests" in capsys.readouterr().out
    runs = json.loads(figures.read_text())
    assert [run["name"] for run in runs] == ["fixed 2P 1D", "plain HPA, 70 % busy", "policy"]
    assert all(run["total"] == 40 and run["node_hours"] > 0 for run in runs)
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "Node-hours against goodput" in text
    drawn = ElementTree.fromstring(svg.read_text())
    texts = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[-3:] == ["fixed sizes", "plain HPA", "policy"]
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 3


def test_a_swing_moves_requests_and_loses_none() -> None:
    lines = [
        TraceLine(timestamp=1000.0 * at, input_length=1, output_length=1, hash_ids=[at])
        for at in range(1001)
    ]
    moved = autoscale.swung(lines, 0.8, 2)
    times = [line.timestamp for line in moved]
    assert [line.hash_ids for line in moved] == [line.hash_ids for line in lines]
    assert times[0] == pytest.approx(0.0, abs=1.0)
    assert times[-1] == pytest.approx(1e6, abs=1.0)
    assert all(a < b for a, b in pairwise(times))
    night, day = (sum(at < time <= at + 5e4 for time in times) for at in (0.0, 225e3))
    assert day > 4 * night
    assert autoscale.swung(lines, 0.0, 2) == lines


def test_made_up_requests_are_the_same_each_time() -> None:
    assert autoscale.made_up(20, 1.0, 1) == autoscale.made_up(20, 1.0, 1)
    assert all(
        line.num_blocks == -(-line.input_length // 512) for line in autoscale.made_up(99, 1.0, 2)
    )
