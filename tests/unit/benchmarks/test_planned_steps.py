"""What the targets of an engine do to open and closed loads, with steps of simulated time."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks import planned_steps
from benchmarks.planned_steps import LIMITS, WITH, WITHOUT, closed_loop, draw, open_loop
from benchmarks.support.sessions import Session, Turn
from mooncake.engine.config import EngineConfig


def load(rate: float) -> list[Session]:
    """Return 40 requests: mostly short prompts, and one in eight so long that it cannot be in
    time.
    """
    random, at_s, sessions = Random(5), 0.0, []
    for number in range(40):
        at_s += random.expovariate(rate)
        size = 6000 if number % 8 == 4 else random.randrange(100, 1000)
        turn = Turn(fresh=draw(random, size), output_len=random.randrange(5, 90))
        sessions.append(Session(at_s=at_s, turns=[turn]))
    return sessions


def share(config: EngineConfig, rate: float, *, only_first: bool = False) -> float:
    outcomes = open_loop(config, load(rate), 1, only_first=only_first)
    assert len(outcomes) == 40
    return sum(map(LIMITS.are_met, outcomes)) / 40


def test_with_targets_more_requests_are_good_and_all_end() -> None:
    assert share(WITH, 0.3) > share(WITHOUT, 0.3) + 0.2


def test_a_prefill_worker_with_targets_has_more_first_tokens_in_time() -> None:
    assert share(WITH, 0.3, only_first=True) > share(WITHOUT, 0.3, only_first=True) + 0.2


@pytest.mark.parametrize("shape", [(8, 1024, 64), (8, 512, 128)])
def test_a_closed_loop_of_eight_streams_loses_little(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_steps, "REQUESTS_EACH", 6)
    assert closed_loop(WITH, *shape) > 0.92 * closed_loop(WITHOUT, *shape)
