"""Engines that are asked to end under load: others go on with what they decode, from the pools or
where there are none from the engine itself, after a short pause; the last of its role serves until
another one has come.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from mooncake.base import GenerateRequest, SamplingParams, pack_tokens
from mooncake.sim.world.world import Stream, SupervisorConfig, World
from tests.sim.test_role_switching import LAYOUT, WELL, check, cluster

NUM_PROMPT, NUM_OUTPUT = 100, 400
LIMIT_S = 300.0
PAUSE_S = 0.5
"""A pause may last so long: a report, a fetch, and a few steps beside others' prompts."""


def submit(world: World, number: int) -> Stream:
    return world.submit(
        GenerateRequest(
            request_id=f"r{number}",
            prompt=pack_tokens([1 + number * NUM_PROMPT + at for at in range(NUM_PROMPT)]),
            sampling=SamplingParams(max_tokens=NUM_OUTPUT, seed=number),
        )
    )


def play(world: World, disturb: Callable[[], None], num_requests: int = 16) -> list[Stream]:
    """Play a steady load of long answers, and disturb it in its midst."""
    streams: list[Stream] = []
    for number in range(num_requests):
        world.heap.at(1.0 + number, lambda number=number: streams.append(submit(world, number)))
    world.heap.at(8.5, disturb)
    world.heap.run_until(LIMIT_S)
    check(world, streams)
    assert [stream.finals[0].reason in WELL for stream in streams] == [True] * num_requests
    assert world.gateway._request_manager.counters["attempts_lost"] == 0
    return streams


def longest_gap_s(streams: list[Stream]) -> float:
    return max(
        after - before for stream in streams for before, after in pairwise(stream.token_times_s)
    )


def num_computed(world: World) -> float:
    """Return how many tokens the living engines have computed ahead of decoding."""
    counts = [view.load.counters for view in world.conductor.views]
    return sum(c.get("prompt_tokens", 0) - c.get("prompt_tokens_cached", 0) for c in counts)


@pytest.mark.parametrize("with_pools", [True, False])
def test_what_a_leaving_decode_worker_runs_goes_on_elsewhere_and_is_not_computed_again(
    with_pools: bool,
) -> None:
    world = cluster(ttft_slo_s=None, tbt_slo_s=None, with_pools=with_pools)
    left_s: list[float] = []

    def leave() -> None:
        former = world.workers["decode-0"].machine
        world.leave("decode-0", LIMIT_S)

        def look() -> None:
            if world.workers["decode-0"].machine is former:
                world.heap.after(0.05, look)
            else:
                left_s.append(world.heap.now())

        look()

    streams = play(world, leave)
    assert left_s[0] < 8.5 + 2.0, "it waited for no answer to end"
    num_moved = world.gateway._request_manager.counters["requests_moved"]
    assert num_moved > 2
    assert longest_gap_s(streams) < PAUSE_S
    computed = num_computed(world) - NUM_PROMPT * len(streams)
    assert computed < LAYOUT.block_tokens * num_moved, "of each, what was not yet a block"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_last_of_its_role_serves_until_another_one_has_come(role: str) -> None:
    world = cluster(ttft_slo_s=None, tbt_slo_s=None)
    world.config = msgspec.structs.replace(
        world.config, supervisor=SupervisorConfig(restart_s=None, change_s=LIMIT_S)
    )
    world.kill(f"{role}-1")
    alone: list[bool] = []

    def leave() -> None:
        former = world.workers[f"{role}-0"].machine
        for at_s in (8.5, 9.5, 10.4):
            world.heap.at(at_s, lambda: alone.append(world.workers[f"{role}-0"].machine is former))
        world.leave(f"{role}-0", LIMIT_S)
        world.heap.after(2.0, lambda: world.start(f"{role}-1"))
        world.heap.after(4.0, lambda: alone.append(world.workers[f"{role}-0"].machine is former))

    streams = play(world, leave)
    assert alone == [True, True, True, False]
    assert longest_gap_s(streams) < PAUSE_S


@pytest.mark.parametrize("with_pools", [True, False])
def test_after_a_rolling_update_as_much_is_reused_within_a_minute(with_pools: bool) -> None:
    """Every engine leaves in turn while prompts of ten beginnings come, two each second."""
    world = cluster(ttft_slo_s=None, tbt_slo_s=None, with_pools=with_pools)
    streams: list[Stream] = []
    begun_s, each_s, every_s = 40.0, 10.0, 0.5
    workers = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    over_s = begun_s + each_s * len(workers)

    def ask(number: int) -> None:
        shared = [1 + number % 10 * 1000 + at for at in range(160)]
        own = [100_000 + number * 100 + at for at in range(10)]
        request = GenerateRequest(
            request_id=f"r{number}", prompt=pack_tokens([*shared, *own]),
            sampling=SamplingParams(max_tokens=40, seed=number),
        )  # fmt: skip
        streams.append(world.submit(request))

    for number in range(int((over_s + 60.0) / every_s)):
        world.heap.at(1.0 + number * every_s, lambda number=number: ask(number))
    for place, worker_id in enumerate(workers):
        at_s = begun_s + each_s * place
        world.heap.at(at_s, lambda worker_id=worker_id: world.leave(worker_id, 30.0))
    world.heap.run_until(over_s + 90.0)
    check(world, streams)
    assert all(stream.finals[0].reason in WELL for stream in streams)
    assert world.gateway._request_manager.counters["attempts_lost"] == 0

    def hit_rate(from_s: float, to_s: float) -> float:
        finals = [s.finals[0] for s in streams if from_s <= s.submitted_s < to_s]
        cached = sum(final.num_cached_tokens for final in finals)
        return cached / sum(final.num_prompt_tokens for final in finals)

    before = hit_rate(begun_s - 20.0, begun_s)
    during, after = hit_rate(begun_s, over_s), hit_rate(over_s + 40.0, over_s + 60.0)
    gaps_s = sorted(b - a for s in streams for a, b in pairwise(s.token_times_s))
    p99_s = gaps_s[len(gaps_s) * 99 // 100]
    print(f"hit rate {before:.3f}, {during:.3f} meanwhile, then {after:.3f}; gaps {p99_s:.3f} s")
    assert before > 0.9
    assert after >= before
    assert p99_s < 2.0
