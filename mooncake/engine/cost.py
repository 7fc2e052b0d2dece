"""Cost models: predicted seconds of a step, a prompt, a gap between tokens, a fetch of blocks.

Pure values and small fits; each model is owned by the view of its worker. No clock: times come with
the samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations

import msgspec
import numpy as np
from numpy.typing import NDArray

from mooncake.base import CostSample

Array = NDArray[np.float64]

NUM_FEATURES = 5
DEFAULT_COEFFICIENTS = (5e-3, 1e-4, 1e-9, 1e-9, 0.0)
"""First guesses, used until a sample comes: seconds per step, token, (token, context token) pair,
(token, token) pair and context token.
"""
DECAY = 1 - 1 / 256
"""An old sample's weight falls to 1/e within 256 newer ones."""
PROFILE_WEIGHT = 16.0
"""The start-up profile always counts as this many samples, so that loads not seen lately are not
forgotten. Only its shape is used; the machine's present speed is learned separately.
"""
SPEED_WINDOW = 64
PROFILE_TRUST = 8
"""The profile's own speed counts as this many steps, so that one slow step does not make a worker
look slow.
"""
MAX_SPEED_RATIO = 20.0
MIN_STEP_S = 1e-6
"""The least predicted time of a step, whatever a noisy fit says, because others divide by it."""
RIDGE = 1e-4
OUTLIER_RATIO = 1.0
"""Samples with a larger relative error count less, because for example a page fault is not part of
a step's cost.
"""
ERROR_DECAY = 1 - 1 / 64


