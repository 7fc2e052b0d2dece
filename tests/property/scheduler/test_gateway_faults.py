"""Whatever workers and wires do: each request ends once, its tokens are the right ones in order,
and nothing is left behind.
"""

from collections import Counter
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake.base import FinishReason
from mooncake.telemetry.events import Accepted, Finished, Refused
from tests.support.examples import examples
from tests.support.scheduler.unruly import UnrulyCluster, oracle


def check_world(world: UnrulyCluster) -> None:
    for name, (request, client) in world.clients.items():
        expected = oracle(request)
        final = client.final
        assert client.tokens == expected[: len(client.tokens)], name
        assert final.num_output_tokens == len(client.tokens)
        assert (final.failure is not None) == (
            final.reason in (FinishReason.ERROR, FinishReason.REJECTED)
        )
        if final.reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert client.tokens == expected, name
        if final.reason is FinishReason.REJECTED:
            assert client.tokens == []
    kinds = Counter(type(event) for event in world.events.events)
    assert kinds[Accepted] == kinds[Finished]
    assert kinds[Accepted] + kinds[Refused] == len(world.clients)
    series = world.metrics.render().decode()
    for state in ("running", "waiting"):
        assert f'mooncake:num_requests_{state}{{model_name="unruly"}} 0.0' in series
    assert world.gateway.idle
    world.gateway.check_integrity()
    if world.lossless:
        left = {name: worker.jobs for name, worker in world.workers.items() if worker.jobs}
        assert not left, "workers hold requests that have ended"


@settings(
    max_examples=examples(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_request_ends_once_with_the_right_tokens(seed: int) -> None:
    world = UnrulyCluster(Random(seed))
    world.run(120)
    world.settle()
    check_world(world)


def test_worlds_are_unruly_enough_to_mean_something() -> None:
    """Losses, retries, waits and failures do occur, and most requests get through all the same."""
    counters: Counter[str] = Counter()
    for seed in range(12):
        world = UnrulyCluster(Random(seed))
        world.run(120)
        world.settle()
        check_world(world)
        counters.update(world.gateway.status(world.now).counters)
    for name in ("workers_lost", "attempts_lost", "requests_error", "requests_abort"):
        assert counters[name] > 5, name
    good = counters["requests_stop"] + counters["requests_length"]
    assert good > counters["requests_accepted"] / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_replays_the_same_world(seed: int) -> None:
    stories = []
    for _ in range(2):
        world = UnrulyCluster(Random(seed))
        world.run(60)
        world.settle()
        stories.append(world.events.events)
    assert stories[0] == stories[1]
