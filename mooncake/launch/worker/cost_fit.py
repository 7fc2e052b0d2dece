"""Chooses the steps to time for the Conductor's cost model, and tells how well the model fits the
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake.base import ConfigError, CostSample, Role
from mooncake.engine.config import EngineConfig
from mooncake.engine.cost import StepCostModel
from mooncake.launch.worker.profile import Shape, fitting

PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096)
"""Numbers of new tokens in a step of one prompt."""
PREFIXES = (0, 512, 2048, 8192, 32768)
"""Numbers of tokens that are cached before them."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of sequences in a decode step."""
CONTEXTS = (64, 512, 2048, 8192, 32768)
"""Numbers of tokens that each of these sequences has."""
ROLES = (Role.PREFILL, Role.DECODE)
MIN_SAMPLES = 6


def shapes_within(role: Role, config: EngineConfig) -> list[Shape]:
    """Return the steps of a role that fit an engine's limits and pages, small ones first."""
    if role is Role.PREFILL:
        wanted = [(1, new, before) for new in PROMPTS for before in PREFIXES]
    else:
        wanted = [(sequences, 1, context) for sequences in BATCHES for context in CONTEXTS]
    return sorted(
        set(fitting(wanted, config)), key=lambda shape: (shape[0] * shape[1], shape[0] * shape[2])
    )


@dataclass(frozen=True)
class Fit:
    """Measured steps and the cost model fitted to them."""

    samples: Sequence[CostSample]
    coefficients: tuple[float, ...]
    predicted_s: Sequence[float]
    """Prediction for each sample by a model fitted to all the others, so that the error is
    honest.
    """

    @property
    def errors(self) -> list[float]:
        """Relative errors of the predictions."""
        return [
            abs(predicted - sample.seconds) / sample.seconds
            for sample, predicted in zip(self.samples, self.predicted_s, strict=True)
        ]


def fit(samples: Sequence[CostSample]) -> Fit:
    """Fit the Conductor's cost model and predict each sample by a fit to all others.

    Raises:
        ConfigError: there are too few samples.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(
            f"only {len(samples)} kinds of steps fit into this engine; give it more pages "
            "(--kv-cache-memory-bytes) or a longer --max-model-len"
        )
    predicted = []
    for left_out, sample in enumerate(samples):
        model = StepCostModel([*samples[:left_out], *samples[left_out + 1 :]])
        predicted.append(
            model.step_s(sample.num_new_tokens, sample.num_context_tokens, sample.num_sequences)
        )
    return Fit(samples, StepCostModel(samples).coefficients, predicted)
