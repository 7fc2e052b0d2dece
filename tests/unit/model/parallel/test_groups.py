"""What ranks exchange: sums of equal bits on all, gathers in order, errors instead of hangs."""

from __future__ import annotations

import gc
import mmap
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TypeVar

import pytest
import torch

from mooncake.base.threads import VitalThread
from mooncake.model.parallel import shared_memory, torch_group
from mooncake.model.parallel.group import Group, GroupError, Solo, ordered_sum
from mooncake.model.parallel.joining import join, make_file
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.parallel.torch_group import ONE_SHOT_BYTES, TorchGroup
from tests.support.model.thread_group import ThreadGroup
from tests.support.waiting import LONG_S

Made = TypeVar("Made")


def over_memory(size: int, timeout_s: float = LONG_S) -> Sequence[SharedGroup]:
    memory = mmap.mmap(-1, shared_bytes(size))
    return [SharedGroup(rank, size, memory, timeout_s) for rank in range(size)]


def of_threads(size: int) -> Sequence[ThreadGroup]:
    return ThreadGroup.make(size)


def over_gloo(size: int, timeout_s: float = LONG_S) -> Sequence[TorchGroup]:
    descriptor = make_file("gloo", size)
    groups = [join("gloo", size, rank, os.dup(descriptor), timeout_s) for rank in range(size)]
    os.close(descriptor)
    assert all(isinstance(group, TorchGroup) for group in groups)
    return groups  # type: ignore[return-value]


Make = Callable[[int], Sequence[Group]]


