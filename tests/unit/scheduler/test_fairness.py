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
    PATIENT_TURN,
    QueuePosition,
    Turns,
    WorkerQueues,
)

NORMAL = Priority.INTERACTIVE


def come(turns: Turns, tenant: str, num_tokens: int, priority: Priority = NORMAL) -> float:
    """Accept a request; return its turn in tokens of the class."""
    position = turns.queue_position((priority, tenant), num_tokens, 0.0)
    turns.add((priority, tenant), position, num_tokens)
    return position.order[0] * NORMAL.weight


def serve(turns: Turns, turn: float) -> None:
    turns.on_served(turn / NORMAL.weight)


def test_a_flood_queues_behind_itself() -> None:
    turns = Turns()
    flood = [come(turns, "flood", 100) for _ in range(10)]
    assert flood == [100.0 * number for number in range(1, 11)]
    serve(turns, flood[1])
    mine = [come(turns, "other", 100) for _ in range(3)]
    assert mine == [300.0, 400.0, 500.0], "after what is served, between what waits"


def test_long_requests_take_longer_turns() -> None:
    turns = Turns()
    big = [come(turns, "big", 1000) for _ in range(4)]
    small = [come(turns, "small", 100) for _ in range(20)]
    served = sorted([(turn, "big") for turn in big] + [(turn, "small") for turn in small])
    first = Counter(name for turn, name in served if turn <= 2000)
    assert first == {"big": 2, "small": 20}, "as many tokens of each"


def test_credit_cannot_be_saved_up() -> None:
    turns = Turns()
    come(turns, "late", 10)
    for _ in range(50):
        serve(turns, come(turns, "busy", 100))
    assert come(turns, "late", 10) == 5010.0


def test_output_counts_as_well() -> None:
    turns = Turns()
    come(turns, "a", 10)
    come(turns, "a", 10)
    turns.remove((NORMAL, "a"), 10, 500)
    assert come(turns, "a", 10) == 530.0


def test_a_premium_flood_leaves_interactive_requests_their_part() -> None:
    turns = Turns()
    flood = [come(turns, "flood", 100, Priority.PREMIUM) for _ in range(128)]
    mine = [come(turns, "mine", 100) for _ in range(4)]
    assert sum(turn < mine[0] for turn in flood) == 3
    assert [sum(turn <= one for turn in flood) for one in mine] == [4, 8, 12, 16]
    serve(turns, flood[63])
    late = come(turns, "late", 100)
    assert sum(flood[63] < turn <= late for turn in flood) == 4, "however long the flood is"


def test_a_tenant_that_uses_both_classes_has_one_share() -> None:
    turns = Turns()
    both = [come(turns, "both", 100, Priority.PREMIUM), *(come(turns, "both", 100) for _ in "ab")]
    single = [come(turns, "single", 100) for _ in range(4)]
    assert single == [100.0, 200.0, 300.0, 400.0]
    assert both[1:] == [200.0, 400.0]
    assert come(turns, "both", 100, Priority.PREMIUM) == both[0] + 2 * 100 * 4 / 16


def test_batch_comes_after_all_others_in_turns_of_its_own() -> None:
    turns = Turns()
    come(turns, "a", 1000, Priority.BATCH)
    come(turns, "b", 1000, Priority.BATCH)
    positions = [turns.queue_position((priority, "a"), 100, 0.0) for priority in Priority]
    assert [position.order[0] for position in positions] == [6.25, 25.0, PATIENT_TURN + 1100]
    assert [position.is_patient for position in positions] == [False, False, True]
    turns.on_served(PATIENT_TURN + 1000)
    assert come(turns, "c", 100) == 100.0, "batch moves the clock of batch alone"
    assert turns.queue_position((Priority.BATCH, "c"), 1, 0.0).order[0] == PATIENT_TURN + 1001


def test_batch_that_waits_is_due_when_others_have_computed_enough() -> None:
    turns = Turns()

    def computed(priority: Priority, num_tokens: int) -> None:
        position = turns.queue_position((priority, ""), num_tokens, 0.0)
        turns.add((priority, ""), position, num_tokens)
        turns.on_first_token((priority, ""), position, num_tokens)
        turns.remove((priority, ""), num_tokens, 0)

    computed(NORMAL, 100_000)
    batch = turns.queue_position((Priority.BATCH, ""), 100, 0.0)
    turns.add((Priority.BATCH, ""), batch, 100)
    assert turns.due(batch, 100) is None, "nothing is earned while none waits"
    computed(NORMAL, 396)
    assert turns.due(batch, 100) is None
    computed(NORMAL, 4)
    due = turns.due(batch, 100)
    assert due == QueuePosition((turns.clock, Priority.BATCH.order), BATCH_SHARE)
    assert turns.due(due, 100) is None, "it is already"
    assert turns.due(batch, 100) is None, "that is spent"
    computed(Priority.PREMIUM, 1600)
    assert turns.due(batch, 100)
    computed(NORMAL, 10**9)
    assert turns.due(batch, 10**6), "however long it is"
    assert turns.due(batch, 1) is None, "credit is bounded"


