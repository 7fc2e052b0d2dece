"""Workers compared by columns are chosen exactly as workers compared one by one."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mooncake.base import (
    BlockEvents,
    CostSample,
    GenerateRequest,
    LoadReport,
    Role,
    SeededIds,
    Tier,
    WorkerHello,
    WorkerLoad,
)
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.admission import Placement, Rejection
from mooncake.scheduler.placement.conductor import Conductor
from tests.support.scheduler.scheduling import PROFILE, hello, keys_of, ref, request

SLOW = [CostSample(s.num_new_tokens, s.num_context_tokens, 1, 2.5 * s.seconds) for s in PROFILE]
KINDS = {"p": Role.PREFILL, "d": Role.DECODE, "k": Role.KVSTORE}


class Twins:
    """Two Conductors that are told the same: one looks at columns, the other at each worker."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        config: dict[str, Any] = {
            "policy": self.random.choice(["kvcache-centric", "local-cache-aware"]),
            "kvcache_balancing_threshold": self.random.choice([1.0, 1.3, 3.0]),
            "whole_on_decode_max_tokens": self.random.choice([0, 0, 64]),
            "tbt_slo_s": self.random.choice([None, None, 0.05]),
            "ssd_bytes_per_s": self.random.choice([1e5, 1e6, 1e9]),
            "object_bytes_per_s": self.random.choice([1e5, 1e6]),
        }
        self.both = [
            Conductor(SchedulerConfig(**config), SeededIds(0), columns_from=columns_from)
            for columns_from in (0, 10**9)
        ]
        self.workers: dict[str, WorkerHello] = {}
        self.numbers: dict[tuple[str, Tier], int] = {}
        self.num_joined = 0
        self.running: list[GenerateRequest] = []
        self.now = 0.0
        self.num_placed = 0
        self.num_fetched = 0
        self.fetched_from: set[Tier] = set()
        families = [self.random.choices(range(1000), k=400) for _ in range(4)]
        self.prompts = [
            family[: self.random.randrange(8, 400)]
            + self.random.choices(range(1000), k=self.random.randrange(0, 60))
            for family in families
            for _ in range(6)
        ]

    def each(self, tell: Callable[[Conductor], object]) -> None:
        for conductor in self.both:
            tell(conductor)

    def join(self) -> None:
        kind = self.random.choice("pppddk")
        name = f"{kind}{self.num_joined}"
        self.num_joined += 1
        joins = self.workers[name] = hello(
            name,
            KINDS[kind],
            node_id=f"node-{self.random.randrange(8)}",
            num_blocks=self.random.choice([60, 1000, 1000]),
            max_num_seqs=self.random.choice([0, 4, 64]),
            max_batched_tokens=self.random.choice([0, 64, 200]),
            num_stages=self.random.choice([1, 1, 2, 4]),
            profile=[] if kind == "k" else self.random.choice([PROFILE, PROFILE, SLOW]),
        )
        self.each(lambda conductor: conductor.on_hello(joins))

    def leave(self) -> None:
        if len(self.workers) > 6:
            name = self.random.choice(list(self.workers))
            del self.workers[name]
            self.running = [r for r in self.running if not self.lies_on(r, name)]
            self.each(lambda conductor: conductor.on_lost(name))

    def lies_on(self, running: GenerateRequest, name: str) -> bool:
        """End a request of a lost worker."""
        entry = self.both[0].bookings.get(running.request_id)
        assert entry is not None
        if name not in (entry.booking.computing.worker_id, entry.booking.decode.worker_id):
            return False
        self.each(lambda conductor: conductor.release(running.request_id))
        return True

    def drain(self) -> None:
        if self.workers and self.random.random() < 0.2:
            name = self.random.choice(list(self.workers))
            self.each(lambda conductor: conductor.on_draining(name))

    def blocks(self) -> None:
        for name in self.random.sample(list(self.workers), min(4, len(self.workers))):
            keys = keys_of(request(prompt_tokens=self.random.choice(self.prompts)))
            begin, end = sorted(self.random.choices(range(len(keys) + 1), k=2))
            begin *= self.random.choice([0, 0, 1])
            below = self.random.choice([Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.OBJECT])
            tier = below if name[0] == "k" else Tier.HBM
            number = self.numbers[name, tier] = self.numbers.get((name, tier), 0) + 1
            some = keys[begin:end]
            events = BlockEvents(
                worker=ref(name),
                tier=tier,
                sequence_no=number,
                stored=some if self.random.random() < 0.8 else [],
                removed=[] if self.random.random() < 0.8 else keys[:2],
                snapshot=number == 1,
            )
            self.each(lambda conductor, events=events: conductor.on_blocks(events))

    def load(self) -> None:
        if self.workers:
            report = LoadReport(
                worker=ref(self.random.choice(list(self.workers))),
                load=WorkerLoad(
                    num_running=self.random.randrange(6),
                    num_waiting=self.random.randrange(3),
                    num_queued_tokens=self.random.choice([0, 0, 50, 4000]),
                    num_context_tokens=self.random.randrange(5000),
                    num_free_blocks=self.random.choice([0, 30, 900]),
                    num_total_blocks=self.random.choice([0, 1000]),
                ),
            )
            self.each(lambda conductor: conductor.on_load(report, self.now))

    def place(self) -> None:
        self.num_placed += 1
        asked = request(
            f"r{self.num_placed}",
            prompt_tokens=self.random.choice(self.prompts),
            max_tokens=self.random.choice([1, 20, 400]),
            tbt_slo_s=self.random.choice([None, None, 0.006, 0.02]),
        )
        names = list(self.workers)
        exclude = self.random.choice([None, None, self.random.sample(names, len(names) // 2)])
        answers = [
            conductor.place(asked, keys_of(asked), 0, self.now, exclude) for conductor in self.both
        ]
        assert answers[0] == answers[1]
        if isinstance(answers[0], Placement):
            self.running.append(asked)
            self.num_fetched += bool(answers[0].sources)
            self.fetched_from.update(source.tier for source in answers[0].sources)
        else:
            assert isinstance(answers[0], Rejection)

    def prefilled(self) -> None:
        if self.running:
            one = self.random.choice(self.running)
            first, second = (conductor.on_prefilled(one, self.now) for conductor in self.both)
            assert first == second

    def release(self) -> None:
        if self.running:
            one = self.running.pop(self.random.randrange(len(self.running)))
            self.each(lambda conductor: conductor.release(one.request_id, 7))

    def step(self) -> None:
        self.now += self.random.choice([0.0, 0.001, 0.3])
        kinds = [self.place] * 8 + [self.blocks] * 6 + [self.load] * 3
        kinds += [self.prefilled, self.release, self.release, self.drain, self.join, self.leave]
        self.random.choice(kinds)()

    def check(self) -> None:
        placed = {running.request_id for running in self.running}
        self.each(lambda conductor: conductor.check_integrity(placed))


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_columns_and_views_agree(first: int) -> None:
    num_placed = num_fetched = 0
    fetched_from: set[Tier] = set()
    for seed in range(first, first + 8):
        twins = Twins(seed)
        for _ in range(twins.random.choice([6, 20, 60])):
            twins.join()
        for number in range(300):
            twins.step()
            if number % 50 == 0:
                twins.check()
        twins.check()
        num_placed += twins.num_placed
        num_fetched += twins.num_fetched
        fetched_from |= twins.fetched_from
    assert {Tier.DRAM, Tier.SSD, Tier.OBJECT} <= fetched_from
    assert num_placed > 400
    assert num_fetched > 20, "nothing was ever fetched: the worlds are too poor"


def test_columns_and_views_agree_on_2000_workers() -> None:
    twins = Twins(seed=3)
    for _ in range(2000):
        twins.join()
    for _ in range(4):
        for _ in range(30):
            twins.load()
            twins.blocks()
        twins.place()
    twins.check()
    assert len(twins.workers) == 2000
    assert len(twins.running) > 2
