"""Placements of experts: every expert somewhere, at any moment of a move; ranks balanced."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.base import ConfigError
from mooncake.engine.expert_placement import (
    EplbConfig,
    Placement,
    balance,
    check_slots,
    first_placement,
    next_move,
    place,
    rank_loads,
)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], Placement, int]:
    """Draw counts of experts, a placement of them, and ranks."""
    num_ranks = draw(st.sampled_from([1, 2, 4]))
    each = draw(st.integers(1, 6))
    num_experts = draw(st.integers(max(1, each), each * num_ranks))
    counts = draw(st.lists(st.integers(0, 1000), min_size=num_experts, max_size=num_experts))
    present = list(first_placement(num_experts, each * num_ranks))
    draw(st.randoms(use_true_random=False)).shuffle(present)
    return counts, tuple(present), num_ranks


@given(loads())
def test_a_new_placement_holds_all_and_is_no_worse(
    drawn: tuple[list[int], Placement, int],
) -> None:
    counts, present, num_ranks = drawn
    wanted = place(counts, present, num_ranks)
    assert len(wanted) == len(present)
    assert set(wanted) == set(range(len(counts)))
    assert balance(rank_loads(counts, wanted, num_ranks)) >= balance(
        rank_loads(counts, present, num_ranks)
    )
    assert place(counts, wanted, num_ranks) == wanted, "a second time nothing moves"


@given(loads(), loads())
def test_while_experts_move_none_is_without_a_slot(
    first: tuple[list[int], Placement, int], second: tuple[list[int], Placement, int]
) -> None:
    counts, present, num_ranks = first
    shuffled = list(present)
    random.Random(second[2]).shuffle(shuffled)
    for wanted in (place(counts, present, num_ranks), tuple(shuffled)):
        held = list(present)
        num_made = 0
        while (move := next_move(tuple(held), wanted)) is not None:
            num_made += 1
            before = list(held)
            assert len(move) in (1, 2)
            for slot, expert in move:
                assert expert in before, "it is copied from where it is"
                held[slot] = expert
            assert set(held) == set(range(len(counts)))
        assert tuple(held) == wanted
        assert num_made <= sum(map(int.__ne__, present, wanted))


@pytest.mark.parametrize("redundant", [0, 16])
def test_a_skewed_load_becomes_balanced(redundant: int) -> None:
    """64 experts whose rows fall as 1 / rank, on four ranks: the hottest has a fifth of them."""
    counts = [round(1e6 / (1 + expert)) for expert in range(64)]
    present = first_placement(64, 64 + redundant)
    assert balance(rank_loads(counts, present, 4)) < 0.65
    wanted = place(counts, present, 4)
    assert balance(rank_loads(counts, wanted, 4)) > 0.9


def test_an_expert_hotter_than_a_rank_needs_more_slots() -> None:
    counts = [90, 2, 2, 2, 2, 2]
    assert balance(rank_loads(counts, place(counts, first_placement(6, 6), 2), 2)) < 0.6
    assert balance(rank_loads(counts, place(counts, first_placement(6, 8), 2), 2)) > 0.98


def test_what_is_about_as_good_stays() -> None:
    present = (0, 1, 2, 3)
    assert place([1000, 1000, 1001, 1002], present, 2) == present
    assert place([0, 0, 0, 0], present, 2) == present


def test_what_cannot_be() -> None:
    check_slots(384, 32, 16)
    with pytest.raises(ConfigError, match=r"384 experts and 3 more do not divide .* 0 or 16 would"):
        check_slots(384, 3, 16)
    with pytest.raises(ConfigError, match="at most 8"):
        check_slots(8, 16, 2)
    with pytest.raises(ConfigError, match="window_size: 10 steps are more than step_interval"):
        EplbConfig(window_size=10, step_interval=5)
    with pytest.raises(ConfigError, match="num_redundant_experts: must be at least 0, not -1"):
        EplbConfig(num_redundant_experts=-1)
