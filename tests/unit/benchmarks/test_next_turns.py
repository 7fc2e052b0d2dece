"""Next turns of agents: what the load is, and what kept prompts and answers are worth to it."""

from __future__ import annotations

import statistics

import pytest

from benchmarks import next_turns
from benchmarks.next_turns import load_of, play


def test_turns_follow_one_another_and_others_share_nothing() -> None:
    load = load_of(3, (50, 100), (10.0, 20.0), 0.5, seed=3)
    assert len(load.sessions) == 3
    tools = next_turns.TOOLS_TOKENS
    begins = [turns[0].fresh() for _, turns in load.sessions]
    assert begins[0][:tools] == begins[1][:tools]
    assert begins[0][tools : tools + 64] != begins[1][tools : tools + 64]
    every = [turn for _, turns in load.sessions for turn in turns] + [one for _, one in load.others]
    assert sorted(turn.index for turn in every) == list(range(len(every)))
    assert load.workload().output_lengths == [
        turn.num_answer for turn in sorted(every, key=lambda turn: turn.index)
    ]


def test_kept_prompts_and_answers_are_found_where_others_have_filled_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_turns, "TURNS", (3, 3))
    load = load_of(1, (500, 700), (60.0, 90.0), 0.6, seed=5)
    missed = {}
    for asked in next_turns.ASKED:
        seen = play(load, "2 colocated", asked, 60_000, block_tokens=128)
        assert len(seen.said) == 2
        missed[asked] = statistics.mean(seen.missed)
    nothing, prompt, both = missed.values()
    assert nothing > prompt + 1_000
    assert prompt > both + 300
    assert both == statistics.mean(seen.in_last_block)


def test_turns_that_come_too_late_find_on_ssd_what_was_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(next_turns, "TURNS", (3, 3))
    load = load_of(1, (500, 700), (60.0, 90.0), 0.6, seed=5)
    missed = {}
    for asked in ("nothing", "prompt and answer"):
        seen = play(load, "2 colocated", asked, 60_000, 6e9, block_tokens=128, keep_s=5.0)
        missed[asked] = statistics.mean(seen.missed)
    assert missed["prompt and answer"] == statistics.mean(seen.in_last_block)
    assert missed["nothing"] > missed["prompt and answer"] + 1_000
