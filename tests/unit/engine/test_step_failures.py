"""A step that went well but for one of its sequences."""

from __future__ import annotations

from mooncake.base.request import FinishReason
from mooncake.engine.plan import Sample, StepResult
from tests.support.engines import Bench


def test_one_sequence_fails_and_the_others_go_on() -> None:
    bench = Bench()
    good, bad = bench.add([1, 2, 3]), bench.add([4, 5, 6])
    bench.engine.tick(0.0)
    result = StepResult(
        step_id=0,
        samples=[Sample(sequence_id=good.sequence_id, token=7)],
        seconds=0.1,
        failures={bad.sequence_id: "its grammar cannot be followed"},
    )
    outputs = {out.sequence: out for out in bench.engine.on_step(result, 1.0)}
    assert outputs[good].token == 7
    assert outputs[good].finish is None
    assert outputs[bad].finish is FinishReason.ERROR
    failure = outputs[bad].failure
    assert failure is not None
    assert failure.status == 400  # another worker would fail as well
    assert failure.message == "its grammar cannot be followed"
    bench.engine.release(bad)
    bench.engine.check_integrity()
    assert bench.engine.get(good.sequence_id) is good


def test_a_step_that_failed_is_nobodys_own_fault() -> None:
    bench = Bench()
    first, second = bench.add([1, 2, 3]), bench.add([4, 5, 6])
    bench.engine.tick(0.0)
    result = StepResult(
        step_id=0, samples=[], seconds=0.1, failures={first.sequence_id: "odd"}, error="no memory"
    )
    outputs = bench.engine.on_step(result, 1.0)
    assert [output.sequence for output in outputs] == [first, second]
    for output in outputs:
        assert output.failure is not None
        assert output.failure.status == 500  # as good a request as any: another worker may do it
        assert "no memory" in output.failure.message
        bench.engine.release(output.sequence)
    bench.engine.check_integrity()
