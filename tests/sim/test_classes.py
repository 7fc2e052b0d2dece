"""Classes and tenants on made traces: who waits for whom when there is too much to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from mooncake.base import FinishReason, Priority
from mooncake.sim.measure import RequestMeasure
from mooncake.sim.workload import TRACE_BLOCK_TOKENS, TraceLine
from tests.support.sim.traces import simulation

LIMITS = {"ttft_slo_s": 10.0, "tbt_slo_s": 0.1}
Fields = dict[str, Any]


class Made:
    """A trace in the making: prompts of thousands of tokens, none like another."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)
        self._next_id = 1
        self._lines: list[TraceLine] = []

    def stream(self, rate: float, begin_s: float, end_s: float, fields: Fields) -> Made:
        """Add requests at random times, so many a second."""
        at_s = begin_s
        while (at_s := at_s + self._random.expovariate(rate)) < end_s:
            length = self._random.randrange(3000, 9000)
            ids = range(self._next_id, self._next_id - (-length // TRACE_BLOCK_TOKENS))
            self._next_id = ids.stop
            self._lines.append(
                TraceLine(
                    timestamp=1e3 * at_s,
                    input_length=length,
                    output_length=self._random.randrange(10, 40),
                    hash_ids=list(ids),
                    **fields,
                )
            )
        return self

    @property
    def lines(self) -> list[TraceLine]:
        return sorted(self._lines, key=lambda line: line.timestamp)


def play(
    trace: list[TraceLine], kind: Callable[[TraceLine], str], **scheduler: float
) -> dict[str, list[RequestMeasure]]:
    """Play a trace on one prefill and two decode instances; return its requests by kind. Each has
    one final event, and nothing is left.
    """
    played = simulation(trace, 1, 2, scheduler=scheduler)
    played.run()
    found: dict[str, list[RequestMeasure]] = defaultdict(list)
    for line, measure in zip(trace, played.measures.requests, strict=True):
        assert measure.num_finals == 1
        found[kind(line)].append(measure)
    for _, machine in played.world.machines():
        machine.check_integrity()
    assert played.world.gateway.idle
    return found


def ttfts(requests: list[RequestMeasure]) -> list[float]:
    """Return the times to the first token, of those that have one, in order."""
    return sorted(one.ttft_s for one in requests if one.ttft_s is not None)


def mean_s(requests: list[RequestMeasure]) -> float:
    found = ttfts(requests)
    return sum(found) / len(found)


def served(requests: list[RequestMeasure]) -> float:
    """Return the share that ended well."""
    return sum(one.final is FinishReason.STOP for one in requests) / len(requests)


def of_class(line: TraceLine) -> str:
    return line.priority.value


FLOOD = (
    Made()
    .stream(0.2, 0.0, 120.0, {"tenant": "quiet"})
    .stream(2.5, 20.0, 60.0, {"tenant": "flood"})
    .lines
)


def test_a_flood_does_not_starve_another_tenant() -> None:
    fair = play(FLOOD, lambda line: line.tenant)
    assert served(fair["quiet"]) == served(fair["flood"]) == 1.0
    assert mean_s(fair["flood"]) > 10.0, "it was no flood"
    assert mean_s(fair["quiet"]) < 3.0
    strangers = {line.timestamp for line in FLOOD if line.tenant == "flood"}
    unnamed = [msgspec.structs.replace(line, tenant="") for line in FLOOD]
    first_come = play(unnamed, lambda line: "flood" if line.timestamp in strangers else "quiet")
    assert mean_s(first_come["quiet"]) > 3 * mean_s(fair["quiet"])


def test_a_flood_is_refused_before_another_tenant_is() -> None:
    found = play(FLOOD, lambda line: line.tenant, **LIMITS)
    assert served(found["quiet"]) > 0.9
    assert served(found["flood"]) < 0.7


def test_batch_fills_idle_workers_and_delays_no_other_class() -> None:
    interactive = Made().stream(0.6, 0.0, 120.0, {})
    alone = play(interactive.lines, of_class)
    both = play(interactive.stream(20.0, 20.0, 23.0, {"priority": Priority.BATCH}).lines, of_class)
    assert served(both["batch"]) == served(both["interactive"]) == 1.0
    assert mean_s(both["interactive"]) < 1.5 * mean_s(alone["interactive"])
    assert mean_s(both["batch"]) > 10.0


def test_overloaded_premium_goes_before_interactive_before_batch() -> None:
    made = Made()
    for priority in Priority:
        made.stream(0.9, 0.0, 60.0, {"priority": priority})
    found = play(made.lines, of_class, **LIMITS)
    assert served(found["premium"]) > 0.95
    assert 0.2 < served(found["interactive"]) < 0.9
    last_interactive = max(one.submitted_s for one in found["interactive"])
    early = [one for one in found["batch"] if one.first_s and one.first_s < last_interactive]
    assert len(early) < 0.2 * len(found["batch"]), "batch runs when the others have gone"
    assert mean_s(found["premium"]) < mean_s(found["interactive"])


def one(at_s: float, num_output: int, content: int, fields: Fields) -> TraceLine:
    return TraceLine(
        timestamp=1e3 * at_s,
        input_length=300,
        output_length=num_output,
        hash_ids=[content],
        **fields,
    )


@pytest.mark.parametrize(
    ("flood", "mine"),
    [({"priority": Priority.PREMIUM}, {}), ({"tenant": "flood"}, {"tenant": "other"})],
)
def test_one_call_of_128_choices_does_not_stand_in_the_way(flood: Fields, mine: Fields) -> None:
    """128 sequences of 600 tokens want more seats than decode has. Answers of 30 tokens that are
    asked for meanwhile take at most three times as long as alone: by simulated time, which is made
    of steps.
    """
    asked = [one(20.0 + 3.0 * number, 30, number, mine) for number in range(4)]
    call = [one(1.0, 600, 999, flood) for _ in range(128)]
    took = []
    for trace in (asked, sorted([*call, *asked], key=lambda line: line.timestamp)):
        played = simulation(trace, 1, 1, max_num_seqs=32)
        played.run()
        found = [m for m in played.measures.requests if m.arrival.num_output_tokens == 30]
        assert [one.num_tokens for one in found] == [30] * 4
        assert played.world.gateway.idle
        took.append(max(one.last_s - one.submitted_s for one in found))
    last_s = max(measure.last_s for measure in played.measures.requests)
    assert last_s > max(one.last_s for one in found), "the call lasts longer than they"
    assert took[1] < 3 * took[0]


def took_s(trace: list[TraceLine], **changes: object) -> list[float]:
    """Return how long the answers of 30 tokens took, in order; nothing is left afterwards."""
    played = simulation(trace, 1, 1, **changes)
    played.run()
    for _, machine in played.world.machines():
        machine.check_integrity()
    assert played.world.gateway.idle
    assert {measure.num_finals for measure in played.measures.requests} == {1}
    found = [m for m in played.measures.requests if m.arrival.num_output_tokens == 30]
    assert [one.num_tokens for one in found] == [30] * len(found)
    return [one.last_s - one.submitted_s for one in found]


@pytest.mark.parametrize("num_pages", [24, 180])
@pytest.mark.parametrize(
    ("flood", "mine"),
    [({"priority": Priority.PREMIUM}, {}), ({"tenant": "flood"}, {"tenant": "other"})],
)
def test_nor_where_memory_is_what_is_short(num_pages: int, flood: Fields, mine: Fields) -> None:
    """128 sequences of 600 tokens have 256 pages at their ends. With 180 decode is full of them;
    with 24 prefill is, too, of prompts that wait for room at decode.
    """
    asked = [one(3.0 + 2.0 * number, 30, number, mine) for number in range(3)]
    call = [one(1.0, 300, 999, flood) for _ in range(128)]
    memory = {"hbm_tokens": num_pages * TRACE_BLOCK_TOKENS}
    quiet = max(took_s(asked, **memory))
    took = took_s(sorted([*call, *asked], key=lambda line: line.timestamp), **memory)
    assert max(took) < 3 * quiet


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    floods=st.lists(
        st.tuples(st.sampled_from(Priority), st.sampled_from("abc"), st.integers(4, 32)),
        min_size=1,
        max_size=4,
    ),
    num_tokens=st.sampled_from([40, 200]),
    num_pages=st.sampled_from([12, 24, 48]),
    num_permits=st.sampled_from([8, 64, 1024]),
    num_seats=st.sampled_from([8, 256]),
)
def test_a_short_answer_is_not_held_up_by_floods_whatever_is_short(
    floods: list[tuple[Priority, str, int]], num_tokens: int, num_pages: int, num_permits: int,
    num_seats: int,
) -> None:  # fmt: skip
    """Permits, seats or pages: at most three times as long as alone. There are more seats than
    flows: each that has only one keeps it.
    """
    call = [
        one(1.0, num_tokens, 1000 * number + index, {"priority": priority, "tenant": tenant})
        for number, (priority, tenant, num_sequences) in enumerate(floods)
        for index in range(num_sequences)
    ]
    asked = [one(2.0 + number, 30, 9000 + number, {"tenant": "mine"}) for number in range(2)]
    changes = {
        "hbm_tokens": num_pages * TRACE_BLOCK_TOKENS, "max_num_seqs": num_seats,
        "scheduler": {"max_inflight": num_permits},
    }  # fmt: skip
    assert max(took_s([*call, *asked], **changes)) < 3 * 0.78