@pytest.fixture(params=[of_threads, over_memory, over_gloo])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def on_all(groups: Sequence[Group], work: Callable[[Group], Made]) -> list[Made]:
    with ThreadPoolExecutor(len(groups)) as threads:
        return list(threads.map(work, groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_those_of_neighbours_then_of_pairs(
    make: Make, size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(size)
    rounds = [
        [torch.randn(5, 7).mul(10.0**rank).to(dtype) for rank in range(size)] for _ in range(20)
    ]
    groups = make(size)
    found = on_all(groups, lambda g: [g.sum(parts[g.rank].clone()) for parts in rounds])
    for number, parts in enumerate(rounds):
        first, *others = (part.float() for part in parts)
        total = first + others[0]
        if size > 2:
            total = total + (others[1] if size == 3 else others[1] + others[2])
        for sums in found:
            assert sums[number].dtype == dtype
            assert torch.equal(sums[number], total.to(dtype)), "in float32, rounded once"
    assert [group.traffic.num_calls for group in groups] == [20] * size
    assert groups[0].traffic.num_bytes == 20 * 35 * dtype.itemsize


def test_a_sum_may_be_changed_by_its_rank_alone(make: Make) -> None:
    def add(group: Group) -> list[float]:
        found = group.sum(torch.ones(3))
        found += group.rank
        group.meet()
        return found.tolist()

    assert on_all(make(2), add) == [[2.0] * 3, [3.0] * 3]


def test_gathered_parts_lie_in_the_ranks_order(make: Make) -> None:
    made = on_all(make(3), lambda g: g.gather(torch.full((2, 2), float(g.rank))))
    for found in made:
        assert found.tolist() == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]] * 2


def test_no_rows_are_exchanged_too(make: Make) -> None:
    made = on_all(make(2), lambda g: (g.sum(torch.ones(0, 4)), g.gather(torch.ones(0, 4))))
    assert [(x.shape, y.shape) for x, y in made] == [((0, 4), (0, 8))] * 2


def test_each_rank_gets_what_the_others_have_for_it(make: Make) -> None:
    def swap(group: Group) -> torch.Tensor:
        return group.exchange(torch.arange(3 * 2 * 5).view(3, 2, 5) + 100 * group.rank)

    for rank, found in enumerate(on_all(make(3), swap)):
        mine = torch.arange(10).view(2, 5) + 10 * rank
        assert torch.equal(found, torch.stack([mine, mine + 100, mine + 200]))


def test_parts_exchange_among_themselves(make: Make) -> None:
    def work(group: Group) -> tuple[int, list[float], list[float]]:
        part = group.part(2)
        assert group.part(4) is group
        with_all = group.sum(torch.tensor([float(group.rank)]))
        return part.rank, part.gather(torch.tensor([float(group.rank)])).tolist(), with_all.tolist()

    pairs = [[0.0, 1.0]] * 2 + [[2.0, 3.0]] * 2
    expected = [(rank % 2, pair, [6.0]) for rank, pair in enumerate(pairs)]
    assert on_all(make(4), work) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_gloo_sums_large_parts_in_slices_to_the_same_bits(size: int, dtype: torch.dtype) -> None:
    parts = [torch.randn(1, ONE_SHOT_BYTES // dtype.itemsize + 1).to(dtype) for _ in range(size)]
    groups = over_gloo(size)
    for found in on_all(groups, lambda g: g.sum(parts[g.rank])):
        assert torch.equal(found, ordered_sum(torch.stack(parts)))


def test_what_one_sends_another_receives_in_order(make: Make) -> None:
    """More than is on its way at once, of several sizes, while others talk."""
    sizes = [(3, 4), (1, 1), (0, 2), (200, 7)] * 4

    def work(group: Group) -> bool:
        ranks = group.part(1)
        assert ranks.size == 1
        for number, size in enumerate(sizes):
            if group.rank == 0:
                found = torch.empty(size)
                group.receive(found, 2)
                assert torch.equal(found, torch.full(size, float(number)))
            if group.rank == 2:
                x = torch.full(size, float(number))
                group.send(x, 0)
                x.zero_()
        group.meet()
        return True

    assert all(on_all(make(3), work))


def test_a_thread_that_fails_ends_who_receives() -> None:
    groups = ThreadGroup.make(2)
    groups[1].fail()
    with pytest.raises(GroupError, match="rank 1 of this model failed"):
        groups[0].receive(torch.ones(1), 1)


def test_a_process_that_fails_ends_who_receives_and_who_sends_too_much() -> None:
    groups = over_memory(2)
    for _ in range(shared_memory.INBOX_PLACES):
        groups[0].send(torch.ones(1), 1)
    groups[1].fail()
    with pytest.raises(GroupError):
        groups[0].send(torch.ones(1), 1)
    with pytest.raises(GroupError):
        groups[0].receive(torch.ones(1), 1)


def test_who_gives_signs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = over_memory(2, timeout_s=0.2)
    with pytest.raises(GroupError, match="rank 1 of this model did not answer for 0 s"):
        one.receive(torch.empty(1), 1)
    # From now on time passes as the other rank gives signs, ten in each limit.
    clock = SimpleNamespace(
        monotonic=lambda: 0.02 * other._signs[other.rank * other._step], sleep=time.sleep
    )
    monkeypatch.setattr(shared_memory, "time", clock)
    monkeypatch.setattr(shared_memory, "_YIELDS", 0)
    num_looks, limits_s = one._signs[0] + 20, clock.monotonic() + 5 * one.timeout_s
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(one.receive, torch.empty(1), 1)
        while not waiting.done() and (one._signs[0] < num_looks or clock.monotonic() < limits_s):
            other.go_on()
            time.sleep(0.0001)
        other.send(torch.ones(1), 0)
        waiting.result()


def test_what_is_larger_than_a_place_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "PLACE_BYTES", 4 * 8 * 3)
    x = torch.arange(80.0).view(10, 8)
    groups = over_memory(2)
    assert all(torch.equal(found, 2 * x) for found in on_all(groups, lambda g: g.sum(x.clone())))
    gathered = on_all(groups, lambda g: g.gather(x))
    assert all(torch.equal(found, torch.cat((x, x), dim=1)) for found in gathered)
    groups[0].send(x, 1)
    received = torch.empty_like(x)
    groups[1].receive(received, 0)
    assert torch.equal(received, x)
    with pytest.raises(ValueError, match="a row of 100 bytes does not fit"):
        groups[0].sum(torch.ones(2, 25))


def test_a_thread_that_fails_ends_the_others() -> None:
    groups = ThreadGroup.make(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(groups[0].sum, torch.ones(1))
        groups[1].fail()
        with pytest.raises(GroupError, match="another rank of this model failed"):
            waiting.result()
    with pytest.raises(GroupError):
        groups[1].gather(torch.ones(1))


def test_a_thread_that_fails_ends_its_part() -> None:
    groups = ThreadGroup.make(4)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(groups[2].part(2).sum, torch.ones(1))
        groups[0].fail()
        with pytest.raises(GroupError):
            waiting.result()
    with pytest.raises(GroupError):
        groups[1].part(2).meet()


def test_a_process_that_fails_ends_parts_too() -> None:
    groups = over_memory(4)
    groups[0].fail()
    with pytest.raises(GroupError):
        groups[3].part(2).meet()


def test_a_rank_that_never_connects_is_waited_for_no_longer_than_said() -> None:
    with pytest.raises(GroupError, match="failed or did not answer"):
        over_gloo(2, timeout_s=0.05)[0].sum(torch.ones(1))


def test_a_process_that_fails_ends_the_others() -> None:
    groups = over_memory(2)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(groups[0].sum, torch.ones(1))
        groups[1].fail()
        with pytest.raises(GroupError, match="another rank of this model failed"):
            waiting.result()


def test_a_rank_that_does_not_come_is_named() -> None:
    groups = over_memory(3, timeout_s=0.0)
    with pytest.raises(GroupError, match="rank 1 of this model did not answer for 0 s"):
        groups[0].sum(torch.ones(1))


def test_alone_nothing_is_exchanged() -> None:
    solo, x = Solo(), torch.ones(2)
    solo.meet()
    assert solo.sum(x) is x
    assert solo.gather(x) is x
    assert solo.traffic.num_calls == 0


def test_the_plain_sum_leaves_its_parts() -> None:
    parts = torch.ones(2, 2)
    assert ordered_sum(parts).tolist() == [2.0, 2.0]
    assert parts[0].tolist() == [1.0, 1.0]


def test_a_gloo_group_ends_after_its_file_was_closed() -> None:
    """The number of the file may be a socket's by then."""
    numbers = [make_file("gloo", 2)]
    numbers.append(os.dup(numbers[0]))
    groups = [TorchGroup("gloo", rank, 2, number, LONG_S) for rank, number in enumerate(numbers)]
    on_all(groups, lambda group: group.meet())
    for number in numbers:
        os.close(number)
    with socket.socket() as one, socket.socket() as other:
        assert {one.fileno(), other.fileno()} & set(numbers)
        del groups
        gc.collect()


class StuckRanks:
    """Stands for NCCL's ranks; `abort` returns once `opened`."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        assert self.opened.wait(LONG_S)


def test_a_gpu_that_does_not_give_up_its_exchanges_is_a_fault_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Groups cut from a group end with it; `fail` itself waits for nothing."""
    faults: queue.SimpleQueue[threading.ExceptHookArgs] = queue.SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", faults.put)
    monkeypatch.setattr(torch_group, "_ABORT_S", 0.2)
    group = TorchGroup("nccl", 0, 4, make_file("nccl", 4), 1.0)
    part = group.part(2)
    assert isinstance(part, TorchGroup)
    part._ranks = stuck = StuckRanks()
    group.fail()
    fault = faults.get(timeout=LONG_S)
    assert stuck.aborted.is_set()
    assert isinstance(fault.thread, VitalThread)
    assert isinstance(fault.exc_value, GroupError)
    stuck.opened.set()
    with pytest.raises(GroupError, match="have been ended"):
        group._connected()
    with pytest.raises(GroupError, match="have been ended"):
        group.receive(torch.empty(1), 1)
