"""Cost models find the polynomial behind the samples, never predict nonsense, and say how wrong
they are.
"""

from random import Random

import numpy as np
import pytest

from mooncake.base import CostSample
from mooncake.engine.cost import (
    DEFAULT_COEFFICIENTS,
    MIN_STEP_S,
    NUM_COEFFICIENTS,
    BandwidthEstimate,
    RunningMean,
    StepCostModel,
    non_negative_least_squares,
)

TRUE = (4e-3, 2e-4, 3e-8, 1.5e-8, 2e-6)


def seconds(new: int, context: int, sequences: int, true: tuple[float, ...] = TRUE) -> float:
    spread = new / sequences
    pairs = true[2] * spread * context + true[3] * spread * new
    return true[0] + true[1] * new + pairs + true[4] * context


def sample(new: int, context: int, sequences: int = 1, noise: float = 1.0) -> CostSample:
    return CostSample(new, context, sequences, seconds(new, context, sequences) * noise)


GRID = [sample(new, context) for new in (1, 64, 512, 2048) for context in (0, 1000, 16_000)]


def test_a_profile_without_noise_is_predicted() -> None:
    model = StepCostModel(GRID)
    for new, context in ((32, 500), (1024, 8000), (2048, 0), (4096, 30_000)):
        assert model.step_s(new, context, 1) == pytest.approx(seconds(new, context, 1), rel=0.02)


def test_noise_is_averaged_out() -> None:
    random = Random(3)
    model = StepCostModel()
    for _ in range(400):
        new, context = random.choice([16, 128, 512, 1024]), random.randrange(20_000)
        model.observe([sample(new, context, noise=random.uniform(0.85, 1.15))])
    assert model.step_s(600, 10_000, 1) == pytest.approx(seconds(600, 10_000, 1), rel=0.06)
    assert model.error_ratio is not None
    assert 0.02 < model.error_ratio < 0.15


def test_no_step_is_predicted_to_take_no_time() -> None:
    """Steps that take longer the less they compute have no fixed cost in the best fit."""
    noisy = [CostSample(1, context, 1, 1e-9) for context in (0, 1, 2)]
    noisy += [CostSample(4096, 0, 1, 1e-12), CostSample(1, 60_000, 1, 1e-12)]
    model = StepCostModel(noisy)
    for _ in range(20):
        model.observe(noisy)
        assert model.tbt_s(1, 0) >= MIN_STEP_S
        assert model.tbt_s(64, 100_000) >= MIN_STEP_S


def test_a_few_page_faults_do_not_bend_the_model() -> None:
    model = StepCostModel(GRID)
    for index in range(100):
        model.observe([sample(256, 1000, noise=30.0 if index % 20 == 0 else 1.0)])
    assert model.step_s(256, 1000, 1) == pytest.approx(seconds(256, 1000, 1), rel=0.2)


@pytest.mark.parametrize("slowdown", [0.5, 2.0, 10.0])
def test_a_machine_that_changed_its_speed_is_followed(slowdown: float) -> None:
    model = StepCostModel(GRID)
    for index in range(300):
        model.observe([sample(128 + index % 4 * 256, index * 20, noise=slowdown)])
    for new, context in ((512, 2000), (2048, 16_000)):
        expected = slowdown * seconds(new, context, 1)
        assert model.step_s(new, context, 1) == pytest.approx(expected, rel=0.1)


def test_large_batches_are_not_forgotten_in_a_quiet_hour() -> None:
    batches = [sample(batch, batch * 1000, batch) for batch in (1, 8, 32, 64)]
    model = StepCostModel(batches)
    for _ in range(2000):
        model.observe([sample(1, 1000)])
    assert model.tbt_s(64, 64_000) == pytest.approx(seconds(64, 64_000, 64), rel=0.1)


def test_without_samples_the_defaults_speak() -> None:
    model = StepCostModel()
    assert model.coefficients == DEFAULT_COEFFICIENTS[:NUM_COEFFICIENTS]
    assert model.error_ratio is None
    assert model.prefill_s(1000, 0, 0) > model.prefill_s(100, 0, 0) > 0


def test_samples_without_time_or_tokens_are_skipped() -> None:
    model = StepCostModel([CostSample(0, 0, 0, 1.0), CostSample(8, 0, 1, 0.0)])
    model.observe([CostSample(0, 5, 1, 0.2)])
    assert model.coefficients == DEFAULT_COEFFICIENTS[:NUM_COEFFICIENTS]


