"""Predicts when an engine sends a first token, by a small fit to first tokens that were seen. Pure.

The time is taken for a sum: a constant, the tokens that the engine computes before it, and the
requests that run there. All coefficients are at least 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

Row = tuple[float, float, float]

GUESS: Row = (0.05, 2e-4, 0.005)
"""Seconds of a first token; of each token to compute; of each request that runs."""
GUESS_WEIGHT = 0.1
"""The shape of the guess counts as this part of a first token that was seen. Its speed does not
count once one was.
"""
OTHERS_WEIGHT = 2.0
"""The first tokens of all engines count for one as this many of its own."""
FADE = 1 - 1 / 64
"""What an older first token counts beside the next one."""
LEAST_S = 0.001
"""Shorter first tokens count as this long."""
SWEEPS = 40


class _Sums:
    """Sums of a least-squares fit. Errors are relative to the guess: short prompts count as much as
    long ones.
    """

    def __init__(self) -> None:
        self.products = [[0.0] * 3 for _ in range(3)]
        self.answers = [0.0] * 3
        self.weight = 0.0

    def add(self, row: Sequence[float], seconds: float) -> None:
        scaled = sum(map(mul, GUESS, row)) ** -2
        for i, left in enumerate(row):
            for j, right in enumerate(row):
                self.products[i][j] += scaled * left * right
            self.answers[i] += scaled * left * seconds
        self.weight += 1.0

    def fade(self) -> None:
        self.products = [[FADE * each for each in line] for line in self.products]
        self.answers = [FADE * each for each in self.answers]
        self.weight *= FADE


class FirstTokens:
    """The fit of each engine, and of all together for those of which little was seen."""

    def __init__(self, num_engines: int) -> None:
        self._all = _Sums()
        self._own = [_Sums() for _ in range(num_engines)]
        self._fits: list[Row | None] = [None] * num_engines

    def predict(self, engine: int, num_tokens: float, num_running: int) -> float:
        """Return the seconds until a first token behind `num_tokens` to compute, its own included,
        at an engine that runs `num_running` other requests.
        """
        constant, per_token, per_request = self.fit(engine)
        return constant + per_token * num_tokens + per_request * num_running

    def observe(self, engine: int, num_tokens: float, num_running: int, seconds: float) -> None:
        """Learn from a first token: see `predict`."""
        row = (1.0, num_tokens, float(num_running))
        for sums in (self._all, self._own[engine]):
            sums.fade()
            sums.add(row, max(seconds, LEAST_S))
        self._fits = [None] * len(self._fits)

    def fit(self, engine: int) -> Row:
        """Return the coefficients of an engine: seconds of a first token, of a token to compute, of
        a request that runs.
        """
        fit = self._fits[engine]
        if fit is None:
            fit = self._fits[engine] = self._fitted(self._own[engine])
        return fit

    def _fitted(self, own: _Sums) -> Row:
        """Return the non-negative least squares of an engine's sums and its part of all."""
        if not self._all.weight:
            return GUESS
        share = min(1.0, OTHERS_WEIGHT / self._all.weight)
        products = [
            [mine + share * each for mine, each in zip(*lines, strict=True)]
            for lines in zip(own.products, self._all.products, strict=True)
        ]
        answers = [
            mine + share * each for mine, each in zip(own.answers, self._all.answers, strict=True)
        ]
        guessed = sum(map(mul, GUESS, (sum(map(mul, line, GUESS)) for line in products)))
        slowness = sum(map(mul, answers, GUESS)) / guessed
        found = [slowness * each for each in GUESS]
        for index, each in enumerate(GUESS):
            products[index][index] += GUESS_WEIGHT / each**2
            answers[index] += GUESS_WEIGHT * slowness / each
        return _solved(products, answers, found)


def _solved(
    products: Sequence[Sequence[float]], answers: Sequence[float], found: Sequence[float]
) -> Row:
    """Return the non-negative solution of the normal equations, from the guess `found` on: each
    coefficient in turn is set to its best value beside the others. Written out, because every
    request needs it for every engine.
    """
    (aa, ab, ac), (_, bb, bc), (_, _, cc) = products  # it is symmetric
    to_a, to_b, to_c = answers
    a, b, c = found
    for _ in range(SWEEPS):
        a = max(0.0, (to_a - ab * b - ac * c) / aa)
        b = max(0.0, (to_b - ab * a - bc * c) / bb)
        c = max(0.0, (to_c - ac * a - bc * b) / cc)
    return a, b, c
