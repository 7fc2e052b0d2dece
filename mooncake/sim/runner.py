"""A runner that computes nothing but time: steps last as long as a cost model says, tokens are a
function of the request.

The token at an output position depends on the request's seed, its prompt and that position only,
as in real sampling, so a request that was moved or resumed must go on with the very same tokens:
checkers compare.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Protocol

import msgspec

from mooncake.engine.plan import LayerDone, Sample, SequenceStart, StepPlan, StepResult
from mooncake.sim.clock import EventHeap


class StepCost(Protocol):
    """How long a step takes."""

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of `plan` in seconds."""


def token_at(seed: int, position: int, vocab_size: int) -> int:
    """Return the token that any simulated worker samples at output `position` of a request."""
    digest = blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little") % vocab_size


class SimRunner:
    """Runs one step at a time; reports layers in `num_layer_reports` groups to keep the heap
    small.
    """

    def __init__(
        self,
        heap: EventHeap,
        cost: StepCost,
        deliver: Callable[[msgspec.Struct], None],
        *,
        num_layers: int,
        num_layer_reports: int = 4,
        vocab_size: int = 32000,
    ) -> None:
        self._heap = heap
        self._cost = cost
        self._deliver = deliver
        self._num_layers = num_layers
        self._num_layer_reports = min(num_layer_reports, num_layers)
        self._vocab_size = vocab_size
        self._known: dict[int, SequenceStart] = {}
        self._num_outputs: dict[int, int] = {}
        self._busy_until_s = 0.0
        self.busy_s = 0.0

    def submit(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._known.pop(sequence_id, None)
            self._num_outputs.pop(sequence_id, None)
        for start in plan.starts:
            self._known[start.sequence_id] = start
            self._num_outputs[start.sequence_id] = len(start.output_tokens)
        seconds = self._cost.seconds(plan)
        begin = max(self._heap.now(), self._busy_until_s)
        self._busy_until_s = begin + seconds
        self.busy_s += seconds
        if plan.report_layers:
            for report in range(1, self._num_layer_reports):
                layer = report * self._num_layers // self._num_layer_reports - 1
                at_s = begin + seconds * (layer + 1) / self._num_layers
                done = LayerDone(step_id=plan.step_id, layer=layer)
                self._heap.at(at_s, partial(self._deliver, done))
        self._heap.at(self._busy_until_s, lambda: self._finish(plan, seconds))

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        samples: list[Sample] = []
        for slot in plan.slots:
            if not slot.sample:
                continue
            position = self._num_outputs[slot.sequence_id]
            self._num_outputs[slot.sequence_id] = position + 1
            seed = self._known[slot.sequence_id].sampling.seed
            token = token_at(seed, position, self._vocab_size)
            samples.append(Sample(sequence_id=slot.sequence_id, token=token))
        self._deliver(StepResult(step_id=plan.step_id, samples=samples, seconds=seconds))
