"""The search for the smallest cluster, on clusters whose answer is known."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.sim.planning import plan_cluster
from mooncake.sim.results.result import SimulationResult, result_of
from mooncake.sim.simulation import SimulationConfig
from tests.support.sim.traces import hardware, model, sessions, simulation

BASE = SimulationConfig(model=model(), hardware=hardware(), num_prefill=1, num_decode=1)


class Oracle:
    """Says of each cluster whether it is enough, without simulating it."""

    def __init__(self, num_prefill: int, num_decode: int, template: SimulationResult) -> None:
        self.needed = num_prefill, num_decode
        self.template = template
        self.asked: list[tuple[int, int]] = []

    def __call__(self, config: SimulationConfig) -> SimulationResult:
        self.asked.append((config.num_prefill, config.num_decode))
        ttft = config.num_prefill >= self.needed[0]
        both = ttft and config.num_decode >= self.needed[1]
        return msgspec.structs.replace(
            self.template,
            num_prefill=config.num_prefill,
            num_decode=config.num_decode,
            num_nodes=config.num_prefill + config.num_decode,
            ttft_inside_ratio=1.0 if ttft else 0.5,
            effective_ratio=1.0 if both else 0.5,
        )


@pytest.fixture(scope="module")
def template() -> SimulationResult:
    played = simulation(sessions(3), 1, 1)
    played.run()
    return result_of(played)


@pytest.mark.parametrize("needed", [(1, 1), (1, 5), (6, 1), (4, 3), (9, 7)])
def test_the_smallest_is_found_and_nothing_asked_twice(
    needed: tuple[int, int], template: SimulationResult
) -> None:
    oracle = Oracle(*needed, template)
    tried = plan_cluster(BASE, oracle, max_nodes=64)
    chosen = [(one.num_prefill, one.num_decode) for one in tried if one.chosen]
    assert chosen == [needed]
    assert len(set(oracle.asked)) == len(oracle.asked) == len(tried)
    assert [one.num_nodes for one in tried] == sorted(one.num_nodes for one in tried)


def test_no_cluster_is_chosen_when_none_is_enough(template: SimulationResult) -> None:
    tried = plan_cluster(BASE, Oracle(100, 100, template), max_nodes=20)
    assert tried
    assert not any(one.chosen for one in tried)


def test_a_real_search_ends_with_a_cluster_that_keeps_the_limits() -> None:
    trace = sessions(40, every_ms=800)

    def attempt(config: SimulationConfig) -> SimulationResult:
        played = simulation(trace, config.num_prefill, config.num_decode, ttft_slo_s=10.0)
        played.run()
        return result_of(played)

    (chosen,) = [one for one in plan_cluster(BASE, attempt, 32) if one.chosen]
    assert chosen.effective_ratio >= 0.99