def test_an_idle_class_remembers_nothing() -> None:
    turns = Turns()
    for number in range(3 * MAX_IDLE_FLOWS):
        come(turns, f"t{number}", 10)
    for number in range(3 * MAX_IDLE_FLOWS):
        turns.remove((NORMAL, f"t{number}"), 10, 1)
        turns.check_integrity(
            Counter({(NORMAL, f"t{i}"): 1 for i in range(number + 1, 3 * MAX_IDLE_FLOWS)})
        )
    assert come(turns, "new", 1) == come(turns, "t5", 1), "all start from one mark"


@pytest.mark.parametrize(
    ("priority", "share"), [(Priority.PREMIUM, 1.0), (NORMAL, 1.0), (Priority.BATCH, BATCH_SHARE)]
)
def test_shares_of_the_classes(priority: Priority, share: float) -> None:
    assert Turns().queue_position((priority, ""), 1, 0.0).share == share


def test_room_is_kept_for_premium_while_it_is_about() -> None:
    turns = Turns()
    turns.note_arrival((Priority.PREMIUM, ""), 5.0)
    assert turns.queue_position((NORMAL, ""), 1, 6.0).share == BELOW_PREMIUM_SHARE
    assert turns.queue_position((Priority.PREMIUM, ""), 1, 6.0).share == 1.0
    assert turns.queue_position((NORMAL, ""), 1, 6.0 + LATELY_S).share == 1.0


def test_room_is_kept_for_tenants_with_less() -> None:
    turns = Turns()
    turns.note_arrival((NORMAL, "flood"), 0.0)
    come(turns, "flood", 1000)
    assert turns.queue_position((NORMAL, "flood"), 1, 0.0).share == 1.0, "alone it may have it all"
    turns.note_arrival((NORMAL, "other"), 1.0)  # was refused: it holds nothing
    assert turns.queue_position((NORMAL, "flood"), 1, 1.0).share == OVER_SHARE
    assert turns.queue_position((NORMAL, "other"), 1, 1.0).share == 1.0
    come(turns, "other", 1000)
    assert turns.queue_position((NORMAL, "flood"), 1, 1.0).share == 1.0, "both have as much"
    turns.remove((NORMAL, "other"), 1000, 0)
    turns.note_arrival((NORMAL, "flood"), 2.0 + LATELY_S)
    assert turns.queue_position((NORMAL, "flood"), 1, 2.0 + LATELY_S).share == 1.0, (
        "it is alone again"
    )


def test_work_behind_a_newcomer_is_no_delay() -> None:
    queues = WorkerQueues()
    queues.add("p0", "a", (0.0, 1), 2.0, 0.0)
    queues.add("p0", "b", (100.0, 1), 3.0, 0.0)
    queues.add("p0", "c", (PATIENT_TURN, 2), 5.0, 0.0)
    queues.add("p1", "d", (PATIENT_TURN, 2), 7.0, 0.0)
    assert queues.overtaken_s("p0", (0.0, 0)) == 10.0
    assert queues.overtaken_s("p0", (50.0, 1)) == 8.0
    assert queues.overtaken_s("p0", (PATIENT_TURN + 1, 2)) == 0.0
    queues.check_integrity({"a", "b", "c", "d"})
    for name in ("b", "b", "d"):
        queues.remove(name)
    assert queues.overtaken_s("p0", (50.0, 1)) == 5.0
    assert queues.overtaken_s("p1", (0.0, 0)) == 0.0
    queues.check_integrity({"a", "c"})


def test_waits_grow_with_the_work_of_higher_classes() -> None:
    queues = WorkerQueues()
    assert queues.slowdown((0.0, 1), 4, 0.0) == 1.0
    for number in range(600):  # two workers' time is asked for by premium
        queues.add("p0", f"r{number}", (float(number), 0), 2.0, float(number))
    assert queues.slowdown((0.0, 1), 4, 599.0) == pytest.approx(2.0, rel=0.05)
    assert queues.slowdown((0.0, 1), 1, 599.0) == pytest.approx(5.0), "it has its part"
    assert queues.slowdown((0.0, 0), 4, 599.0) == 1.0
    assert queues.slowdown((0.0, 1), 4, 2000.0) == pytest.approx(1.0)
