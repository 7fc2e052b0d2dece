"""Ranks that are processes, with an emulated GPU each: what `TorchGroup` exchanges over "nccl"."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mooncake.base import Shape
from mooncake.model.device.cuda import CudaCopies
from mooncake.model.memory import num_communicators
from mooncake.model.parallel.group import Group, GroupError, ordered_sum
from mooncake.model.parallel.joining import join, make_file
from mooncake.model.parallel.stages import Stage
from mooncake.model.parallel.torch_group import ONE_SHOT_BYTES
from tests.device.processes import Processes
from tests.support.cuda.install import Emulated, emulated
from tests.support.cuda.mutants import TAKEN_OUT
from tests.support.cuda.streams import ORDERS
from tests.support.waiting import LONG_S

Work = Callable[[Group, Emulated], Any]


def on_ranks(
    work: Work, size: int = 2, timeout_s: float = 120.0, missing: str = "", **machine: Any
) -> list[Any]:
    """Return what `work` returns on each rank; an error as its text. missing: the path of a wait
    that is taken out (`mutants.Wait`).
    """
    meeting = make_file("nccl", size)
    path = f"/proc/{os.getpid()}/fd/{meeting}"
    ranks = Processes(
        _rank, [(work, rank, size, path, timeout_s, missing, machine) for rank in range(size)]
    )
    found = ranks.found()
    ranks.go_on()  # until then others may need what a rank has shown
    ranks.join()
    os.close(meeting)
    return found


def _rank(
    work: Work, rank: int, size: int, path: str, timeout_s: float, missing: str,
    machine: dict[str, Any],
) -> Iterator[Any]:  # fmt: skip
    torch.set_num_threads(1)
    os.environ[TAKEN_OUT] = missing
    with emulated(size, **machine) as gpus:
        torch.cuda.set_device(rank)
        group = join("nccl", size, rank, os.open(path, os.O_RDWR), timeout_s)
        try:
            found = work(group, gpus)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        yield found


def here(group: Group, *values: float) -> torch.Tensor:
    return torch.tensor(values, device=f"cuda:{group.rank}")


def all_of_it(group: Group, gpus: Emulated) -> list[Any]:
    rank = group.rank
    large = torch.arange(ONE_SHOT_BYTES // 2, dtype=torch.float32).to(f"cuda:{rank}") * (rank + 1)
    found = [
        group.sum(here(group, 0.1 * rank, 2.0)).cpu(),
        group.sum(large).cpu(),
        group.gather(here(group, rank, rank + 10.0)).cpu(),
        group.exchange(here(group, *(10.0 * rank + other for other in range(group.size)))).cpu(),
        group.part(2).sum(here(group, float(rank))).cpu(),
    ]
    came = torch.empty(2, device=f"cuda:{rank}")
    if rank:
        group.receive(came, rank - 1)
        found.append(came.cpu())
    if rank + 1 < group.size:
        group.send(here(group, rank, 7.0), rank + 1)
    group.meet()
    gpus.finish()
    return [each.tolist() for each in found]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_exchange_what_the_plain_form_says(order: str) -> None:
    found = on_ranks(all_of_it, 4, order=order, seed=2)
    for rank, (small, large, gathered, exchanged, part, *came) in enumerate(found):
        parts = [torch.tensor([0.1 * each, 2.0]) for each in range(4)]
        assert small == ordered_sum(torch.stack(parts)).tolist()
        assert large == [10.0 * number for number in range(ONE_SHOT_BYTES // 2)]
        assert gathered == [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0]
        assert exchanged == [10.0 * other + rank for other in range(4)]
        assert part == [[1.0], [5.0]][rank // 2]
        assert came == ([[rank - 1.0, 7.0]] if rank else [])


def of_other_sizes(group: Group, gpus: Emulated) -> None:
    group.meet()
    group.gather(torch.zeros(1 + group.rank, device=f"cuda:{group.rank}"))
    gpus.finish()


def of_other_kinds(group: Group, gpus: Emulated) -> None:
    group.meet()
    give = group.exchange if group.rank else group.gather
    give(torch.zeros(2, device=f"cuda:{group.rank}"))
    gpus.finish()


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (of_other_sizes, ("allgather of 4 bytes", "allgather of 8 bytes")),
        (of_other_kinds, ("allgather of 8 bytes", "alltoall of 8 bytes")),
    ],
)
def test_an_exchange_that_is_another_on_another_rank_fails_on_all(
    work: Work, words: tuple[str, str]
) -> None:
    for text in on_ranks(work):
        assert "exchange 2 is not the same on all ranks" in text
        assert all(f"rank {rank}: {each}" in text for rank, each in enumerate(words))


def meet(group: Group, timeout_s: float) -> None:
    """Meet, and have exchanges from now on end in `timeout_s`, where anything ends them."""
    group.meet()
    for each in group._ranks._communicators.values():  # type: ignore[attr-defined]
        each.timeout_s = timeout_s


def with_one_that_stays_away(group: Group, gpus: Emulated) -> list[bool]:
    """Return whether rank 0 waited for a captured exchange until it was ended, and not after."""
    meet(group, 0.5)
    x, graph = here(group, 1.0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.gather(x)
    if group.rank:
        return []
    graph.replay()
    waiting = threading.Thread(target=torch.cuda.synchronize, args=(0,))
    waiting.start()
    waiting.join(1.0)
    found = [waiting.is_alive()]
    group._ranks.abort()  # type: ignore[attr-defined]
    waiting.join(LONG_S)
    found.append(waiting.is_alive())
    with pytest.raises(GroupError, match="aborted"):
        group.gather(x)
    return found


def test_a_captured_exchange_hangs_without_a_rank_until_it_is_aborted() -> None:
    """The group's own limit is 0.5 s: torch's watchdog knows nothing of what is replayed."""
    assert on_ranks(with_one_that_stays_away)[0] == [True, False]


def eager_with_one_that_stays_away(group: Group, gpus: Emulated) -> None:
    meet(group, 0.5)
    if group.rank == 0:
        group.gather(here(group, 1.0))
        gpus.finish()


def test_an_eager_exchange_without_a_rank_ends_by_the_watchdog() -> None:
    text = on_ranks(eager_with_one_that_stays_away)[0]
    assert "watchdog caught a timeout of 0.5 s: allgather of 4 bytes" in text


def replayed(group: Group, gpus: Emulated) -> list[list[float]]:
    group.meet()
    x, graph = here(group, 0.0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = group.sum(x * 2)
    found = []
    for turn in range(3):
        x.fill_(turn + group.rank)
        graph.replay()
        found.append(out.tolist())
    gpus.finish()
    return found


def test_replays_exchange_anew() -> None:
    assert on_ranks(replayed, order="random") == [[[2.0], [6.0], [10.0]]] * 2


def of_a_pair(group: Group, gpus: Emulated) -> list[float]:
    """Return for how many seconds an exchange of all may take, and one of two."""
    group.meet()
    if group.rank:
        group.send(here(group, 1.0), 0)
    else:
        group.receive(here(group, 0.0), 1)
    gpus.finish()
    everyone, pairs = group._ranks, group._pairs._ranks  # type: ignore[attr-defined]
    return [everyone._communicators["all"].timeout_s, pairs._communicators["0:1"].timeout_s]


def test_who_receives_waits_longer_than_the_limit_of_other_exchanges() -> None:
    """A stage may have steps to compute before the one that is waited for."""
    assert on_ranks(of_a_pair) == [[120.0, 86400.0]] * 2


def connected_stages(group: Group, gpus: Emulated) -> tuple[int, int]:
    """Return how many groups this rank meets when three stages connect, and what is planned."""
    shape = Shape(pp=3)
    stage = Stage(group, shape, 3, CudaCopies(torch.device("cuda", group.rank)))
    group.meet()
    stage.connect(here(group, 1.0).view(1, 1))
    gpus.finish()
    return gpus.machine.num_communicators, num_communicators(shape, shape.stage_of(group.rank))


def test_as_many_ranks_meet_between_stages_as_are_planned() -> None:
    assert on_ranks(connected_stages, 3) == [(2, 2), (3, 3), (2, 2)]


def unwaited(group: Group, gpus: Emulated) -> str:
    """Exchange without waiting for the end, then read; return the race."""
    group.meet()
    x, out = here(group, 1.0), torch.empty(2, device=f"cuda:{group.rank}")
    work = group._ranks._allgather_base(out, x)  # type: ignore[attr-defined]
    out.add_(1)
    torch.cuda.synchronize(group.rank)
    work.wait()
    torch.cuda.synchronize(group.rank)
    races = gpus.machine.races[:]
    gpus.machine.races.clear()
    return races[0]


def test_an_exchange_that_is_not_waited_for_races_with_who_reads_it() -> None:
    for text in on_ranks(unwaited):
        assert "allgather of 4 bytes" in text
        assert "neither waits for the other" in text


def sent_and_read(group: Group, gpus: Emulated) -> float:
    """Read what another rank sends as soon as it may be read."""
    came = here(group, 0.0)
    if group.rank:
        group.send(here(group, 5.0), 0)
    else:
        group.receive(came, 1)
    found = (came + 1).item()
    gpus.finish()
    return found


def summed_and_read(group: Group, gpus: Emulated) -> float:
    found = (group.sum(here(group, 1.0)) + 1).item()
    gpus.finish()
    return found


def has_met(group: Group, gpus: Emulated) -> bool:
    """Return whether the device has nothing left to do when ranks have met."""
    group.meet()
    return torch.cuda.current_stream().query()


def begins_when_the_device_is_done(group: Group, gpus: Emulated) -> bool:
    stage = Stage(group, Shape(pp=2), 2, CudaCopies(torch.device("cuda", group.rank)))
    here(group, 1.0).add_(1)
    stage.begin()
    return torch.cuda.current_stream().query()


_GROUP, _STAGES = (f"mooncake.model.parallel.{each}" for each in ("torch_group", "stages"))
WAITS = [
    (
        summed_and_read,
        f"{_GROUP}:TorchGroup._run: exchange(_bytes_of(made), _bytes_of(x.contiguous())).wait()",
    ),
    (sent_and_read, f"{_GROUP}:TorchGroup._wait: work.wait()"),
    (has_met, f"{_GROUP}:TorchGroup.meet: here.tolist()"),
    (begins_when_the_device_is_done, f"{_STAGES}:Stage._finish: end.reached()"),
]


@pytest.mark.parametrize(("work", "wait"), WAITS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_wait_of_ranks_that_is_taken_out_is_missed(work: Work, wait: str) -> None:
    whole, found = on_ranks(work), on_ranks(work, missing=wait)
    assert not any(isinstance(each, str) for each in whole), whole
    assert found[0] != whole[0]
    if isinstance(found[0], str):
        assert "neither waits for the other" in found[0]


def forgotten(group: Group, gpus: Emulated) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        group.meet()


def test_ranks_cannot_meet_for_the_first_time_in_a_capture() -> None:
    for text in on_ranks(forgotten):
        assert "in which ranks meet" in text


def test_the_class_stands_where_torch_has_its_own() -> None:
    with emulated():
        assert dist.ProcessGroupNCCL.Options()._timeout.total_seconds() == 600.0
    assert not hasattr(dist, "ProcessGroupNCCL"), "torch's build for CPUs has none"
