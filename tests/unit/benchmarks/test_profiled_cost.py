"""A machine's step costs from measured steps: made-up machines are found again."""

from __future__ import annotations

import pytest

from benchmarks.support.profiled_cost import ProfiledCost
from mooncake.base import ConfigError, CostSample, SamplingParams
from mooncake.engine.plan import StepPlan, StepSlot
from tests.support.engine.fake_runner import sequence_of

SHAPES = (
    (1, 32, 0), (1, 256, 0), (1, 64, 512), (1, 512, 0), (1, 256, 1024), (1, 64, 2048),
    (1, 512, 2048), (1, 2048, 0), (1, 1, 64), (8, 1, 128), (16, 1, 64), (1, 1, 1024), (4, 1, 1024),
)  # fmt: skip


def measured(new: int, context: int, sequences: int) -> float:
    """A machine: 2 ms a step, 8 ms for all experts, tokens, context and pairs."""
    experts = 0.008 * (1 - 0.75**new)
    pairs = new / sequences * context
    return 0.002 + experts + 1e-4 * new + 8e-6 * context + 4e-8 * pairs


def sample(sequences: int, each: int, before: int) -> CostSample:
    new, context = sequences * each, sequences * before
    return CostSample(new, context, sequences, measured(new, context, sequences))


PROFILE = [sample(*shape) for shape in SHAPES]


def plan(*shapes: tuple[int, int]) -> StepPlan:
    """Return a step of (new tokens, tokens before) a sequence."""
    starts, slots = [], []
    for number, (new, before) in enumerate(shapes):
        starts.append(
            sequence_of(number, SamplingParams(), [1] * (new + before))
        )  # fmt: skip
        slots.append(
            StepSlot(sequence_id=number, start=before, tokens=[1] * new, pages=[], sample=True)
        )
    return StepPlan(step_id=1, starts=starts, slots=slots, ended=[])


@pytest.mark.parametrize(
    ("each", "before", "sequences"), [(128, 1500, 1), (1000, 0, 1), (1, 700, 1), (1, 500, 6)]
)
def test_steps_that_were_not_measured_are_foretold(each: int, before: int, sequences: int) -> None:
    cost = ProfiledCost(PROFILE, expert_share=0.25)
    seconds = cost.seconds(plan(*[(each, before)] * sequences))
    truth = measured(sequences * each, sequences * before, sequences)
    assert seconds == pytest.approx(truth, rel=0.1)
    of_sample = cost.step_s(CostSample(sequences * each, sequences * before, sequences, truth))
    assert of_sample == pytest.approx(seconds)


def test_pairs_are_counted_sequence_by_sequence() -> None:
    cost = ProfiledCost(PROFILE, expert_share=0.25)
    long_chunk_last = cost.seconds(plan((1, 2000), (511, 0)))
    long_chunk_first = cost.seconds(plan((511, 2000), (1, 0)))
    assert long_chunk_first > long_chunk_last


def test_one_sample_far_off_changes_little() -> None:
    slow = CostSample(256, 0, 1, 20 * measured(256, 0, 1))
    cost = ProfiledCost([*PROFILE, slow], expert_share=0.25)
    assert cost.seconds(plan((256, 0))) == pytest.approx(measured(256, 0, 1), rel=0.25)


def test_serving_slows_all_down_alike() -> None:
    served = [CostSample(n, 0, 1, 1.5 * measured(n, 0, 1)) for n in (100, 200, 300)]
    alone = ProfiledCost(PROFILE, expert_share=0.25)
    slowed = ProfiledCost(PROFILE, served, expert_share=0.25)
    for shape in ((64, 100), (1, 900)):
        ratio = slowed.seconds(plan(shape)) / alone.seconds(plan(shape))
        assert ratio == pytest.approx(1.5, rel=0.05)


def test_nothing_measured_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="without samples"):
        ProfiledCost([CostSample(1, 0, 1, 0.0)])
