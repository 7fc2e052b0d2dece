"""Tenants take turns by the time that their work takes, and none takes all places."""

from __future__ import annotations

from mooncake.api.lane import MAX_TENANTS, FairQueue


def taken(queue: FairQueue[object]) -> str:
    found = queue.take()
    assert found is not None
    return found[0]


def test_turns_are_by_time_and_cannot_be_saved_up() -> None:
    queue = FairQueue[object](256)
    for tenant in ("a", "a", "b", "b"):
        assert queue.add(tenant, object())
    served = []
    for seconds in (0.5, 0.1, 0.1, 0.5):
        served.append(taken(queue))
        queue.charge(served[-1], seconds)
    assert served == ["a", "b", "b", "a"]
    assert queue.add("late", object())
    assert queue.add("a", object())
    assert taken(queue) == "late", "it begins where the others are, not behind them"
    queue.charge("late", 2.0)
    assert queue.add("late", object())
    assert taken(queue) == "a"


def test_no_tenant_takes_all_places_and_those_who_left_are_forgotten() -> None:
    queue = FairQueue[object](256)
    num_own = [0, 0]
    for index in (0, 1):
        while queue.add(f"{index}", object()):
            num_own[index] += 1
    assert num_own == [128, 64]
    assert queue.add("newcomer", object())
    for index in range(2000):
        queue.charge(taken(queue), 0.001)
        queue.add(f"passing {index}", object())
    assert len(queue._used_s) <= MAX_TENANTS + 1


def test_whoever_has_nothing_waiting_gets_a_place_however_many_flood() -> None:
    queue = FairQueue[object](64)
    for flood in range(500):
        while queue.add(f"flood {flood}", object()):
            pass
    assert len(queue) < 64 + 500
    assert queue.add("newcomer", object())
    assert not queue.add("newcomer", object())


def test_what_nobody_wants_any_more_frees_its_place() -> None:
    queue = FairQueue[object](2)
    first = object()
    assert queue.add("a", first)
    assert not queue.add("a", object())
    queue.discard("a", first)
    queue.discard("a", first)
    assert len(queue) == 0
    assert queue.take() is None
    assert queue.add("a", object())
