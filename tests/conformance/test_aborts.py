"""Aborts at every word that the processes of a cluster say to one another about a request, with all
of them alive and with either side dead: every page and every grant comes back. Simulated, with the
shipped machines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mooncake.base import FinishReason, Role
from tests.support.sim.cluster import Cluster, request, specs

PROMPT = [(7 * index) % 90 for index in range(42)]
STAYS = [(11 * index) % 90 for index in range(33)]
OUTPUTS = 10
AFTER_S = 12.0
"""Longer than everything that waits for the dead: their loss, the rest of their pages, restarts."""
ABOUT_NOTHING = {
    "LoadReport", "WorkerHello", "Welcome", "GatewayNews", "BlockEvents",
}  # fmt: skip
"""Words that go on without a request."""
FIRST = 3
"""So many times of each word are tried, and the last."""
DEATHS: list[tuple[str, float]] = [
    ("", 0.0), ("prefill-0", 0.0), ("prefill-0", 0.004), ("decode-0", 0.0), ("decode-0", 0.004),
    ("kvstore-prefill-0", 0.0),
]  # fmt: skip
"""Who dies, and for how long the abort was under way before."""

Said = tuple[str, str, str]
"""A kind of word, who said it and to whom."""


def run(at: tuple[Said, int] | None, victim: str, later_s: float) -> tuple[Cluster, list[Said]]:
    """Play two requests; when that word is said for that time, the first request is aborted, and
    `victim` dies so much later. Returns the cluster long afterwards, and what was said.
    """
    cluster, said = Cluster(specs(1, 1), restart_s=0.5), list[Said]()
    heap, network = cluster.world.heap, cluster.world.network

    def listen(source: str, target: str, message: Any) -> None:
        kind = type(message).__name__
        if kind in ABOUT_NOTHING:
            return
        word = (kind, source.partition("/")[0], target.partition("/")[0])
        said.append(word)
        if at is not None and word == at[0] and said.count(word) == at[1]:
            heap.after(0.0, end)

    def end() -> None:
        if victim:
            heap.after(later_s, lambda: cluster.world.kill(victim))
        cluster.world.abort("gone")

    cluster.world.submit(request("warm", PROMPT[:20], max_tokens=2))
    cluster.run(2.0)
    network.listener = listen
    cluster.world.submit(request("gone", PROMPT, max_tokens=OUTPUTS))
    cluster.world.submit(request("stays", STAYS, max_tokens=OUTPUTS))
    cluster.run(AFTER_S)
    network.listener = None
    return cluster, said


def points() -> list[tuple[Said, int]]:
    """Return the first few times and the last time of every word of a calm run."""
    _, said = run(None, "", 0.0)
    return [
        (word, number)
        for word in dict.fromkeys(said)
        for number in sorted({*range(1, min(FIRST, said.count(word)) + 1), said.count(word)})
    ]


def free_pages(cluster: Cluster) -> dict[str, tuple[int, int]]:
    """Return free and all pages of every engine."""
    machines: dict[str, Callable[[], Any]] = {}
    for worker_id, worker in cluster.world.workers.items():
        if worker.spec.role is not Role.KVSTORE:
            assert worker.machine is not None, f"{worker_id} is dead"
            machines[worker_id] = worker.machine.instance.load
    return {
        name: (load().num_free_blocks, load().num_total_blocks) for name, load in machines.items()
    }


@pytest.fixture(scope="module")
def all_points() -> list[tuple[Said, int]]:
    return points()


def test_a_calm_run_says_every_word_of_the_hand_over(all_points: list[tuple[Said, int]]) -> None:
    kinds = {word[0] for word, _ in all_points}
    given = {word[2] for word, _ in all_points if word[0] == "RequestTask"}
    assert given == {"decode-0", "prefill-0"}
    assert kinds >= {
        "RequestTask", "Reserved", "KVReady", "StepOutputs", "PutStart", "PutGranted",
        "PutEnd",
    }, kinds  # fmt: skip


@pytest.mark.parametrize(("victim", "later_s"), DEATHS)
def test_pages_come_back_wherever_a_request_is_aborted(
    victim: str, later_s: float, all_points: list[tuple[Said, int]]
) -> None:
    aborted = 0
    for at in all_points:
        cluster, _ = run(at, victim, later_s)
        streams = cluster.world.streams
        aborted += streams["gone"].finals[0].reason is FinishReason.ABORT
        cluster.world.submit(request("later", PROMPT, max_tokens=OUTPUTS))
        cluster.run(5.0)
        cluster.check_streams()
        assert streams["later"].finals[0].reason is FinishReason.LENGTH, at
        assert streams["stays"].finals[0].reason is FinishReason.LENGTH, at
        cluster.check_quiet()
        assert all(free == whole for free, whole in free_pages(cluster).values()), at
        assert [pool.num_open for pool in cluster.pools()] == [0, 0], at
    assert aborted > len(all_points) // 2
