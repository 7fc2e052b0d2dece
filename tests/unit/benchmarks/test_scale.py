"""Sixteen nodes under a trace: what is tried, how far, and what the tables make of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import scale
from benchmarks.scale import (
    Run,
    Setting,
    best_of,
    constants,
    figure_of,
    play,
    rows_of,
    search,
    settings,
    some_of,
)
from benchmarks.support.goodput_figures import Limits, Outcome
from mooncake.sim.workload import TraceLine, describe
from tests.support.sim.traces import sessions

LIMITS = Limits(ttft_s=5.0, tbt_s=0.05)
GOOD = Outcome(end="whole", ttft_s=1.0, tbt_s=0.02)
SLOW = Outcome(end="whole", ttft_s=1.0, tbt_s=0.08)


def run(system: str, setting: str, rate: float, good: int) -> Run:
    return Run(
        load="h200x8", server=setting, system=system, rate=rate, seed=0, hit_rate=0.25,
        outcomes=[GOOD] * good + [SLOW] * (10 - good), idle_ttft_s=0.0, idle_tbt_s=0.0,
        load_average=0.0,
    )  # fmt: skip


@pytest.mark.parametrize("hardware", scale.SHAPES)
def test_every_setting_takes_all_nodes_and_serves_all_requests(hardware: str) -> None:
    """One of each system is played."""
    num_engines = scale.engines_on(hardware)
    found = settings(num_engines)
    assert len({(one.system, one.name) for one in found}) == len(found)
    for one in {each.system: each for each in found}.values():
        assert 0 <= one.num_prefill < num_engines
        played = play(hardware, one, sessions(40), 2.0)
        assert played.rate == 2.0
        assert all(outcome.end == "whole" for outcome in played.outcomes), one
        assert all(outcome.ttft_s > 0 for outcome in played.outcomes)
        assert played.hit_rate > 0


def test_some_conversations_are_drawn_whole_from_all_of_a_trace() -> None:
    lines = [
        TraceLine(timestamp=turn * 1e4 + talk, input_length=512 * (turn + 2), output_length=5,
                  hash_ids=[0, *range(talk * 100 + 1, talk * 100 + turn + 2)])
        for turn in range(4) for talk in range(200)
    ]  # fmt: skip
    some = some_of(lines, 4)
    assert 30 < len({line.hash_ids[1] for line in some}) < 70
    assert len(some) == 4 * len({line.hash_ids[1] for line in some}), "all turns of each"
    assert describe(some).max_hit_rate == pytest.approx(describe(lines).max_hit_rate, abs=0.01)
    assert some_of(lines, 1) == lines


def test_the_best_setting_of_a_system_is_the_one_that_keeps_limits_at_the_highest_rate() -> None:
    runs = [
        run("both", "small steps", 10.0, 10), run("both", "small steps", 20.0, 8),
        run("both", "large steps", 10.0, 10), run("both", "large steps", 20.0, 4),
        run("apart", "8P8D", 10.0, 10), run("apart", "8P8D", 20.0, 10),
        run("slow", "other", 20.0, 2), run("slow", "any", 20.0, 2), run("slow", "any", 10.0, 3),
    ]  # fmt: skip
    assert [(one.system, one.setting, str(one.highest)) for one in best_of(runs, LIMITS)] == [
        ("both", "small steps", "15.00"), ("apart", "8P8D", ">= 20.00"), ("slow", "any", "< 10.00"),
    ]  # fmt: skip
    _, both, apart, slow = rows_of(runs, "h200x8", LIMITS)
    assert both[2:5] == ["15.00", f"{15 / 128:.3f}", f"{15 * 3600 / 128 / 4:,.0f}"]
    assert apart[5:] == ["25%", "1.00 s", "20 ms"]
    assert slow[3:5] == ["", ""]
    plot, names = figure_of(runs, LIMITS)
    assert names == ["both, small steps", "apart, 8P8D", "slow, any"]
    assert all(name in plot for name in names)


def test_the_best_settings_are_played_until_they_miss_limits_and_never_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = []

    def once(hardware: str, setting: Setting, lines: list[TraceLine], rate: float) -> Run:
        played.append((setting.name, rate))
        good = {"steps of 512": 9, "steps of 1,024": 10, "steps of 2,048": 4}[setting.name]
        return run(setting.system, setting.name, rate, good - (5 if rate >= 2 else 0))

    monkeypatch.setattr(scale, "play", once)
    args = argparse.Namespace(only=["engine, steps"], rate=1.0, out=tmp_path / "runs")
    lines = sessions(10)
    first = list(search(args, "h200x8", lines, [LIMITS]))
    names = [f"steps of {chunk:,}" for chunk in scale.CHUNKS]
    assert played[:3] == [(name, 1.0) for name in names]
    assert {name for name, _ in played[3:]} == {"steps of 1,024"}
    assert played[-1][1] >= 2 > played[-2][1]
    num = len(played)
    assert list(search(args, "h200x8", lines, [LIMITS])) == first
    assert len(played) == num
    args.rate = 4.0
    list(search(args, "h200x8", lines, [LIMITS]))
    slower = [rate for name, rate in played[num + 3 :] if name == "steps of 512"]
    assert slower == sorted(slower, reverse=True), "all settings are played slower"
    assert slower[-1] < 2 <= slower[-2]


def test_every_constant_has_a_source_or_is_marked_as_fitted() -> None:
    for hardware in scale.SHAPES:
        lines = constants(hardware)
        assert any("gpu_hour_dollars" in line for line in lines)
        assert "fitted" in lines[-1].lower()
