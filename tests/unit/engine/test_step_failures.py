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
    assert "its grammar cannot be followed" in failure.message
    bench.engine.release(bad)
    bench.engine.check_integrity()
    assert bench.engine.get(good.sequence_id) is good
