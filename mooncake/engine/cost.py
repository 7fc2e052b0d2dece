"""Cost models: predicted seconds of a step, a prompt, a gap between tokens, a fetch of blocks.

Pure values and small fits; each model is owned by the view of its worker. No clock: times come with
the samples.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from enum import Enum, auto
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mooncake.base import CostSample

Array = NDArray[np.float64]
Row = tuple[float, ...]

NUM_FEATURES = 8
NUM_COEFFICIENTS = 5
NUM_STREAM_COEFFICIENTS = 3
DEFAULT_COEFFICIENTS: Row = (5e-3, 1e-4, 1e-9, 1e-9, 0.0, 1e-4, 1e-9, 0.0)
"""First guesses, used until a sample comes: seconds per step; token, (token, context token) pair,
(token, token) pair and context token of chunks; token and context token of streams; what a step
takes longer because it has chunks.
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
RECENT = 15
"""The fit is corrected by the median error of this many steps of the same kind, so that it follows
a machine whose speed changes. Up to half of them may be disturbed.
"""
LEAST_RECENT = 5
"""There is no correction before this many."""
MAX_ERROR = 1.0
"""An error counts at most this much (a logarithm) where ways are compared."""


class StepCostModel:
    """Seconds of one step: a polynomial with coefficients >= 0, fitted to *relative* errors.

    For chunks with n new tokens in s sequences with c context tokens together, its terms are 1, n,
    n*c/s (pairs of new and cached tokens), n*n/s (pairs within a chunk) and c (context that is
    read, and for a chunk expanded, however many tokens attend to it). Streams have terms of their
    own, their tokens and their context tokens, because on a CPU a stream's token costs several
    times as much as one of a chunk. A step with chunks has one more term, because even a short
    chunk touches nearly all experts. So one model covers a chunk of prefill, a decode batch and a
    mix (Mooncake, FAST'25, 6.1: polynomial of request length and prefix length). Until a chunk or a
    stream was measured, it is taken for the other, of one token.

    The model begins with a profile and learns from measured steps, in bounded memory: equal
    observations lead to equal predictions. For steps with prompts and for those without, it
    predicts in three ways: by the profile alone, by the fit to all steps, and by this fit corrected
    by the latest errors. It uses the way that has predicted the recent steps best, so it is soon no
    worse than the profile alone.

    Where a step goes through several stages, the seconds are those of the slowest stage, because
    the next step can begin then. Queued work is predicted with these. The last chunk of a prompt,
    and each step of a stream, also goes through the other stages.
    """

    def __init__(self, profile: Iterable[CostSample] = (), num_stages: int = 1) -> None:
        self.num_stages = num_stages
        self.start(profile)

    def start(self, profile: Iterable[CostSample]) -> None:
        """Forget all steps and begin with a profile."""
        self._profile, self._online = _Sums(), _Sums()
        self._fitted = self._started = DEFAULT_COEFFICIENTS
        self._log_slowdown = RunningMean(0.0, SPEED_WINDOW, guess_weight=PROFILE_TRUST)
        """The logarithm of measured seconds over the profile's prediction."""
        self._error = DecayedMean()
        self._kinds = _Kind(), _Kind()
        """One kind is steps without prompts, the other those with prompts."""
        self._is_stale = False
        self._in_use: list[Row | None] = [None, None]
        """The coefficients that each kind of steps is predicted with, as far as they were asked."""
        usable = _usable(profile)
        for sample in usable:
            self._profile.add(_features(sample), sample.seconds, PROFILE_WEIGHT / len(usable))
        self._has_profile = self._has_samples = bool(usable)
        if usable:
            self._fitted = self._started = self._fit()

    @property
    def error_ratio(self) -> float | None:
        """The mean relative error of predictions made *before* each online sample was added. Recent
        ones count more. None before the first sample.
        """
        return self._error.value

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The first five coefficients, in the order of the class docstring: those of a step with
        chunks of prompts.
        """
        fixed, *others, with_chunks = self._of_kind(has_prompts=True)
        return fixed + with_chunks, *others[: NUM_COEFFICIENTS - 1]

    @property
    def stream_coefficients(self) -> tuple[float, ...]:
        """The seconds of a step of streams, and what each stream and each of their context tokens
        adds.
        """
        fixed, *_, stream, stream_read, _ = self._of_kind(has_prompts=False)
        return fixed, stream, stream_read

    def observe(self, samples: Iterable[CostSample]) -> None:
        """Refine the model with measured steps. Samples without time or tokens are skipped."""
        usable = _usable(samples)
        if not usable:
            return
        used = [self.sample_s(sample) for sample in usable]
        fitted = self._newest_fit()
        seen_any = self._has_samples
        for sample, used_s in zip(usable, used, strict=True):
            features, seconds = _features(sample), sample.seconds
            self._compare_with_profile(features, seconds)
            self._error.add(abs(used_s - seconds) / seconds)
            kind = self._kinds[_has_prompts(sample)]
            fitted_s = _dot(fitted, features)
            kind.compare(features, seconds, _dot(self._started, features), fitted_s)
            error = abs(fitted_s - seconds) / seconds
            weight = min(1.0, OUTLIER_RATIO / error) if seen_any and error > 0 else 1.0
            self._online.fade(DECAY)
            self._online.add(features, seconds, weight)
        self._has_samples = self._is_stale = True
        for kind in self._kinds:
            kind.choose()
        self._in_use = [None, None]

    def rest(self) -> None:
        """Predict without the latest errors until steps are measured again: how fast the machine is
        after it had nothing to do, they do not tell.
        """
        for kind in self._kinds:
            kind.rest()
        self._in_use = [None, None]

    def sample_s(self, sample: CostSample) -> float:
        """Return the predicted seconds of a step of a sample's size."""
        return _dot(self._of_kind(_has_prompts(sample)), _features(sample))

    def step_s(self, num_new_tokens: int, num_context_tokens: int, num_sequences: int) -> float:
        """Return the predicted seconds of one step with chunks of prompts."""
        terms = _terms(num_new_tokens, num_context_tokens, num_sequences)
        return _dot(self.coefficients, (1.0, *terms))

    def streams_s(self, num_streams: int, num_context_tokens: int) -> float:
        """Return the predicted seconds of one step of streams, each with one token."""
        return _dot(self.stream_coefficients, (1.0, num_streams, num_context_tokens))

    def beside_s(self, num_streams: int, num_context_tokens: int) -> float:
        """Return what a step of streams is predicted to take when it has chunks of prompts too,
        without the tokens of these.
        """
        fixed, *_, stream, stream_read, with_chunks = self._of_kind(has_prompts=True)
        return fixed + with_chunks + stream * num_streams + stream_read * num_context_tokens

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
        return stages * self.streams_s(each, round(num_context_tokens / stages))

    def _of_kind(self, has_prompts: bool) -> tuple[float, ...]:
        """Return all coefficients with which steps of one kind are predicted now."""
        found = self._in_use[has_prompts]
        if found is None:
            found = self._in_use[has_prompts] = self._choose(self._kinds[has_prompts])
        return found

    def _choose(self, kind: _Kind) -> Row:
        if kind.way is _Way.STARTED:
            return self._started
        fixed, *others = self._newest_fit()
        if kind.way is _Way.CORRECTED:
            fixed, *others = (kind.correction * value for value in (fixed, *others))
        return max(fixed, MIN_STEP_S), *others

    def _newest_fit(self) -> tuple[float, ...]:
        if self._is_stale:
            self._fitted = self._fit()
            self._is_stale = False
            for kind in self._kinds:
                kind.correct(self._fitted)
        return self._fitted

    def _compare_with_profile(self, features: Row, seconds: float) -> None:
        if self._has_profile:
            ratio = seconds / _dot(self._started, features)
            ratio = min(max(ratio, 1 / MAX_SPEED_RATIO), MAX_SPEED_RATIO)
            self._log_slowdown.add(math.log(ratio))

    def _fit(self) -> tuple[float, ...]:
        slowdown = math.exp(self._log_slowdown.value)
        # The profile's samples as they would be measured now: their seconds times the slowdown.
        gram = self._profile.gram / slowdown**2 + self._online.gram
        moment = self._profile.moment / slowdown + self._online.moment
        diagonal = np.diag(gram).copy()
        ridge = np.where(diagonal > 0, RIDGE * diagonal, 1.0)
        prior = np.where(diagonal > 0, DEFAULT_COEFFICIENTS, 0.0)
        found = non_negative_least_squares(gram + np.diag(ridge), moment + ridge * prior)
        fixed, token, pair, square, read, stream, stream_read, with_chunks = found
        has_chunks, has_streams = diagonal[[1, 5]] > 0
        if not has_streams:
            fixed, with_chunks = fixed + with_chunks, 0.0
            stream, stream_read = token + square, pair + read
        elif not has_chunks:
            token, read = stream, stream_read
        fixed = max(fixed, MIN_STEP_S)
        return fixed, token, pair, square, read, stream, stream_read, with_chunks


