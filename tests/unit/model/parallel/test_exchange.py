"""Rows go to all ranks in one order, and each gets its own sums back; who is slow is named."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mooncake.model.parallel.exchange import NOBODY, GatheredRows, Rows
from tests.support.model.thread_group import ThreadGroup


def rows_of(rank: int, count: int, dtype: torch.dtype) -> Rows:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(count, 6, generator=generator).to(dtype)
    experts = torch.randint(0, 9, (count, 2), generator=generator)
    return Rows(x, experts, torch.rand(count, 2, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_filled_up_and_sums_come_back(dtype: torch.dtype) -> None:
    counts = [3, 0, 1]
    own = [rows_of(rank, count, dtype) for rank, count in enumerate(counts)]
    exchanges = [GatheredRows(group) for group in ThreadGroup.make(3)]

    def step(rank: int) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        exchange = exchanges[rank]
        exchange.agree(counts[rank], min(1, counts[rank]))
        found = exchange.spread(own[rank])
        sums = exchange.collect(found.x * (rank + 1), counts[rank])
        exchange.in_last_layer()
        last = exchange.spread(rows_of(rank, min(1, counts[rank]), dtype))
        return found, sums, last.x

    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(step, range(3)))
    first = made[0][0]
    for found, _, last in made:
        assert all(torch.equal(one, other) for one, other in zip(
            (found.x, found.experts, found.weights),
            (first.x, first.experts, first.weights), strict=True,
        ))  # fmt: skip
        assert len(last) == 3, "one row of each"
    for rank, count in enumerate(counts):
        mine = slice(rank, rank + 3 * count, 3)
        assert torch.equal(first.x[mine], own[rank].x)
        assert torch.equal(first.experts[mine], own[rank].experts)
        torch.testing.assert_close(made[rank][1], own[rank].x * 6)
        filled = first.experts[rank::3][count:]
        assert bool((filled == NOBODY).all())


@pytest.mark.parametrize(("needed", "size"), [([2, 1, 8], 8), ([4, 0, 4], 0)])
def test_all_replay_the_largest_step_unless_one_replays_none(needed: list[int], size: int) -> None:
    exchanges = [GatheredRows(group) for group in ThreadGroup.make(3)]
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda each, of_rank: each.agree(1, 1, of_rank), exchanges, needed)
        assert list(found) == [size] * 3


def test_rows_of_a_captured_step_are_known_to_all() -> None:
    exchanges = [GatheredRows(group) for group in ThreadGroup.make(2)]

    def step(rank: int) -> tuple[int, int]:
        exchange = exchanges[rank]
        exchange.fix(4)
        first = exchange.spread(rows_of(rank, 4, torch.float32))
        exchange.in_last_layer()
        last = exchange.spread(rows_of(rank, 4, torch.float32))
        return len(first.x), len(last.x)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(step, range(2))) == [(8, 8)] * 2
    assert [each.num_steps for each in exchanges] == [0, 0]


class Told(ThreadGroup):
    """The second of three ranks; the others say that they have waited 2 s and 5 s."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        others = torch.tensor([[4, 1, 0, 2_000_000_000], [0, 0, 0, 5_000_000_000]])
        return torch.cat((others[0], x, others[1]))


def test_for_how_long_others_waited_for_this_rank() -> None:
    exchange = GatheredRows(Told.make(3)[1])
    exchange.agree(1, 1)
    assert (exchange.waited_s, exchange.waited_for_s) == (0.0, 5.0)
    exchange.agree(1, 1)
    assert exchange.waited_for_s == pytest.approx(10.0 - exchange.waited_s)


class Scripted(Told):
    """The second of three ranks: the others wait for 2 s in each step, and have these rows."""

    num_rows = 0

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.uint8:
            return torch.cat((x, x, x), dim=-1)
        other = torch.tensor([self.num_rows, 1, 0, 2_000_000_000])
        return torch.cat((other, x, other))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("num_rows", "without", "slow"),
    [(1, 0, {1: 10.0}), (0, 0, {}), (1, 1, {1: 10.0}), (1, 2, {1: 10.0})],
)
def test_a_slow_rank_is_named_unless_it_has_more_rows(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, without: int, slow: dict[int, float]
) -> None:
    """A step takes 1.25 s by a clock that goes on by a quarter at each look, 0.75 s of them in
    exchanges; the window of 10 s is eight steps. Where the others hold other parts, one of the same
    kind waits for it.
    """
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 4)
    group = Scripted.make(3)[1]
    monkeypatch.setattr(Scripted, "num_rows", num_rows)
    exchange, own = GatheredRows(group, None, without), rows_of(1, 1, torch.float32)
    for _ in range(8):
        exchange.agree(1, 1)
        exchange.collect(exchange.spread(own).x, 1)
        assert exchange.take_slow() == {}, "the window has not ended"
    exchange.agree(1, 1)
    assert exchange.take_slow() == slow
    assert exchange.take_slow() == {}, "it is told once"


class Beside(Scripted):
    """The second of two ranks; the other one waits for 2 s in each step."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.uint8:
            return torch.cat((x, x), dim=-1)
        return torch.cat((torch.tensor([4, 1, 0, 2_000_000_000]), x))


@pytest.mark.parametrize(("without", "slow"), [(0, {1: 10.0}), (1, {})])
def test_the_only_rank_with_experts_is_not_slow(
    monkeypatch: pytest.MonkeyPatch, without: int, slow: dict[int, float]
) -> None:
    """One that uses them always waits while the rank computes that has all of them."""
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) / 4)
    exchange = GatheredRows(Beside.make(2)[1], None, without)
    own = rows_of(0, 1, torch.float32)
    for _ in range(9):
        exchange.agree(0, 0)
        exchange.collect(exchange.spread(own).x, 0)
    assert exchange.take_slow() == slow
