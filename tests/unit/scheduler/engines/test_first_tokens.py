"""The fit of first tokens learns each engine's speed, and takes others' where it knows little."""

from __future__ import annotations

import random

import pytest

from mooncake.scheduler.engines.first_tokens import GUESS, FirstTokens


def seen(fit: FirstTokens, engine: int, number: int, scale: float, seed: int = 1) -> None:
    draw = random.Random(seed)
    for _ in range(number):
        tokens, running = draw.randrange(50, 3000), draw.randrange(4)
        fit.observe(engine, tokens, running, scale * (0.02 + 1e-3 * tokens + 0.01 * running))


def test_it_begins_with_a_guess() -> None:
    assert FirstTokens(2).fit(1) == GUESS


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_it_learns_how_fast_an_engine_is(scale: float) -> None:
    fit = FirstTokens(1)
    seen(fit, 0, 40, scale)
    for tokens in (200, 1000, 2500):
        assert fit.predict(0, tokens, 2) == pytest.approx(scale * (0.04 + 1e-3 * tokens), rel=0.2)


def test_an_engine_of_which_nothing_was_seen_is_taken_for_the_others() -> None:
    fit = FirstTokens(2)
    seen(fit, 0, 20, 1.0)
    assert fit.predict(1, 1000, 0) == pytest.approx(fit.predict(0, 1000, 0), rel=0.2)
    seen(fit, 1, 10, 0.1)
    assert fit.predict(1, 1000, 0) < 0.3 * fit.predict(0, 1000, 0)


def test_it_follows_an_engine_that_becomes_slow() -> None:
    fit = FirstTokens(1)
    seen(fit, 0, 50, 1.0)
    seen(fit, 0, 200, 5.0, seed=2)
    assert fit.predict(0, 1000, 0) == pytest.approx(5.1, rel=0.2)


def test_no_coefficient_is_below_zero() -> None:
    fit = FirstTokens(1)
    draw = random.Random(3)
    for _ in range(100):
        fit.observe(0, draw.randrange(3000), draw.randrange(4), draw.choice([0.0, 0.01, 9.0]))
        assert min(fit.fit(0)) >= 0
