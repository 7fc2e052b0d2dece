"""What a soak on hosts finds wrong, and the faults that it draws."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.hosts.soak.cluster import ROLES
from tests.support.hosts.soak.faults import KINDS, Fault, draw
from tests.support.hosts.soak.load import summary
from tests.support.hosts.soak.verdict import (
    GROWTH_BYTES,
    GROWTH_FDS,
    SETTLE_S,
    WINDOW_S,
    YOUNG_S,
    Sample,
    Span,
    growth,
    leaks,
    pauses_by_kind,
    problems_of,
)

RIGHT = [5, 6, 7]


def one(how: str = "whole", ids: list[int] = RIGHT, **other: Any) -> dict[str, Any]:
    """A try at the gateway of host a, from second 100 to second 110."""
    told = {"host": "a", "from_s": 100.0, "to_s": 110.0, "how": how, "ids": ids, "why": "?"}
    if how == "whole":
        told |= {"ends": ["length"], "num_done": 1, "after_done": 0}
    return told | other


def found(*tries: dict[str, Any], fault: Fault | None = None, at_s: float = 105.0) -> list[str]:
    spans = [Span(fault, at_s, at_s, at_s)] if fault is not None else []
    return problems_of({"answer": 3, "stream": True, "tries": tries}, RIGHT, spans)


def test_a_request_that_ended_once_with_its_tokens_is_well() -> None:
    assert found(one()) == []
    fault = Fault("kill", "a", "gateway")
    assert found(one("refused", []), one("away", []), one(), fault=fault) == []
    assert found(one(usage={"completion_tokens": 3})) == []
    assert found(one("left", [5])) == [], "its client hung up"


@pytest.mark.parametrize(
    ("tries", "says"),
    [
        ([one(ids=[5, 6, 8])], "wrong tokens"),
        ([one("refused", [5, 9]), one()], "wrong tokens"),
        ([one(ids=[5, 6])], "2 of 3 tokens"),
        ([one(ends=[])], "ended by []"),
        ([one(ends=["length", "length"])], "ended by ['length', 'length']"),
        ([one(num_done=2)], "goes on after its end"),
        ([one(after_done=1)], "goes on after its end"),
        ([one("failed", [5])], "failed: ?"),
        ([one("refused", [])], "no answer after 1 tries"),
        ([one("refused", []), one()], "refused by a whole cluster"),
        ([one("away", []), one()], "took no connection"),
        ([one("left", [6])], "wrong tokens"),
        ([one(usage={"completion_tokens": 4})], "its usage is"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(tries: list[dict[str, Any]], says: str) -> None:
    problems = found(*tries)
    assert any(says in each for each in problems)
    assert all(each.startswith("request 3: ") for each in problems)


@pytest.mark.parametrize(
    ("how", "fault", "explains"),
    [
        ("cut", Fault("kill", "a", "gateway"), True),
        ("cut", Fault("kill up", "a"), True),
        ("cut", Fault("vanish", "a"), True),
        ("cut", Fault("kill", "b", "gateway"), False),
        ("cut", Fault("kill", "a", "decode"), False),
        ("cut", Fault("unplug", "a"), False),
        ("silent", Fault("unplug", "a"), True),
        ("silent", Fault("stop", "a", "gateway"), True),
        ("silent", Fault("stop", "a", "decode"), False),
        ("silent", Fault("clock", "a"), False),
        ("away", Fault("kill", "a", "gateway"), True),
        ("away", Fault("kill", "b", "gateway"), False),
        ("refused", Fault("kill", "b", "prefill"), True),
    ],
)
def test_a_try_may_break_by_a_fault_of_its_gateway_alone(
    how: str, fault: Fault, explains: bool
) -> None:
    assert (found(one(how, [5]), one(), fault=fault) == []) is explains
    assert found(one(how, [5]), one(), fault=fault, at_s=111.0), "it came later"
    assert found(one(how, [5]), one(), fault=fault, at_s=99.0 - SETTLE_S), "it was long ago"


def held(*values: tuple[int, int]) -> list[Sample]:
    """What a process held in turn, ten seconds apart, once it is no longer young."""
    return [Sample(0.0, 1, 1)] + [
        Sample(YOUNG_S + 10.0 * index, *each) for index, each in enumerate(values)
    ]


NUM_LOOKS = int(3 * WINDOW_S / 10.0)


def test_a_process_that_holds_ever_more_is_named() -> None:
    more = [(number * GROWTH_BYTES // 4, number * GROWTH_FDS // 4) for number in range(NUM_LOOKS)]
    assert len(leaks("decode on a", held(*more))) == 2
    level = [(GROWTH_BYTES * (number % 2), 100 * (number % 2)) for number in range(NUM_LOOKS)]
    assert leaks("decode on a", held(*level)) == [], "it comes and goes"
    processes = [(0, number) for number in range(NUM_LOOKS)]
    assert leaks("host a", held(*processes)) == ["host a has 11 processes more"]
    assert leaks("decode on a", held(*processes)) == []


def test_a_process_that_ended_early_says_nothing_about_growth() -> None:
    assert growth(held((1, 1), (10**9, 10**3))) is None


def test_a_seed_draws_the_same_faults_and_all_kinds_come() -> None:
    drawn = [[draw(chance, ROLES) for _ in range(300)] for chance in map(random.Random, (7, 7))]
    assert drawn[0] == drawn[1]
    assert {each.kind for each in drawn[0]} == set(KINDS)
    for fault in drawn[0]:
        if fault.kind in ("kill", "stop"):
            assert fault.what in ROLES[fault.host]
        if fault.kind == "one way":
            assert fault.what in set(ROLES) - {fault.host}


def test_pauses_are_told_by_the_kind_of_fault() -> None:
    spans = [
        Span(Fault("kill", "a", "decode"), 100.0, 100.0, 107.0),
        Span(Fault("kill", "b", "prefill"), 200.0, 200.0, None),
        Span(Fault("unplug", "c"), 300.0, 310.0, 311.0),
    ]
    table = pauses_by_kind(spans, [(90.0, 2.0), (99.0, 3.0), (201.0, 1.0), (305.0, 9.0)])
    assert table == {
        "kill": {
            "times": 2, "longest_pause_s": 3.0, "whole_median_s": 7.0, "whole_longest_s": 7.0,
        },
        "unplug": {
            "times": 1, "longest_pause_s": 9.0, "whole_median_s": 1.0, "whole_longest_s": 1.0,
        },
    }  # fmt: skip


def test_what_workers_hold_for_requests_is_counted() -> None:
    worker = {"state": "up", "silent_s": 0.1, "node_id": "a"}
    status = {
        "workers": [
            worker | {
                "role": "decode", "load": {"num_total_blocks": 9, "num_free_blocks": 7},
            },
            worker | {
                "role": "kvstore",
                "load": {"num_total_blocks": 9, "num_free_blocks": 2, "num_cached_blocks": 7},
            },
            worker | {"role": "prefill", "silent_s": 9.0, "load": None},
        ],
        "gateways": [{"state": "up", "num_inflight": 1}, {"state": "silent", "num_inflight": 5}],
        "load": {"num_inflight": 1},
    }  # fmt: skip
    assert summary(status) == {"up": ["decode@a", "kvstore@a"], "gateways": 1, "held": 4}
