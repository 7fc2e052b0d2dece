"""Who waits is called in order, and only lost requests are counted against the bound."""

from mooncake.base import Priority, SeededIds
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.fairness import PATIENT_TURN, QueuePosition
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.permits import RETRY_WAITING_S, PendingQueue
from mooncake.scheduler.requests.read_ahead import ReadAhead
from mooncake.scheduler.requests.record import RequestRecord
from tests.support.scheduler.scheduling import GATEWAY, Client, Inbox, request


def queue_of(bound: int) -> PendingQueue:
    """Return a queue of a gateway that knows no worker."""
    config = SchedulerConfig()
    known = Conductor(config, SeededIds(1))
    return PendingQueue(bound, ReadAhead(config, GATEWAY, Inbox(), known))


def record(name: str, priority: Priority, turn: float) -> RequestRecord:
    return RequestRecord(
        request=request(name, priority=priority),
        sink=Client(),
        accepted_s=0.0,
        queue_position=QueuePosition((turn, priority.order)),
    )


def test_the_line_is_in_order_of_turn_class_and_coming() -> None:
    queue = queue_of(8)
    for name, priority, turn in [
        ("batch", Priority.BATCH, PATIENT_TURN),
        ("late", Priority.INTERACTIVE, 9.0),
        ("early", Priority.INTERACTIVE, 1.0),
        ("first", Priority.PREMIUM, 1.0),
        ("early, too", Priority.INTERACTIVE, 1.0),
    ]:
        assert queue.add(record(name, priority, turn), 2.0)
        queue.check_integrity()
    assert list(queue) == ["first", "early", "early, too", "late", "batch"]
    assert queue.next_retry_s == 2.0 + RETRY_WAITING_S
    assert queue.has_batch
    queue.remove("batch")
    queue.remove("nobody")
    assert not queue.has_batch
    assert len(queue) == 4


def test_batch_takes_no_room_from_others() -> None:
    queue = queue_of(1)
    for number in range(5):
        assert queue.add(record(f"b{number}", Priority.BATCH, number), 0.0)
    assert queue.add(record("lost", Priority.INTERACTIVE, 0.0), 0.0)
    assert not queue.add(record("one more", Priority.INTERACTIVE, 0.0), 0.0)
    queue.remove("lost")
    assert "lost" not in queue
    assert queue.add(record("one more", Priority.PREMIUM, 0.0), 0.0)
    queue.check_integrity()