class StepCostModel:
    """Seconds of one step: a polynomial with coefficients >= 0, fitted to *relative* errors.

    For n new tokens in s sequences with c context tokens together, its terms are 1, n, n*c/s (pairs
    of new and cached tokens), n*n/s (pairs within a chunk) and c (context that is read, and for a
    chunk expanded, however many tokens attend to it). So one model covers a chunk of prefill (s =
    1), a decode batch (n = s, where pairs and context are the same) and a mix (Mooncake, FAST'25,
    6.1: polynomial of request length and prefix length).

    Where a step goes through several stages, the seconds are those of the slowest stage, because
    the next step can begin then. Queued work is predicted with these. The last chunk of a prompt,
    and each step of a stream, also goes through the other stages.
    """

    def __init__(self, profile: Sequence[CostSample] = (), num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self._profile = np.zeros((NUM_FEATURES, NUM_FEATURES)), np.zeros(NUM_FEATURES)
        self._online = np.zeros((NUM_FEATURES, NUM_FEATURES)), np.zeros(NUM_FEATURES)
        self._coefficients: tuple[float, ...] = DEFAULT_COEFFICIENTS
        self._profile_coefficients: tuple[float, ...] | None = None
        self._log_slowdown = RunningMean(0.0, SPEED_WINDOW, guess_weight=PROFILE_TRUST)
        """The logarithm of measured seconds over the profile's prediction."""
        self._stale = False
        self._num_samples = 0
        self._error_sum = 0.0
        self._error_weight = 0.0
        usable = [sample for sample in profile if sample.seconds > 0 and sample.num_new_tokens > 0]
        if usable:
            gram, moment = self._profile
            for sample in usable:
                _accumulate(gram, moment, sample, PROFILE_WEIGHT / len(usable))
            self._num_samples = len(usable)
            self._profile_coefficients = self._coefficients = self._fit()

    @property
    def error_ratio(self) -> float | None:
        """The mean relative error of predictions made *before* each online sample was added. Recent
        ones count more. None before the first sample.
        """
        return self._error_sum / self._error_weight if self._error_weight else None

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The fitted coefficients, in the order of the class docstring."""
        if self._stale:
            self._coefficients = self._fit()
            self._stale = False
        return self._coefficients

    def observe(self, samples: Iterable[CostSample]) -> None:
        """Refine the model with measured steps. Samples without time or tokens are skipped."""
        usable = [s for s in samples if s.seconds > 0 and s.num_new_tokens > 0]
        if not usable:
            return
        predictions = [
            self.step_s(s.num_new_tokens, s.num_context_tokens, s.num_sequences) for s in usable
        ]
        gram, moment = self._online
        seen_any = self._num_samples > 0
        for sample, predicted_s in zip(usable, predictions, strict=True):
            self._compare_with_profile(sample)
            error = abs(predicted_s - sample.seconds) / sample.seconds
            gram *= DECAY
            moment *= DECAY
            self._error_sum = self._error_sum * ERROR_DECAY + error
            self._error_weight = self._error_weight * ERROR_DECAY + 1.0
            weight = min(1.0, OUTLIER_RATIO / error) if seen_any and error > 0 else 1.0
            _accumulate(gram, moment, sample, weight)
        self._num_samples += len(usable)
        self._stale = True

    def step_s(self, num_new_tokens: int, num_context_tokens: int, num_sequences: int) -> float:
        """Return the predicted seconds of one step."""
        return _dot(self.coefficients, num_new_tokens, num_context_tokens, num_sequences)

    def prefill_s(self, num_new_tokens: int, num_context_tokens: int, chunk_tokens: int) -> float:
        """Return the predicted seconds to compute a prompt's last `num_new_tokens` tokens when the
        KV of the `num_context_tokens` before them exists.

        chunk_tokens: the most tokens in one step; 0: all in one step.
        """
        if num_new_tokens <= 0:
            return 0.0
        fixed, token, pair, square, context = self.coefficients
        num_steps, num_pairs, num_squares, num_read = chunk_features(
            num_new_tokens, num_context_tokens, chunk_tokens
        )
        return (
            fixed * num_steps
            + token * num_new_tokens
            + pair * num_pairs
            + square * num_squares
            + context * num_read
        )

    def tail_s(self, num_new_tokens: int, num_context_tokens: int, chunk_tokens: int) -> float:
        """Return how long the last chunk of such a prompt (see `prefill_s`) still takes in the
        other stages.
        """
        if self.num_stages == 1 or num_new_tokens <= 0:
            return 0.0
        last = last_chunk(num_new_tokens, chunk_tokens)
        context = num_context_tokens + num_new_tokens - last
        return (self.num_stages - 1) * self.step_s(last, context, 1)

    def tbt_s(self, num_sequences: int, num_context_tokens: int) -> float:
        """Return the predicted gap between tokens of a decode batch. Each stage has an equal share
        of it.
        """
        stages = self.num_stages
        each = -(-num_sequences // stages)
        return stages * self.step_s(each, round(num_context_tokens / stages), each)

    def _compare_with_profile(self, sample: CostSample) -> None:
        if self._profile_coefficients is None:
            return
        new, context, sequences, seconds = msgspec.structs.astuple(sample)
        ratio = seconds / _dot(self._profile_coefficients, new, context, sequences)
        ratio = min(max(ratio, 1 / MAX_SPEED_RATIO), MAX_SPEED_RATIO)
        self._log_slowdown.add(math.log(ratio))

    def _fit(self) -> tuple[float, ...]:
        slowdown = math.exp(self._log_slowdown.value)
        # The profile's samples as they would be measured now: their seconds times the slowdown.
        gram = self._profile[0] / slowdown**2 + self._online[0]
        moment = self._profile[1] / slowdown + self._online[1]
        diagonal = np.diag(gram).copy()
        ridge = np.where(diagonal > 0, RIDGE * diagonal, 1.0)
        prior = np.array(DEFAULT_COEFFICIENTS)
        fixed, *others = non_negative_least_squares(gram + np.diag(ridge), moment + ridge * prior)
        return (max(fixed, MIN_STEP_S), *others)


def last_chunk(num_new_tokens: int, chunk_tokens: int) -> int:
    """Return the number of tokens in the last chunk of a prompt; `chunk_tokens` 0: there is one
    chunk.
    """
    chunk = min(chunk_tokens, num_new_tokens) if chunk_tokens > 0 else num_new_tokens
    return num_new_tokens % chunk or chunk


def chunk_features(
    num_new_tokens: int, num_context_tokens: int, chunk_tokens: int
) -> tuple[int, int, int, int]:
    """Return (steps, pairs of new and earlier tokens, pairs within chunks, earlier tokens that the
    steps read) of a prompt computed in chunks; see `StepCostModel.prefill_s`.
    """
    chunk = min(chunk_tokens, num_new_tokens) if chunk_tokens > 0 else num_new_tokens
    full, rest = divmod(num_new_tokens, chunk)
    num_pairs = chunk * (full * num_context_tokens + chunk * full * (full - 1) // 2)
    num_pairs += rest * (num_context_tokens + full * chunk)
    steps = full + (rest > 0)
    num_read = steps * num_context_tokens + chunk * (steps * (steps - 1) // 2)
    return steps, num_pairs, full * chunk * chunk + rest * rest, num_read


def _dot(
    coefficients: tuple[float, ...],
    num_new_tokens: int,
    num_context_tokens: int,
    num_sequences: int,
) -> float:
    """Return the predicted seconds: the terms of `StepCostModel` times their coefficients."""
    fixed, token, pair, square, context = coefficients
    spread = num_new_tokens / max(num_sequences, 1)
    return (
        fixed
        + token * num_new_tokens
        + pair * spread * num_context_tokens
        + square * spread * num_new_tokens
        + context * num_context_tokens
    )


def non_negative_least_squares(gram: Array, moment: Array) -> tuple[float, ...]:
    """Return the x >= 0 that minimises x'Gx/2 - m'x, exactly, for a small positive definite G.

    Tries the free solution first, then every choice of coefficients held at zero (2^5 of them).
    """
    scale = 1.0 / np.sqrt(np.diag(gram))
    scaled_gram, scaled_moment = gram * np.outer(scale, scale), moment * scale
    size = len(scaled_moment)
    free = np.linalg.solve(scaled_gram, scaled_moment)
    if (free >= 0).all():
        return tuple(float(value) for value in free * scale)
    best, best_value = np.zeros(size), 0.0
    for count in range(1, size):
        for kept in combinations(range(size), count):
            index = list(kept)
            part = np.linalg.solve(scaled_gram[np.ix_(index, index)], scaled_moment[index])
            if (part < 0).any():
                continue
            value = -0.5 * float(part @ scaled_moment[index])
            if value < best_value:
                best, best_value = np.zeros(size), value
                best[index] = part
    return tuple(float(value) for value in best * scale)


def _accumulate(gram: Array, moment: Array, sample: CostSample, weight: float) -> None:
    """Add one sample to the normal equations of sum((prediction / seconds - 1)^2)."""
    spread = sample.num_new_tokens / max(sample.num_sequences, 1)
    row = np.array(
        (
            1.0,
            sample.num_new_tokens,
            spread * sample.num_context_tokens,
            spread * sample.num_new_tokens,
            sample.num_context_tokens,
        )
    )
    row /= sample.seconds
    gram += weight * np.outer(row, row)
    moment += weight * row


class BandwidthEstimate:
    """Predicts the seconds of a transfer from its bytes, and learns from finished transfers (recent
    ones count more).

    Raises:
        ValueError: the first guess is not positive, or the latency is negative.
    """

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        if not bytes_per_s > 0 or latency_s < 0:
            raise ValueError("bandwidth must be above 0 and latency not negative")
        self.latency_s = latency_s
        self._seconds = 1.0
        self._bytes = bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds

    def observe(self, num_bytes: float, seconds: float) -> None:
        """Learn from one transfer, or from the sum of several that ran one after another."""
        if num_bytes <= 0 or seconds <= 0:
            return
        keep = math.exp(-seconds)
        self._seconds = self._seconds * keep + seconds
        self._bytes = self._bytes * keep + num_bytes

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds; 0 when there are no bytes to move."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0


class RunningMean:
    """A mean in which the newest value has at least `1 / window` of the weight."""

    def __init__(self, first_guess: float, window: int, *, guess_weight: int = 0) -> None:
        """The guess counts as `guess_weight` values; 0 means that the first value replaces it."""
        self._value = first_guess
        self._count = guess_weight
        self._window = window

    @property
    def value(self) -> float:
        return self._value

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, self._window)
        self._value += (value - self._value) / self._count
