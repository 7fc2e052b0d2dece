"""The loads of the goodput benchmark, and what it makes of outcomes."""

from __future__ import annotations

import random

import pytest
import yaml

from benchmarks.support.goodput_figures import (
    Highest,
    Limits,
    Outcome,
    Trial,
    highest_rate,
    next_turns,
    relative,
    summary,
    table,
)
from benchmarks.support.sessions import (
    PARTIES,
    agents,
    chats,
    conversations,
    keys_file,
    shorter,
    tenants,
)
from mooncake.sim.workload import TraceLine

LIMITS = Limits(ttft_s=5.0, tbt_s=0.15)


def draw(source: random.Random, count: int) -> list[int]:
    return source.choices(range(1, 1000), k=count)


def line(at_ms: float, *hash_ids: int, cut: int = 0, output: int = 80) -> TraceLine:
    return TraceLine(
        timestamp=at_ms,
        input_length=512 * len(hash_ids) - cut,
        output_length=output,
        hash_ids=list(hash_ids),
    )


def trial(rate: float, outcomes: list[Outcome], *, server: str = "ours", seed: int = 1) -> Trial:
    return Trial(
        load="chats",
        server=server,
        rate=rate,
        seed=seed,
        outcomes=outcomes,
        idle_ttft_s=0.2 if server == "ours" else 0.3,
        idle_tbt_s=0.03 if server == "ours" else 0.02,
        load_average=0.0,
    )


GOOD = Outcome(end="whole", ttft_s=5.0, tbt_s=0.15)
SLOW = Outcome(end="whole", ttft_s=1.0, tbt_s=0.151)
REFUSED = Outcome(end="refused")


# ---------------------------------------------------------------- loads


def test_a_trace_made_shorter_shares_the_prefixes_that_it_shared() -> None:
    lines = shorter([line(0, 1, 2, 3), line(1000, 1, 2, 4, cut=100), line(3000, 9)], 8192)
    sessions = conversations(lines, 3, 0.5, draw, 7, recorded=True)
    prompts = [session.turns[0].fresh for session in sessions]
    assert [len(prompt) for prompt in prompts] == [96, 89, 32]
    assert prompts[0][:64] == prompts[1][:64]
    assert prompts[0][64:89] != prompts[1][64:]
    assert [session.turns[0].output_len for session in sessions] == [10, 10, 10]
    assert [session.at_s for session in sessions] == [0.0, 2.0, 6.0]  # 3 requests in 6 s


def test_what_is_too_long_even_when_shorter_is_left_out() -> None:
    lines = shorter([line(0, 1, 2), line(1, 3, output=800)], 100)
    assert [one.hash_ids for one in lines] == [[1, 2]]


def test_a_seed_chooses_the_place_in_the_trace_and_the_tokens() -> None:
    lines = shorter([line(1000 * n, n) for n in range(200)], 8192)
    one, again, other = (
        conversations(lines, 20, 1.0, draw, seed, recorded=False) for seed in (1, 1, 2)
    )
    assert one == again
    assert one[0].turns[0].fresh != other[0].turns[0].fresh
    assert one[-1].at_s == pytest.approx(20.0)  # so that no seed changes the rate


def test_agents_share_a_system_prompt_and_come_at_the_rate_of_their_requests() -> None:
    sessions = agents(60, 0.5, draw, 3)
    num_requests = sum(len(session.turns) for session in sessions)
    assert 60 <= num_requests < 68
    assert len({tuple(session.turns[0].fresh[:512]) for session in sessions}) == 1
    assert len({tuple(session.turns[0].fresh) for session in sessions}) == len(sessions)
    assert sessions[-1].at_s == pytest.approx(num_requests / 0.5)
    assert all(turn.pause_s > 0 for session in sessions for turn in session.turns[1:])


def test_chats_share_nothing() -> None:
    sessions = chats(10, 2.0, draw, 1)
    assert len({tuple(session.turns[0].fresh[:16]) for session in sessions}) == 10
    assert sessions[-1].at_s == pytest.approx(5.0)


# ---------------------------------------------------------------- figures


