"""What a step costs on a machine that was measured: a fit to steps that its workers timed.

Pure values. The Conductor has its own, smaller model (`engine.cost`) of the same samples; this
one stands for the machine itself, so it also knows what that one leaves out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mooncake.base import ConfigError, CostSample
from mooncake.engine.cost import non_negative_least_squares
from mooncake.engine.plan import StepPlan

RIDGE = 1e-4
NUM_PASSES = 4
OUTLIER_RATIO = 0.2
"""Samples further off than this (relative) count less from the second pass on."""

Array = NDArray[np.float64]


class ProfiledCost:
    """Implements `sim.runner.StepCost`.

    Seconds are a sum, no term below zero, of: the step itself, the experts it touches (whose
    weights are read), its tokens, the tokens in their KV (a chunk widens the latents of all that
    came before it), pairs of new and earlier tokens, and pairs within a chunk. Fitted to relative
    errors.
    """

    def __init__(
        self,
        samples: Sequence[CostSample],
        served: Sequence[CostSample] = (),
        *,
        expert_share: float = 1.0,
    ) -> None:
        """Fit `samples`; a token touches `expert_share` of the experts. `served` were timed while
        requests were served one at a time: all is slowed down to their median, since a step that
        also pushes its layers takes longer than one that is only timed.

        Raises:
            ConfigError: there is no sample.
        """
        usable = [sample for sample in samples if sample.seconds > 0 and sample.num_new_tokens > 0]
        if not usable:
            raise ConfigError("a profile without samples says nothing of what a step costs")
        self._missed = 1 - expert_share
        rows = np.array([self._of_sample(sample) for sample in usable])
        rows /= np.array([[sample.seconds] for sample in usable])
        self._coefficients = _fit(rows)
        if served:
            ratio = statistics.median(one.seconds / self.step_s(one) for one in served)
            self._coefficients = tuple(ratio * value for value in self._coefficients)

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of `plan`; pairs are counted sequence by sequence."""
        num_tokens = num_context = num_pairs = num_squares = 0
        for slot in plan.slots:
            new = len(slot.tokens)
            num_tokens += new
            num_context += slot.start
            num_pairs += new * slot.start
            num_squares += new * new
        return self._sum(num_tokens, num_context, num_pairs, num_squares)

    def step_s(self, sample: CostSample) -> float:
        """Return the seconds of a step of a sample's size."""
        return self._sum(*_sums(sample))

    def _sum(self, *sums: float) -> float:
        return sum(c * f for c, f in zip(self._coefficients, self._terms(*sums), strict=True))

    def _of_sample(self, sample: CostSample) -> tuple[float, ...]:
        return self._terms(*_sums(sample))

    def _terms(
        self, num_tokens: float, num_context: float, num_pairs: float, num_squares: float
    ) -> tuple[float, ...]:
        touched = 1 - self._missed**num_tokens
        return (1.0, touched, num_tokens, num_context, num_pairs, num_squares)


def _sums(sample: CostSample) -> tuple[float, float, float, float]:
    """Return tokens, context tokens, pairs with earlier tokens and pairs within: of equal shares,
    as a sample says no more.
    """
    new, context = float(sample.num_new_tokens), float(sample.num_context_tokens)
    each = new / max(1, sample.num_sequences)
    return new, context, each * context, each * new


def _fit(rows: Array) -> tuple[float, ...]:
    """Return the x >= 0 for which `rows` times x come nearest to 1; far ones count less."""
    weights = np.ones(len(rows))
    coefficients: tuple[float, ...] = ()
    for _ in range(NUM_PASSES):
        weighted = rows * weights[:, None]
        gram = rows.T @ weighted
        diagonal = np.diag(gram)
        gram = gram + np.diag(np.where(diagonal > 0, RIDGE * diagonal, 1.0))
        coefficients = non_negative_least_squares(gram, weighted.sum(axis=0))
        errors = np.abs(rows @ np.array(coefficients) - 1)
        weights = np.minimum(1.0, OUTLIER_RATIO / np.maximum(errors, 1e-9))
    return coefficients
