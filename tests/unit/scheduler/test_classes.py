"""Premium before interactive before batch, and no tenant in another's way: step by step, at the
gateway.
"""

from typing import Any

import pytest

from mooncake.base import FinishReason, Priority, Role
from mooncake.scheduler.waiting import RETRY_WAITING_S
from tests.support.scheduling import Client, House, Pair, request

BATCH = Priority.BATCH


def reason(client: Client) -> Any:
    failure = client.final.failure
    return failure and failure.status


def test_batch_runs_at_once_where_nothing_else_does() -> None:
    house = Pair()
    client = house.submit(request("b", priority=BATCH))
    house.output(house.d0, "b", 0, [1, 2, 3, 4], FinishReason.LENGTH)
    assert client.final.reason is FinishReason.LENGTH
    house.close()


def test_batch_waits_while_prompts_queue_and_is_taken_up_after() -> None:
    house = Pair(replace_wait_s=1.0)
    house.submit(request("r", 1000, max_tokens=1))  # a second of work
    batch = [house.submit(request(f"b{number}", 400, 1, priority=BATCH)) for number in range(3)]
    house.tick(5.0)
    assert [house.attempts(f"b{number}") for number in range(3)] == [[], [], []]
    assert not any(client.finals for client in batch), "batch is patient"
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH)
    house.tick(RETRY_WAITING_S)
    assert [len(house.attempts(f"b{number}")) for number in range(3)] == [1, 1, 0]
    house.output(house.p0, "b0", 0, [1], FinishReason.LENGTH)
    house.tick(RETRY_WAITING_S)
    for number in (1, 2):
        house.output(house.p0, f"b{number}", 0, [1], FinishReason.LENGTH)
    assert [client.final.reason for client in batch] == [FinishReason.LENGTH] * 3
    house.close()


def test_batch_does_not_overtake_batch_that_waits() -> None:
    house = Pair()
    house.submit(request("r", 1000, max_tokens=1))
    house.submit(request("b0", priority=BATCH))
    house.output(house.p0, "r", 0, [1], FinishReason.LENGTH)
    house.submit(request("b1", priority=BATCH))
    assert house.attempts("b1") == []
    house.tick(RETRY_WAITING_S)
    assert house.attempts("b0") < house.attempts("b1")


def test_waiting_batch_can_be_aborted_and_times_out() -> None:
    house = Pair()
    house.submit(request("r", 1000, max_tokens=1))
    gone = house.submit(request("b0", priority=BATCH))
    late = house.submit(request("b1", priority=BATCH, timeout_s=3.0))
    house.gateway.abort("b0", house.now)
    house.tick(3.0)
    assert gone.final.reason is FinishReason.ABORT
    assert reason(late) == 408


def test_batch_without_workers_is_refused_like_all() -> None:
    house = House()
    assert reason(house.submit(request("b", priority=BATCH))) == 503


def test_batch_yields_where_decode_is_full_and_goes_on_after() -> None:
    house = House()
    p0 = house.join("p0", Role.PREFILL)
    d0 = house.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    batch = house.submit(request("b", 60, 20, priority=BATCH))
    house.output(p0, "b", 0, [1])
    house.output(d0, "b", 1, [2])
    urgent = house.submit(request("r", 60, 20))
    assert [(m.request_id, m.attempt) for m in house.aborts(d0)] == [("b", 1)]
    assert house.gateway.status(house.now).counters["batch_yielded"] == 1
    assert len(house.attempts("r")) == 1
    house.tick(5.0)
    assert len(house.attempts("b")) == 1, "still no room"
    house.output(p0, "r", 0, [1])
    house.output(d0, "r", 1, [2], FinishReason.STOP)
    assert urgent.final.reason is FinishReason.STOP
    house.tick(RETRY_WAITING_S)
    assert house.tasks(d0)[-1].output_tokens == [1, 2], "it goes on where it was"
    house.output(d0, "b", 2, [3], FinishReason.STOP, attempt=2)
    assert batch.tokens == [1, 2, 3]
    house.close()


def test_yielding_is_no_failure() -> None:
    house = House(max_attempts=1)
    p0 = house.join("p0", Role.PREFILL)
    d0 = house.join("d0", Role.DECODE, num_blocks=30, max_num_seqs=8)
    client = house.submit(request("b", 60, 20, priority=BATCH))
    for number in range(4):
        house.submit(request(f"r{number}", 60, 20))
        house.output(p0, f"r{number}", 0, [1], FinishReason.STOP)
        house.tick(RETRY_WAITING_S)
    assert len(house.attempts("b")) == 5
    house.output(d0, "b", 0, [1], FinishReason.STOP, attempt=5)
    assert client.final.reason is FinishReason.STOP


def test_interactive_does_not_yield_to_premium() -> None:
    house = House()
    house.join("p0", Role.PREFILL)
    d0 = house.join("d0", Role.DECODE, num_blocks=30)
    house.submit(request("r", 60, 20))
    house.submit(request("p", 60, 20, priority=Priority.PREMIUM))
    assert house.aborts(d0) == []


def test_under_a_limit_premium_goes_in_before_interactive() -> None:
    house = Pair(ttft_slo_s=2.0)
    clients = [house.submit(request(f"r{number}", 500)) for number in range(6)]
    assert [bool(client.finals) for client in clients] == [False] * 4 + [True] * 2
    premium = [
        house.submit(request(f"premium{number}", 500, priority=Priority.PREMIUM))
        for number in range(6)
    ]
    assert [bool(client.finals) for client in premium] == [False] * 4 + [True] * 2
    assert reason(house.submit(request("r", 500))) == 429
    assert house.tasks(house.p0)[-1].request.priority is Priority.PREMIUM


def test_under_a_limit_a_flood_leaves_room_for_others() -> None:
    house = Pair(ttft_slo_s=2.0)
    flood = [house.submit(request(f"f{number}", 500, tenant="flood")) for number in range(20)]
    assert sum(not client.finals for client in flood) == 4
    mine = house.submit(request("mine", 500, tenant="other"))
    assert not mine.finals, "what goes after it does not delay it"
    tasks = {task.request.request_id: task.turn for task in house.tasks(house.p0)}
    assert tasks["mine"] == tasks["f0"] < tasks["f1"]


def test_permits_are_kept_for_a_tenant_with_less() -> None:
    house = Pair(max_inflight=20)
    for number in range(20):
        house.submit(request(f"f{number}", tenant="flood", max_tokens=1))
    assert reason(house.submit(request("mine", tenant="other"))) == 429
    for number in range(2):
        house.output(house.p0, f"f{number}", 0, [1], FinishReason.LENGTH)
        assert reason(house.submit(request("more", tenant="flood"))) == 429
    assert not house.submit(request("mine", tenant="other")).finals


@pytest.mark.parametrize("bound", [4, 40])
def test_batch_leaves_permits_to_others(bound: int) -> None:
    house = Pair(max_inflight=bound)
    house.submit(request("r", 1000))
    batch = [house.submit(request(f"b{number}", priority=BATCH)) for number in range(bound)]
    assert 0 < sum(not client.finals for client in batch) < bound
    assert not house.submit(request("one more")).finals