class _Way(Enum):
    """A way to predict a step."""

    STARTED = auto()
    FITTED = auto()
    CORRECTED = auto()


class _Kind:
    """How well each way has predicted the recent steps of one kind."""

    def __init__(self) -> None:
        self.way = _Way.FITTED
        self.correction = 1.0
        """The factor from the fit to the latest steps."""
        self._recent: deque[tuple[Row, float]] = deque(maxlen=RECENT)
        """The features and seconds of the latest steps."""
        self._errors = {way: DecayedMean() for way in _Way}

    def compare(self, features: Row, seconds: float, started_s: float, fitted_s: float) -> None:
        """Take in a step that was predicted in all ways."""
        predicted = {
            _Way.STARTED: started_s,
            _Way.FITTED: fitted_s,
            _Way.CORRECTED: self.correction * fitted_s,
        }
        for way, predicted_s in predicted.items():
            error = abs(math.log(predicted_s / seconds))
            self._errors[way].add(min(error, MAX_ERROR))
        self._recent.append((features, seconds))

    def correct(self, fitted: Row) -> None:
        """Correct a new fit by the latest steps, as far as it has not learned from them itself."""
        if len(self._recent) >= LEAST_RECENT:
            ratios = [seconds / _dot(fitted, features) for features, seconds in self._recent]
            self.correction = statistics.median(ratios)

    def rest(self) -> None:
        """Forget the latest steps."""
        self._recent.clear()
        self.correction = 1.0
        if self.way is _Way.CORRECTED:
            self.way = _Way.FITTED

    def choose(self) -> None:
        """Choose the way that was best."""
        errors = {way: mean.value for way, mean in self._errors.items() if mean.value is not None}
        if errors:
            self.way = min(errors, key=lambda way: (errors[way], way is not _Way.FITTED))


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