@pytest.mark.parametrize("seed", range(20))
def test_predictions_never_fall_when_there_is_more_to_do(seed: int) -> None:
    random = Random(seed)
    model = StepCostModel(
        [
            CostSample(
                random.randrange(1, 500),
                random.randrange(5000),
                random.randrange(1, 9),
                random.uniform(1e-4, 1),
            )
            for _ in range(random.randrange(1, 12))
        ]
    )
    assert min(model.coefficients) >= 0
    assert model.step_s(100, 1000, 2) >= model.step_s(50, 1000, 2) >= 0
    assert model.step_s(100, 2000, 2) >= model.step_s(100, 1000, 2)


@pytest.mark.parametrize("chunk", [0, 1, 7, 64, 100, 1000])
@pytest.mark.parametrize(("new", "context"), [(100, 0), (1, 50), (64, 300), (999, 7)])
def test_a_prompt_costs_the_sum_of_its_chunks(new: int, context: int, chunk: int) -> None:
    model = StepCostModel(GRID)
    expected, done = 0.0, 0
    while done < new:
        size = min(chunk or new, new - done)
        expected += model.step_s(size, context + done, 1)
        done += size
    assert model.prefill_s(new, context, chunk) == pytest.approx(expected)


def test_nothing_to_compute_takes_no_time() -> None:
    assert StepCostModel(GRID).prefill_s(0, 5000, 64) == 0.0


@pytest.mark.parametrize("seed", range(30))
def test_least_squares_is_as_good_as_a_fine_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, wanted = rng.normal(size=(12, 4)), rng.normal(size=12)
    gram, moment = rows.T @ rows, rows.T @ wanted
    found = np.array(non_negative_least_squares(gram, moment))
    assert (found >= 0).all()
    gradient = gram @ found - moment
    assert (gradient > -1e-8).all(), "moving into the allowed region would help"
    assert abs(gradient @ found) < 1e-8, "a free coefficient is not at its best"


def test_bandwidth_is_learned_and_an_empty_fetch_is_free() -> None:
    estimate = BandwidthEstimate(1e9, 0.002)
    assert estimate.seconds(0) == 0.0
    assert estimate.seconds(10**9) == pytest.approx(1.002)
    for _ in range(50):
        estimate.observe(4e8, 0.2)
    assert estimate.bytes_per_s == pytest.approx(2e9, rel=0.01)
    estimate.observe(0, 1.0)
    estimate.observe(5.0, 0.0)
    assert estimate.bytes_per_s == pytest.approx(2e9, rel=0.01)


def test_bandwidth_must_be_positive() -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        BandwidthEstimate(0.0, 0.0)


def test_a_running_mean_starts_with_the_first_value_and_follows() -> None:
    mean = RunningMean(100.0, window=10)
    assert mean.value == 100.0
    mean.add(20.0)
    assert mean.value == 20.0
    for _ in range(100):
        mean.add(50.0)
    assert mean.value == pytest.approx(50.0, abs=0.1)


def test_a_guess_that_weighs_gives_way_slowly() -> None:
    mean = RunningMean(0.0, window=10, guess_weight=4)
    mean.add(10.0)
    assert mean.value == 2.0


def test_one_slow_step_makes_no_slow_worker() -> None:
    profile = [CostSample(new, 0, 1, 0.001 + 1e-4 * new) for new in (16, 64, 256, 1024)]
    model = StepCostModel(profile)
    usual_s = model.step_s(256, 0, 1)
    model.observe([CostSample(256, 0, 1, 10 * usual_s)])
    assert model.step_s(1024, 0, 1) < 1.6 * StepCostModel(profile).step_s(1024, 0, 1)
    for _ in range(200):
        model.observe([CostSample(256, 0, 1, 10 * usual_s)])
    assert model.step_s(1024, 0, 1) > 6 * StepCostModel(profile).step_s(1024, 0, 1)


def test_a_prompt_goes_on_through_the_other_stages() -> None:
    """TTFT of a pipeline: all chunks in the slowest stage, the last one in the others."""
    model = StepCostModel(GRID, num_stages=3)
    assert model.prefill_s(1000, 500, 256) == StepCostModel(GRID).prefill_s(1000, 500, 256)
    last, before = 1000 - 3 * 256, 500 + 3 * 256
    assert model.tail_s(1000, 500, 256) == 2 * model.step_s(last, before, 1)
    assert model.tail_s(512, 0, 256) == 2 * model.step_s(256, 256, 1)
    assert model.tail_s(512, 0, 0) == 2 * model.step_s(512, 0, 1)
    assert StepCostModel(GRID).tail_s(1000, 500, 256) == model.tail_s(0, 500, 256) == 0.0


def test_each_stage_has_its_share_of_the_streams() -> None:
    model = StepCostModel(GRID, num_stages=2)
    assert model.tbt_s(9, 9000) == 2 * model.step_s(5, 4500, 5)
