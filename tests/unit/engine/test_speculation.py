"""Drafts: where they come from, what they are worth, what the engine does with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mooncake.base.errors import ConfigError
from mooncake.base.messages import CostSample
from mooncake.base.request import FinishReason
from mooncake.engine.config import SpeculativeConfig
from mooncake.engine.sequence import Sequence
from mooncake.engine.speculation import (
    ACCEPTED_AT,
    ACCEPTED_TOKENS,
    DRAFT_TOKENS,
    DRAFTS,
    LOOKUP_WINDOW,
    NgramDrafter,
    RowCost,
    Speculation,
)
from tests.support.engine.engines import Bench, request
from tests.support.engine.fake_runner import VOCAB_SIZE, expected_output, small_layout

LOOKUP = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}


def config(num: int = 3, **changes: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method="ngram", num_speculative_tokens=num, **{**LOOKUP, **changes})


def sequence_of(tokens: list[int], sequence_id: int = 1) -> Sequence:
    return Sequence(sequence_id=sequence_id, request=request(tokens))


class Fixed:
    """Proposes what a function of the output position says."""

    def __init__(self, token_at: Callable[[Sequence, int], int]) -> None:
        self._token_at = token_at
        self.num_asked = 0

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        self.num_asked += 1
        start = len(sequence.output_tokens)
        return [self._token_at(sequence, at) for at in range(start, start + most)]


def right(sequence: Sequence, at: int) -> int:
    output = expected_output(small_layout(), sequence.request)
    return output[at] if at < len(output) else 0


def wrong(sequence: Sequence, at: int) -> int:
    return (right(sequence, at) + 1) % VOCAB_SIZE


# ---------------------------------------------------------------- what is said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "magic"}, "method: 'magic' is not one of ngram"),
        ({"method": "mtp"}, "prompt_lookup_max: only the method ngram looks prompts up"),
        ({"model": "head"}, "model: 'head' is not used by the method ngram"),
        (
            {"method": "eagle3", "prompt_lookup_min": 0, "prompt_lookup_max": 0},
            "model: the method eagle3 needs a head",
        ),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: 0 is not a whole number of 1 to"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens: 33 is not"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens: True is not"),
        ({"prompt_lookup_min": 4}, "prompt_lookup_min: 4 is more than prompt_lookup_max (3)"),
        ({"prompt_lookup_max": "3"}, "prompt_lookup_max: '3' is not"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, Any], message: str) -> None:
    values = {"method": "ngram", "num_speculative_tokens": 4, **LOOKUP}
    with pytest.raises(ConfigError, match=re.escape(message)):
        SpeculativeConfig(**{**values, **changes})


@pytest.mark.parametrize(
    ("given", "lookup"),
    [({}, (5, 5)), ({"prompt_lookup_max": 4}, (4, 4)), ({"prompt_lookup_min": 2}, (2, 2))],
)
def test_what_is_not_said_is_as_in_vllm(given: dict[str, int], lookup: tuple[int, int]) -> None:
    made = SpeculativeConfig(method="ngram", num_speculative_tokens=1, **given)
    assert made.lookup == lookup


# ---------------------------------------------------------------- n-grams


def plainly(tokens: list[int], longest: int, shortest: int, most: int) -> list[int]:
    """Return the drafts by looking at every place."""
    for length in range(longest, shortest - 1, -1):
        for at in range(len(tokens) - 1 - length, -1, -1):
            if tokens[at : at + length] == tokens[len(tokens) - length :]:
                longer = list(tokens)
                for place in range(at + length, at + length + most):
                    longer.append(longer[place])
                return longer[len(tokens) :]
    return []


@pytest.mark.parametrize("lookup", [(1, 1), (3, 1), (4, 2), (4, 4)])
def test_drafts_follow_the_last_longest_match(lookup: tuple[int, int]) -> None:
    longest, shortest = lookup
    drafter = NgramDrafter(config(prompt_lookup_max=longest, prompt_lookup_min=shortest))
    state = 1
    num_found = 0
    for length in range(1, 60):
        sequence = sequence_of([])
        for _ in range(length):
            state = (state * 75 + 74) % 65537
            sequence.output_tokens.append(160_000 + state % 3)
            expected = plainly(sequence.output_tokens, longest, shortest, 4)
            assert drafter.propose(sequence, 4) == expected
            num_found += bool(expected)
    assert num_found > 100


def test_only_the_end_of_a_long_text_is_kept_and_searched() -> None:
    drafter = NgramDrafter(config())
    sequence = sequence_of([7, 8, 9, *[1] * LOOKUP_WINDOW, 7])
    assert drafter.propose(sequence, 3) == []
    sequence.output_tokens += [5, 6, 7]
    assert drafter.propose(sequence, 4) == [5, 6, 7, 5]
    assert len(sequence.drafting.text) == LOOKUP_WINDOW


# ---------------------------------------------------------------- what they are worth


def test_a_line_through_the_steps_is_found() -> None:
    cost = RowCost()
    cost.add(4, 0.3)
    cost.add(4, 0.3)
    assert not cost.known
    for rows in (1, 3, 8, 4, 16) * 40:
        cost.add(rows, 0.1 + 0.05 * rows)
    assert cost.known
    assert cost.line == pytest.approx((0.1, 0.05), rel=0.01)
    cost.add(4, 1000.0)  # the process was stopped
    fixed, each = cost.line
    assert 0.1 <= fixed + 4 * each <= 0.35


def run(
    num_sequences: int, each_s: float, rate: float, num_steps: int = 600, first_s: float = 0.0
) -> list[int]:
    """Return the drafts of each step, where a step costs 1 s and `each_s` for each row, and with
    drafts `first_s` more.
    """
    made = Speculation(Fixed(lambda sequence, at: 0), 4)
    sequences = [sequence_of([1], number) for number in range(num_sequences)]
    found, state = [], 1
    for _ in range(num_steps):
        chosen = made.choose([(each, 4) for each in sequences], num_sequences, 1000)
        outcomes = []
        for sequence in sequences:
            drafts, accepted = chosen.get(sequence.sequence_id, []), 0
            for _ in drafts:
                state = (state * 75 + 74) % 65537
                if state >= rate * 65537:
                    break
                accepted += 1
            outcomes.append((sequence, len(drafts), accepted))
        num_rows = num_sequences + sum(map(len, chosen.values()))
        seconds = 1.0 + each_s * num_rows + first_s * (num_rows > num_sequences)
        sample = CostSample(num_rows, 0, num_sequences, seconds)
        made.observe(outcomes, sample)
        found.append(num_rows - num_sequences)
    return found


def test_drafts_that_are_accepted_and_cost_little_are_all_taken() -> None:
    found = run(num_sequences=4, each_s=0.01, rate=0.95)
    assert sum(found) > 0.9 * 16 * len(found)


@pytest.mark.parametrize(
    ("num_sequences", "each_s", "rate"),
    [(1, 0.2, 0.05), (16, 0.5, 0.7), (16, 1.0, 0.8)],
)
def test_drafts_that_cost_end_but_for_a_look_now_and_then(
    num_sequences: int, each_s: float, rate: float
) -> None:
    found = run(num_sequences, each_s, rate)
    assert sum(found) > 0
    assert sum(n > 0 for n in found[100:]) <= 0.04 * len(found)


@pytest.mark.parametrize(
    ("first_s", "rate", "least", "most"), [(0.8, 0.9, 0.9, 1.0), (1.5, 0.6, 0.0, 0.1)]
)
def test_a_first_draft_that_costs_more_than_the_next_is_seen_through(
    first_s: float, rate: float, least: float, most: float
) -> None:
    """Four drafts of 0.9 give 4.1 tokens in 1.9 s, of 0.6 2.3 in 2.6 s; none: one in 1.02 s."""
    found = run(num_sequences=1, each_s=0.02, rate=rate, first_s=first_s)
    share = sum(n > 0 for n in found[200:]) / len(found[200:])
    assert least <= share <= most


def test_what_was_learned_long_ago_is_forgotten() -> None:
    drafter = Fixed(lambda sequence, at: 0)
    made, sequence = Speculation(drafter, 4), sequence_of([1])
    made.calibrate([CostSample(1, 0, 1, 1.0), CostSample(8, 0, 8, 1.1)])
    for _ in range(50):
        made.observe([(sequence, 4, 0)], CostSample(5, 0, 1, 1.05))
    for _ in range(50_000):
        made.observe([(sequence, 0, 0)], CostSample(1, 0, 1, 1.0))
    made.calibrate([CostSample(8, 0, 8, 1.1)])
    assert made.choose([(sequence, 4)], 1, 100)


def test_the_budget_goes_to_the_likeliest() -> None:
    made = Speculation(Fixed(lambda sequence, at: 0), 4)
    good, bad = sequence_of([1], 1), sequence_of([1], 2)
    made.calibrate([CostSample(1, 0, 1, 1.0), CostSample(8, 0, 8, 1.1), CostSample(5, 9, 1, 9.0)])
    for _ in range(8):
        made.observe([(good, 4, 4), (bad, 4, 0)], CostSample(10, 0, 2, 1.1))
    made.observe([(good, 0, 0), (bad, 0, 0)], CostSample(2, 0, 2, 1.0))
    assert made.choose([(bad, 4), (good, 2)], 2, 3) == {1: [0, 0], 2: [0]}
    assert made.choose([(bad, 4), (good, 4)], 2, 3) == {1: [0, 0, 0]}


# ---------------------------------------------------------------- in the engine


def test_right_drafts_take_fewer_steps_and_give_the_same() -> None:
    steps = {}
    for drafter in (None, Fixed(right)):
        bench = Bench(drafter=drafter, speculation=drafter and config())
        sequence = bench.add([1, 2, 3], max_tokens=40)
        bench.run()
        assert bench.tokens[sequence.sequence_id] == expected_output(bench.layout, sequence.request)
        steps[drafter is None] = len(bench.runner.plans)
    assert steps[False] < steps[True] / 2
    counters = bench.engine.counters
    assert counters[ACCEPTED_TOKENS] == counters[DRAFT_TOKENS] > counters[DRAFTS] > 0
    assert counters[ACCEPTED_TOKENS] + steps[False] == 40
    at = [counters[f"{ACCEPTED_AT}{position}"] for position in range(3)]
    assert sum(at) == counters[ACCEPTED_TOKENS]
    assert counters[DRAFTS] == at[0] >= at[1] >= at[2] > 0


def test_wrong_drafts_leave_no_trace() -> None:
    bench = Bench(drafter=Fixed(wrong), speculation=config())
    sequence = bench.add([1, 2, 3], max_tokens=40)
    bench.run()
    assert bench.tokens[sequence.sequence_id] == expected_output(bench.layout, sequence.request)
    assert bench.engine.counters[DRAFT_TOKENS] > bench.engine.counters[ACCEPTED_TOKENS] == 0
    again = bench.add([*sequence.prompt_tokens, *sequence.output_tokens], max_tokens=2)
    bench.run()
    assert again.num_cached_tokens >= 40, "what the drafts left in the pages was computed anew"


def test_a_stop_token_among_accepted_drafts_ends_the_sequence_there() -> None:
    output = expected_output(small_layout(), request([1, 2, 3], max_tokens=40))
    stop = output[9]
    bench = Bench(drafter=Fixed(lambda _, at: output[at]), speculation=config(num=4))
    sequence = bench.add([1, 2, 3], max_tokens=40, stop_token_ids=frozenset({stop}), num_logprobs=1)
    outputs = []
    while not bench.engine.idle:
        outputs += bench.step()
    assert bench.tokens[sequence.sequence_id] == output[: output.index(stop) + 1]
    assert bench.ends[sequence.sequence_id].reason is FinishReason.STOP
    assert any(len(each.tokens) > 1 for _, each in outputs)
    assert all(len(each.tokens) == len(each.logprobs or ()) for _, each in outputs)


def test_drafts_displace_nobody() -> None:
    """With pages for the known tokens only, sequences run as if there were no drafts."""
    found = []
    for drafter in (None, Fixed(right)):
        bench = Bench(drafter=drafter, speculation=drafter and config(), num_blocks=8)
        for number in range(4):
            bench.add([number, 2, 3], max_tokens=5)
        bench.run()
        found.append((bench.tokens, bench.engine.counters["preemptions"]))
    assert found[0] == found[1]


def test_no_draft_goes_beyond_the_model_or_the_request() -> None:
    for settings in ({"max_model_len": 12}, {}):
        bench = Bench(drafter=Fixed(right), speculation=config(num=8), **settings)
        sequence = bench.add([1, 2, 3], max_tokens=10)
        bench.run()
        limit = settings.get("max_model_len", 13)
        assert sequence.num_tokens == limit
        for plan in bench.runner.plans:
            for slot in plan.slots:
                assert slot.start + len(slot.tokens) < limit
