"""A device that runs behind the host, and only as far as a test lets it: a layer is handed on while
the device is at the layers behind it, and the host waits for none of them.
"""

from __future__ import annotations

import select
import threading

import torch

from mooncake.base import SamplingParams
from mooncake.engine.plan import LayerDone, RunnerEvent, StepPlan, StepResult
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.running.runner import ModelRunner
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.tiny_models import CPU, kv_for, slot, source_of, truth

PATIENCE_S = 60.0


class Timeline:
    """Marks on a device's stream, in order, and how many of them it has reached."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.recorded = self.reached = 0

    def record(self) -> int:
        """Return the number of a mark behind all work that was begun so far."""
        with self._changed:
            self.recorded += 1
            self._changed.notify_all()
            return self.recorded

    def run_to(self, mark: int) -> None:
        """Let the device get so far."""
        with self._changed:
            self.reached = mark
            self._changed.notify_all()

    def wait_recorded(self, marks: int) -> None:
        """Block until the host has begun so much."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.recorded >= marks, PATIENCE_S)

    def wait_reached(self, mark: int) -> None:
        """Block until the device is there."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.reached >= mark, PATIENCE_S)


class At:
    """A mark, and what is there once it has been reached."""

    def __init__(self, timeline: Timeline, values: torch.Tensor | None = None) -> None:
        self._timeline, self._values = timeline, values
        self._number = timeline.record()

    def reached(self) -> None:
        self._timeline.wait_reached(self._number)

    def wait(self) -> torch.Tensor:
        self.reached()
        assert self._values is not None
        return self._values


class TimedCopies:
    """Copies of that device."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def fetch(self, values: torch.Tensor) -> At:
        return At(self._timeline, values.clone())

    def mark(self) -> At:
        return At(self._timeline)


def events(runner: ModelRunner, number: int) -> list[RunnerEvent]:
    """Return the next so many events."""
    found: list[RunnerEvent] = []
    while len(found) < number:
        assert select.select([runner.fileno()], [], [], PATIENCE_S)[0], "the runner is silent"
        found += runner.poll()
    return found


def test_a_layer_is_handed_on_while_the_device_is_at_the_next() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    layers, timeline = model.spec.num_hidden_layers, Timeline()
    copies = TimedCopies(timeline)
    runner = ModelRunner(
        model, kv_for(model.spec), Sampler(211, copies=copies), num_threads=1, copies=copies
    )
    try:
        start = sequence_of(1, SamplingParams(temperature=0), [1, 2, 3])  # fmt: skip
        runner.submit(
            StepPlan(
                step_id=1, starts=[start], ended=[], slots=[slot(1, 0, [1, 2, 3], [0])],
                report_layers=True,
            )
        )  # fmt: skip
        timeline.wait_recorded(layers + 1)  # all layers, and the sampled token
        assert list(runner.poll()) == [], "the device has done nothing yet"
        for layer in range(layers):
            timeline.run_to(layer + 1)
            assert events(runner, 1) == [LayerDone(step_id=1, layer=layer)]
            assert timeline.recorded > timeline.reached, "the device has more to do"
        timeline.run_to(timeline.recorded)
        (result,) = events(runner, 1)
        assert isinstance(result, StepResult)
        assert result.error is None
        assert len(result.tokens) == 1
    finally:
        timeline.run_to(10**6)
        runner.close()
