"""KV that grows on one data-parallel rank freezes no other: of instances that share experts, and so
step together, one has no page left for a long time. Simulated, with the shipped machines.

A rank that stands still (SIGSTOP) is looked at in real processes: `test_ranks.py` (tensor and
pipeline ranks, both backends), `test_rank_processes.py` (a cluster) and `test_expert_peers.py`
(data-parallel ranks).
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest

from mooncake.base import Role
from mooncake.base.messages import StepOutputs
from mooncake.decode.worker import DecodeWorker
from mooncake.sim.faults.random_faults import START_S, Trial
from mooncake.transfer.grants import Fence

END_S = START_S + 20.0
"""Until then one of them has no page for anybody."""


def sharing(trial: Trial) -> list[str]:
    """Return the decode workers of a trial that share their experts."""
    return [
        name
        for name, worker in sorted(trial.world.workers.items())
        if worker.spec.role is Role.DECODE and worker.spec.experts
    ]


SEEDS = list(islice((seed for seed in range(400) if len(sharing(Trial(seed, []))) > 1), 2))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_instance_without_a_page_freezes_none_of_its_group(seed: int) -> None:
    trial = Trial(seed, [])
    world, (full, *others) = trial.world, sharing(trial)
    tokens: Counter[str] = Counter()
    hear = world.network.listener
    assert hear is not None
    finished: list[int] = []

    def listen(source: str, target: str, message: object) -> None:
        hear(source, target, message)  # type: ignore[arg-type]
        if isinstance(message, StepOutputs):
            tokens[source.partition("/")[0]] += 1

    def fill() -> None:
        """Keep every page that is free now, or is freed later, as those of a lost writer are."""
        machine = world.workers[full].machine
        assert isinstance(machine, DecodeWorker)
        now, pool, kept = world.heap.now(), machine.instance.pool, machine.instance.reservations
        if now >= END_S:
            world.network.listener = hear
            finished.append(sum(bool(stream.finals) for stream in world.streams.values()))
            return
        kept._resting._fence = lambda _: Fence.OPEN if world.heap.now() < END_S else Fence.CLOSED
        pages: list[int] = []
        while (page := pool.allocate(1)) is not None:
            pages += page
        grant = kept.open(pages)
        assert grant is not None
        kept.fence(grant, pages, now)
        world.network.listener = listen
        world.heap.after(0.01, fill)

    world.heap.at(START_S + 0.1, fill)
    report = trial.run()
    assert report.failure is None, report
    assert report.endings.get("length", 0) > 0
    assert sum(tokens[name] for name in others) > 0, "the others of its group stood still"
    assert finished[0] > 0, "nothing ended before it had pages again"
