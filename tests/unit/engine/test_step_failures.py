"""A step that went well but for one of its sequences."""

from __future__ import annotations

import pytest

from mooncake.base.request import Failure
from mooncake.engine.engine import EngineHung
from mooncake.engine.plan import StepResult
from tests.support.engine.engines import Bench, failure_of


def test_one_sequence_fails_and_the_others_go_on() -> None:
    bench = Bench()
    good, bad = bench.add([1, 2, 3]), bench.add([4, 5, 6])
    bench.engine.tick(0.0)
    result = StepResult(
        step_id=0,
        tokens={good.sequence_id: [7]},
        seconds=0.1,
        failures={bad.sequence_id: Failure.invalid("its grammar cannot be followed")},
    )
    outputs = dict(bench.engine.on_step(result, 1.0))
    assert outputs[good].tokens == [7]
    assert outputs[good].finish is None
    failure = failure_of(outputs[bad])
    assert failure.status == 400  # another worker would fail as well
    assert failure.message == "its grammar cannot be followed"
    bench.engine.release(bad)
    bench.engine.check_integrity()
    assert bench.engine.get(good.sequence_id) is good


def test_a_failed_step_is_the_fault_of_no_request() -> None:
    bench = Bench()
    first, second = bench.add([1, 2, 3]), bench.add([4, 5, 6])
    bench.engine.tick(0.0)
    result = StepResult(
        step_id=0,
        seconds=0.1,
        failures={first.sequence_id: Failure.invalid("odd")},
        error="no memory",
    )
    outputs = bench.engine.on_step(result, 1.0)
    assert [sequence for sequence, _ in outputs] == [first, second]
    for sequence, output in outputs:
        failure = failure_of(output)
        assert failure.status == 500  # as good a request as any: another worker may do it
        assert "no memory" in failure.message
        bench.engine.release(sequence)
    bench.engine.check_integrity()


def after_steps(count: int) -> Bench:
    """Return an engine that has ended so many steps and has one in flight, at second 0."""
    bench = Bench(step_timeout_s=5)
    sequence = bench.add([1, 2, 3], max_tokens=count + 2)
    for step_id in range(count):
        bench.engine.tick(0.0)
        made = {sequence.sequence_id: [7]}
        bench.engine.on_step(StepResult(step_id=step_id, tokens=made, seconds=0.0), 0.0)
    bench.engine.tick(0.0)
    return bench


@pytest.mark.parametrize(("num_steps", "limit_s"), [(8, 5), (7, 50), (0, 50)])
def test_a_step_without_progress_ends_the_engine(num_steps: int, limit_s: int) -> None:
    """The first steps compile, and touch weights for the first time: they have longer."""
    bench = after_steps(num_steps)
    for second in range(limit_s):
        bench.engine.tick(float(second))
    bench.engine.on_progress()
    for second in range(limit_s, 2 * limit_s):
        bench.engine.tick(float(second))
    assert not bench.engine.hung
    with pytest.raises(EngineHung, match=f"step {num_steps} made no progress for {limit_s} s"):
        bench.engine.tick(2 * limit_s + 0.5)
    assert bench.engine.hung


def test_an_idle_engine_and_a_stopped_process_are_not_hung() -> None:
    bench = Bench(step_timeout_s=5)
    for second in range(100):
        bench.engine.tick(float(second))
    bench.add([1, 2, 3])
    bench.engine.tick(100.0)
    bench.engine.tick(1000.0)
    assert not bench.engine.hung