class _Sums:
    """The normal equations of sum((prediction / seconds - 1)^2) over samples."""

    def __init__(self) -> None:
        self.gram = np.zeros((NUM_FEATURES, NUM_FEATURES))
        self.moment = np.zeros(NUM_FEATURES)

    def fade(self, share: float) -> None:
        """Reduce the weight of all samples so far to this share."""
        self.gram *= share
        self.moment *= share

    def add(self, features: Row, seconds: float, weight: float) -> None:
        row = np.array(features) / seconds
        self.gram += weight * np.outer(row, row)
        self.moment += weight * row


class DecayedMean:
    """A mean in which recent values count more; None before the first."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None

    def add(self, value: float) -> None:
        self._sum = self._sum * ERROR_DECAY + value
        self._weight = self._weight * ERROR_DECAY + 1.0


def _usable(samples: Iterable[CostSample]) -> list[CostSample]:
    return [each for each in samples if each.seconds > 0 and each.num_new_tokens > 0]


def _has_prompts(sample: CostSample) -> bool:
    return sample.num_streams < sample.num_sequences


def _dot(coefficients: tuple[float, ...], features: Row) -> float:
    return float(sum(map(mul, coefficients, features)))


def _features(sample: CostSample) -> Row:
    """Return the terms of `StepCostModel` for a measured step."""
    tokens, context = sample.num_stream_tokens, sample.num_stream_context_tokens
    chunks = _terms(
        sample.num_new_tokens - tokens,
        sample.num_context_tokens - context,
        sample.num_sequences - sample.num_streams,
    )
    return 1.0, *chunks, tokens, context, float(_has_prompts(sample))


def _terms(
    num_new_tokens: int, num_context_tokens: int, num_sequences: int
) -> tuple[float, float, float, float]:
    """Return the terms of sequences of one kind: tokens, pairs of new and earlier tokens, pairs of
    new tokens, and earlier tokens.
    """
    each = num_new_tokens / max(num_sequences, 1)
    return num_new_tokens, each * num_context_tokens, each * num_new_tokens, num_context_tokens


def non_negative_least_squares(gram: Array, moment: Array) -> tuple[float, ...]:
    """Return the x >= 0 that minimises x'Gx/2 - m'x, exactly, for a small positive definite G.

    Tries the free solution first, then the method of active sets (Lawson and Hanson, Solving Least
    Squares Problems, chapter 23).
    """
    scale = 1.0 / np.sqrt(np.diag(gram))
    scaled_gram, scaled_moment = gram * np.outer(scale, scale), moment * scale
    found = np.linalg.solve(scaled_gram, scaled_moment)
    if not (found >= 0).all():
        found = _active_set(scaled_gram, scaled_moment)
    return tuple(float(value) for value in found * scale)


def _active_set(gram: Array, moment: Array) -> Array:
    found, kept = np.zeros(len(moment)), np.zeros(len(moment), np.bool_)
    tolerance = 1e-12 * float(np.abs(moment).max())
    for _ in range(3 * len(moment)):
        gain = np.where(kept, -math.inf, moment - gram @ found)
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        kept[best] = True
        while True:
            wanted = np.zeros(len(moment))
            wanted[kept] = np.linalg.solve(gram[np.ix_(kept, kept)], moment[kept])
            below = kept & (wanted <= 0)
            if not below.any():
                found = wanted
                break
            step = float((found[below] / (found[below] - wanted[below])).min())
            found = found + step * (wanted - found)
            kept &= found > tolerance
            found[~kept] = 0.0
    return found


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

    def at_least(self, bytes_per_s: float) -> None:
        """Forget what was learned if it is slower than this, and guess this again."""
        if self.bytes_per_s < bytes_per_s:
            self._seconds, self._bytes = 1.0, bytes_per_s

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