def test_two_tenants_send_in_their_classes_and_one_floods_in_bursts() -> None:
    sessions = tenants(200, 2.0, draw, 3)
    by_name = {name: [one for one in sessions if one.party == name] for name in PARTIES}
    assert all(by_name.values())
    assert sessions == sorted(sessions, key=lambda session: session.at_s)
    for name, own in by_name.items():
        assert len(own) == pytest.approx(200 * PARTIES[name].share, abs=8)
        num_times = len({session.at_s for session in own})
        assert num_times == (len(own) // 8 if "flood" in name else len(own))
    assert tenants(200, 2.0, draw, 3) == sessions
    keys = yaml.safe_load(keys_file())["keys"]
    assert {key["name"]: set(key["priorities"]) for key in keys} == {
        "small": {"interactive", "premium"}, "flood": {"interactive", "batch"},
    }  # fmt: skip


def test_a_request_is_good_when_it_ends_whole_within_both_limits() -> None:
    assert LIMITS.are_met(GOOD)
    assert not LIMITS.are_met(SLOW)
    assert not LIMITS.are_met(Outcome(end="whole", ttft_s=5.01, tbt_s=0.0))
    assert not any(LIMITS.are_met(Outcome(end=end)) for end in ("refused", "failed", "late"))


@pytest.mark.parametrize(
    ("points", "found"),
    [
        ([(1.0, 1.0), (2.0, 0.8)], Highest(rate=1.5)),
        ([(2.0, 0.8), (1.0, 0.9)], Highest(rate=1.0)),
        ([(1.0, 0.89)], Highest(rate=1.0, bound="<")),
        ([(1.0, 0.9), (3.0, 1.0)], Highest(rate=3.0, bound=">=")),
        (
            [(1.0, 1.0), (2.0, 0.8), (3.0, 1.0)],
            Highest(rate=1.5),
        ),  # a lucky trial counts for naught
    ],
)
def test_the_highest_rate_is_where_the_share_first_falls(
    points: list[tuple[float, float]], found: Highest
) -> None:
    assert highest_rate(points, 0.9) == Highest(rate=pytest.approx(found.rate), bound=found.bound)


def test_relative_limits_are_those_of_the_fastest_idle_server() -> None:
    both = [trial(1, [GOOD]), trial(1, [GOOD], server="theirs")]
    assert relative(both, 10, 5) == Limits(ttft_s=pytest.approx(2.0), tbt_s=pytest.approx(0.1))


def test_tables_show_shares_by_seed_and_what_was_not_good() -> None:
    trials = [
        trial(1, [GOOD, GOOD, GOOD, REFUSED]),
        trial(1, [GOOD, SLOW, GOOD, GOOD], seed=2),
        trial(2, [REFUSED] * 4),
        trial(2, [GOOD] * 2 + [Outcome(end="late")] * 2, seed=2),
    ]
    rows = table(trials, LIMITS)
    assert rows[2] == "| chats | 1 | ours | 75 % (75, 75) | 12 % | 0 % | 5.00 | 150 |"
    assert rows[3] == "| chats | 2 | ours | 25 % (0, 50) | 50 % | 25 % | 5.00 | 150 |"
    assert summary(trials, LIMITS, [0.5, 0.9])[2:] == [
        "| chats | ours | 1.50 (1.33, >= 2.00) | < 1.00 (< 1.00, < 1.00) |"
    ]


def test_of_next_turns_the_table_says_how_much_of_what_was_said_was_found() -> None:
    first = Outcome(end="whole", ttft_s=9.0, num_cached=64)
    turns = [
        Outcome(end="whole", ttft_s=0.5, num_said=100, num_cached=64),
        Outcome(end="whole", ttft_s=1.5, num_said=300, num_cached=320),
        Outcome(end="refused", num_said=500),
    ]
    lines = next_turns([trial(0.5, [first, *turns[:1]]), trial(0.5, turns[1:], seed=2)])
    assert len(lines) == 3
    assert lines[2] == "| chats | 0.5 | ours | 2 | 200 | 91.0 % | 18 | 1.00 |"
    assert next_turns([trial(0.5, [first])]) == []
