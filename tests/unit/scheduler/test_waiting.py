"""Who waits is called in order, and only lost requests are counted against the bound."""

from mooncake.base import Priority, SeededIds
from mooncake.scheduler.conductor import Conductor
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import Standing
from mooncake.scheduler.outputs import OutputOrder
from mooncake.scheduler.read_ahead import ReadAhead
from mooncake.scheduler.record import RequestRecord
from mooncake.scheduler.waiting import RETRY_WAITING_S, WaitingRoom
from tests.support.scheduling import GATEWAY, Client, Inbox, request


def room_for(bound: int) -> WaitingRoom:
    """Return a room of a gateway that knows no worker."""
    config = SchedulerConfig()
    known = Conductor(config, SeededIds(1))
    return WaitingRoom(bound, ReadAhead(config, GATEWAY, Inbox(), known))


def record(name: str, priority: Priority, turn: float) -> RequestRecord:
    return RequestRecord(
        request=request(name, priority=priority),
        sink=Client(),
        accepted_s=0.0,
        order=OutputOrder(name, 4),
        standing=Standing((priority.order, turn)),
    )


def test_the_line_is_in_order_of_class_turn_and_coming() -> None:
    room = room_for(8)
    for name, priority, turn in [
        ("batch", Priority.BATCH, 0.0),
        ("late", Priority.INTERACTIVE, 9.0),
        ("early", Priority.INTERACTIVE, 1.0),
        ("first", Priority.PREMIUM, 50.0),
        ("early, too", Priority.INTERACTIVE, 1.0),
    ]:
        assert room.offer(record(name, priority, turn), 2.0)
        room.check_integrity()
    assert list(room) == ["first", "early", "early, too", "late", "batch"]
    assert room.next_call_s == 2.0 + RETRY_WAITING_S
    assert room.has_batch
    room.remove("batch")
    room.remove("nobody")
    assert not room.has_batch
    assert len(room) == 4


def test_batch_takes_no_room_from_others() -> None:
    room = room_for(1)
    for number in range(5):
        assert room.offer(record(f"b{number}", Priority.BATCH, number), 0.0)
    assert room.offer(record("lost", Priority.INTERACTIVE, 0.0), 0.0)
    assert not room.offer(record("one more", Priority.INTERACTIVE, 0.0), 0.0)
    room.remove("lost")
    assert "lost" not in room
    assert room.offer(record("one more", Priority.PREMIUM, 0.0), 0.0)
    room.check_integrity()
