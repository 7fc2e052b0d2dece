"""Turns by tokens, room kept for who has less, and queues that let others go first."""

from collections import Counter

import pytest

from mooncake.base import Priority
from mooncake.scheduler.fairness import (
    BATCH_SHARE,
    BELOW_PREMIUM_SHARE,
    LATELY_S,
    MAX_IDLE_FLOWS,
    OVER_SHARE,
    Turns,
    WorkerQueues,
)

NORMAL = Priority.INTERACTIVE


def come(turns: Turns, tenant: str, num_tokens: int, priority: Priority = NORMAL) -> float:
    turn = turns.queue_position(priority, tenant, 0.0).order[1]
    turns.add(priority, tenant, turn, num_tokens)
    return turn


def test_a_flood_queues_behind_itself() -> None:
    turns = Turns()
    flood = [come(turns, "flood", 100) for _ in range(10)]
    assert flood == [100.0 * number for number in range(10)]
    turns.on_first_token(NORMAL, flood[2])
    mine = [come(turns, "other", 100) for _ in range(3)]
    assert mine == [200.0, 300.0, 400.0], "after what is served, between what waits"


def test_long_requests_take_longer_turns() -> None:
    turns = Turns()
    big = [come(turns, "big", 1000) for _ in range(4)]
    small = [come(turns, "small", 100) for _ in range(20)]
    served = sorted([(turn, "big") for turn in big] + [(turn, "small") for turn in small])
    first = Counter(name for turn, name in served if turn < 2000)
    assert first == {"big": 2, "small": 20}, "as many tokens of each"


def test_credit_cannot_be_saved_up() -> None:
    turns = Turns()
    come(turns, "late", 10)
    for _ in range(50):
        turns.on_first_token(NORMAL, come(turns, "busy", 100))
    assert come(turns, "late", 10) == 4900.0


def test_output_counts_as_well() -> None:
    turns = Turns()
    come(turns, "a", 10)
    come(turns, "a", 10)
    turns.remove(NORMAL, "a", 10, 500)
    assert come(turns, "a", 10) == 520.0


def test_classes_have_turns_of_their_own() -> None:
    turns = Turns()
    come(turns, "a", 1000, Priority.BATCH)
    queue_positions = [turns.queue_position(priority, "a", 0.0) for priority in Priority]
    assert [queue_position.order for queue_position in queue_positions] == [
        (0, 0.0),
        (1, 0.0),
        (2, 1000.0),
    ]
    assert queue_positions == sorted(
        queue_positions, key=lambda queue_position: queue_position.order
    )


def test_an_idle_class_remembers_nothing() -> None:
    turns = Turns()
    for number in range(3 * MAX_IDLE_FLOWS):
        come(turns, f"t{number}", 10)
    for number in range(3 * MAX_IDLE_FLOWS):
        turns.remove(NORMAL, f"t{number}", 10, 1)
        turns.check_integrity(
            Counter({(NORMAL, f"t{i}"): 1 for i in range(number + 1, 3 * MAX_IDLE_FLOWS)})
        )
    assert come(turns, "new", 1) == come(turns, "t5", 1), "all start from one mark"


@pytest.mark.parametrize(
    ("priority", "share"), [(Priority.PREMIUM, 1.0), (NORMAL, 1.0), (Priority.BATCH, BATCH_SHARE)]
)
def test_shares_of_the_classes(priority: Priority, share: float) -> None:
    assert Turns().queue_position(priority, "", 0.0).share == share


def test_room_is_kept_for_premium_while_it_is_about() -> None:
    turns = Turns()
    turns.note_arrival(Priority.PREMIUM, "", 5.0)
    assert turns.queue_position(NORMAL, "", 6.0).share == BELOW_PREMIUM_SHARE
    assert turns.queue_position(Priority.PREMIUM, "", 6.0).share == 1.0
    assert turns.queue_position(NORMAL, "", 6.0 + LATELY_S).share == 1.0


def test_room_is_kept_for_tenants_with_less() -> None:
    turns = Turns()
    turns.note_arrival(NORMAL, "flood", 0.0)
    come(turns, "flood", 1000)
    assert turns.queue_position(NORMAL, "flood", 0.0).share == 1.0, "alone it may have it all"
    turns.note_arrival(NORMAL, "other", 1.0)  # was refused: it holds nothing
    assert turns.queue_position(NORMAL, "flood", 1.0).share == OVER_SHARE
    assert turns.queue_position(NORMAL, "other", 1.0).share == 1.0
    come(turns, "other", 1000)
    assert turns.queue_position(NORMAL, "flood", 1.0).share == 1.0, "both have as much"
    turns.remove(NORMAL, "other", 1000, 0)
    turns.note_arrival(NORMAL, "flood", 2.0 + LATELY_S)
    assert turns.queue_position(NORMAL, "flood", 2.0 + LATELY_S).share == 1.0, "it is alone again"


def test_work_behind_a_newcomer_is_no_delay() -> None:
    queues = WorkerQueues()
    queues.add("p0", "a", (1, 0.0), 2.0, 0.0)
    queues.add("p0", "b", (1, 100.0), 3.0, 0.0)
    queues.add("p0", "c", (2, 0.0), 5.0, 0.0)
    queues.add("p1", "d", (2, 0.0), 7.0, 0.0)
    assert queues.overtaken_s("p0", (0, 900.0)) == 10.0
    assert queues.overtaken_s("p0", (1, 50.0)) == 8.0
    assert queues.overtaken_s("p0", (2, 1.0)) == 0.0
    queues.check_integrity({"a", "b", "c", "d"})
    for name in ("b", "b", "d"):
        queues.remove(name)
    assert queues.overtaken_s("p0", (1, 50.0)) == 5.0
    assert queues.overtaken_s("p1", (0, 0.0)) == 0.0
    queues.check_integrity({"a", "c"})


def test_waits_grow_with_the_work_of_higher_classes() -> None:
    queues = WorkerQueues()
    assert queues.slowdown((1, 0.0), 4, 0.0) == 1.0
    for number in range(600):  # two workers' time is asked for by premium
        queues.add("p0", f"r{number}", (0, number), 2.0, float(number))
    assert queues.slowdown((1, 0.0), 4, 599.0) == pytest.approx(2.0, rel=0.05)
    assert queues.slowdown((1, 0.0), 1, 599.0) == pytest.approx(10.0)
    assert queues.slowdown((0, 0.0), 4, 599.0) == 1.0
    assert queues.slowdown((1, 0.0), 4, 2000.0) == pytest.approx(1.0)
