"""The self-profile: steps that fit, the best of two each, nothing left in the way of the engine."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from mooncake.base import Grammar, InternalError, Role
from mooncake.engine.config import EngineConfig
from mooncake.engine.plan import StepPlan, StepResult
from mooncake.launch.worker import profile as module
from mooncake.launch.worker.profile import (
    BUDGET_S,
    DECODE_SHAPES,
    PREFILL_SHAPES,
    profile,
    shapes_for,
)
from tests.support.clock import ManualClock


def config(**changes: int) -> EngineConfig:
    settings = {
        "num_blocks": 320, "max_num_seqs": 16, "max_batched_tokens": 2048, "max_chunk_tokens": 2048,
        "max_model_len": 4096, "max_waiting": 8, "block_tokens": 64, **changes,
    }  # fmt: skip
    return EngineConfig(**settings)


class TimedRunner:
    """Says that each step took as many milliseconds as it has tokens, and `once_s` more the first
    time; moves the clock by it.
    """

    def __init__(self, clock: ManualClock, error: str | None = None, once_s: float = 0.0) -> None:
        self.plans: list[StepPlan] = []
        self._known: set[int] = set()
        self._clock = clock
        self._error = error
        self._once_s = once_s
        self._seen: set[int] = set()
        self._results: list[StepResult] = []
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def prepare(self, grammar: Grammar) -> None:
        raise AssertionError("no grammar is timed")

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._known = (self._known - set(plan.ended)) | {s.sequence_id for s in plan.starts}
        assert self._known.issuperset(slot.sequence_id for slot in plan.slots)
        seconds = 0.001 * plan.num_tokens
        if plan.num_tokens not in self._seen:
            seconds += self._once_s
            self._seen.add(plan.num_tokens)
        self._clock.advance_to(self._clock.now() + seconds)
        self._results.append(StepResult(step_id=plan.step_id, seconds=seconds, error=self._error))
        os.eventfd_write(self._fd, 1)

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> list[StepResult]:
        results, self._results = self._results, []
        if results:
            os.eventfd_read(self._fd)
        return results

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def runner() -> Iterator[TimedRunner]:
    runner = TimedRunner(ManualClock())
    yield runner
    runner.close()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_every_step_fits_the_engine(role: Role) -> None:
    for limits in (config(), config(num_blocks=4), config(max_num_seqs=2, max_model_len=100)):
        for sequences, new, before in shapes_for(role, limits):
            assert sequences <= limits.max_num_seqs
            assert sequences * new <= limits.max_batched_tokens
            assert new + before <= limits.max_model_len
            assert sequences * limits.num_pages(new + before) <= limits.num_blocks


def test_prefill_and_decode_time_what_they_do() -> None:
    assert shapes_for(Role.PREFILL, config()) == list(PREFILL_SHAPES)
    assert shapes_for(Role.DECODE, config()) == list(DECODE_SHAPES)
    assert any(sequences > 1 for sequences, _, _ in DECODE_SHAPES)
    assert all(sequences == 1 for sequences, _, _ in PREFILL_SHAPES)


def test_samples_say_what_was_run(runner: TimedRunner) -> None:
    shapes = [(1, 32, 0), (8, 1, 128)]
    samples = profile(runner, shapes, config(), ManualClock())
    assert [(s.num_new_tokens, s.num_context_tokens, s.num_sequences) for s in samples] == [
        (32, 0, 1), (8, 1024, 8)
    ]  # fmt: skip
    assert [s.seconds for s in samples] == [pytest.approx(0.032), pytest.approx(0.008)]


def test_the_first_shape_warms_up_untimed(runner: TimedRunner) -> None:
    profile(runner, [(1, 16, 0)], config(), ManualClock())
    assert [plan.num_tokens for plan in runner.plans] == [16, 16, 16, 1]


def test_the_shorter_of_two_runs_counts() -> None:
    """Whatever is only paid once was paid in the first."""
    runner = TimedRunner(ManualClock(), once_s=1.0)
    samples = profile(runner, [(1, 32, 0), (8, 1, 128), (1, 64, 0)], config(), ManualClock())
    runner.close()
    assert [one.seconds for one in samples] == [pytest.approx(s) for s in (0.032, 0.008, 0.064)]


def test_plans_are_what_an_engine_could_have_made(runner: TimedRunner) -> None:
    shapes = shapes_for(Role.DECODE, config())
    profile(runner, shapes, config(), ManualClock())
    known: set[int] = set()
    step_ids = [plan.step_id for plan in runner.plans]
    assert len(set(step_ids)) == len(step_ids)
    for plan in runner.plans:
        assert known.issuperset(plan.ended)
        known -= set(plan.ended)
        known |= {start.sequence_id for start in plan.starts}
        used: set[int] = set()
        for slot in plan.slots:
            assert slot.sequence_id in known
            assert slot.sequence_id < 0
            assert len(slot.pages) * 64 >= slot.start + len(slot.tokens)
            assert used.isdisjoint(slot.pages)
            used |= set(slot.pages)
        assert max(used) < config().num_blocks
    assert len(known) == 1


def test_tokens_of_a_batch_differ(runner: TimedRunner) -> None:
    """Equal ones would all meet the same few experts."""
    profile(runner, [(8, 1, 128)], config(), ManualClock())
    tokens = [slot.tokens[0] for slot in runner.plans[0].slots]
    assert len(set(tokens)) == len(tokens)
    assert len(set(runner.plans[0].starts[0].prompt_tokens)) > 90


def test_it_stops_when_the_time_is_up() -> None:
    clock = ManualClock()
    runner = TimedRunner(clock)
    long = (1, 1000, 0)
    samples = profile(runner, [long] * 20, config(), clock)
    runner.close()
    assert 2 <= len(samples) <= BUDGET_S + 1


def test_nothing_to_run(runner: TimedRunner) -> None:
    assert profile(runner, [], config(), ManualClock()) == []
    assert runner.plans == []


def test_a_failed_step_is_an_error() -> None:
    runner = TimedRunner(ManualClock(), error="no memory")
    with pytest.raises(InternalError, match="no memory"):
        profile(runner, [(1, 1, 0)], config(), ManualClock())
    runner.close()


class Waits:
    """What waits for a step that takes `long_s` without progress, and takes no time for it."""

    def __init__(self, long_s: float) -> None:
        self._left_s = long_s
        self._plain = select.poll()
        self.register = self._plain.register

    def poll(self, limit_ms: float) -> list[tuple[int, int]]:
        self._left_s -= limit_ms / 1000
        return self._plain.poll(0) if self._left_s < 0 else []


def waiting(monkeypatch: pytest.MonkeyPatch, long_s: float) -> None:
    poll = SimpleNamespace(POLLIN=select.POLLIN, poll=lambda: Waits(long_s))
    monkeypatch.setattr(module, "select", poll)


def test_a_step_that_compiles_for_minutes_is_told_of_and_waited_for(
    runner: TimedRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its worker was ended after two of them, and began to compile again."""
    waiting(monkeypatch, 1000.0)
    told: list[tuple[int, int]] = []
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        profile(runner, [(1, 32, 0)], config(), ManualClock(), lambda *counts: told.append(counts))
    assert told == [(0, 3), (1, 3), (2, 3)]
    assert "has taken 990 s without progress" in caplog.text


def test_a_step_that_hangs_ends_the_worker_as_an_engines_first_steps_do(
    runner: TimedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(monkeypatch, 1000.0)
    with pytest.raises(InternalError, match="no progress for 500 s, which is ten times `step-time"):
        profile(runner, [(1, 32, 0)], config(step_timeout_s=50), ManualClock())
