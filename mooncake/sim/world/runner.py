"""A runner that computes nothing but time. Steps last as long as a cost model says, and each token
is a function of the request.

The token at an output position depends only on the request's seed and that position, as in real
sampling. So a request that was moved or resumed must go on with the very same tokens, and checkers
compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from mooncake.base.models.parallel import stage_layers
from mooncake.base.request import Grammar, SamplingParams
from mooncake.engine.plan import LayerDone, StepPlan, StepResult
from mooncake.sim.world.clock import EventHeap

VOCAB_SIZE = 32000

TokenOracle = Callable[[SamplingParams, int], int]
"""(sampling, output position) -> the token that any worker samples there."""


class StepCost(Protocol):
    """The cost model port: the duration of a step."""

    def seconds(self, plan: StepPlan) -> float:
        """Return the duration of `plan` in seconds, in each of its stages."""


def token_at(seed: int, position: int) -> int:
    """Return a token in [1, VOCAB_SIZE) that looks random and depends only on the arguments."""
    mixed = (seed * 0x9E3779B1 + position * 0x85EBCA77 + 0x27D4EB2F) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & 0xFFFFFFFF
    return 1 + ((mixed ^ (mixed >> 12)) % (VOCAB_SIZE - 1))


def sampled_token(sampling: SamplingParams, position: int) -> int:
    """Return the token of a request that runs until its `max_tokens`."""
    return token_at(sampling.seed, position)


class _Known:
    """The runner's state of one sequence."""

    __slots__ = ("num_outputs", "sampling")

    def __init__(self, sampling: SamplingParams, num_outputs: int) -> None:
        self.sampling = sampling
        self.num_outputs = num_outputs


class SimRunner:
    """Runs one step at a time. Reports layers in `num_layer_reports` groups to keep the
    heap small.
    """

    def __init__(
        self,
        heap: EventHeap,
        cost: StepCost,
        deliver: Callable[[msgspec.Struct], None],
        *,
        num_layers: int,
        num_layer_reports: int = 4,
        num_stages: int = 1,
        send_s: Callable[[int], float] = lambda _: 0.0,
        oracle: TokenOracle = sampled_token,
    ) -> None:
        """num_stages: each stage has a part of the layers and computes one step at a time. The
        activations of a step take `send_s(tokens of the step)` from one to the next. The last stage
        samples, and tells the first of each step by a message, which takes `send_s(0)`.
        """
        self._heap = heap
        self._cost = cost
        self._deliver = deliver
        self._num_layers = num_layers
        self._num_layer_reports = min(num_layer_reports, num_layers)
        self._oracle = oracle
        self._known: dict[int, _Known] = {}
        self._stages = stage_layers(num_layers, num_stages)
        self._send_s = send_s
        self._tell_s = send_s(0) if num_stages > 1 else 0.0
        self._busy_until_s = [0.0] * num_stages
        self.busy_s = 0.0
        """The seconds that each stage spent computing, for steps that were begun."""
        self.hung = False
        """Whether steps never end from now on."""

    def prepare(self, grammar: Grammar) -> None:
        """Accept a grammar; compiling one takes no simulated time."""

    def submit(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            self._known.pop(sequence_id, None)
        for start in plan.starts:
            known = _Known(start.request.sampling, len(start.output_tokens))
            self._known[start.sequence_id] = known
        self._start(plan, self._cost.seconds(plan))

    def _start(self, plan: StepPlan, seconds: float) -> None:
        """Schedule the reports of the step's layers and of its end."""
        num_reports = self._num_layer_reports if plan.report_layers else 1
        reported = {
            report * self._num_layers // num_reports - 1 for report in range(1, num_reports)
        }
        comes_s, send_s = self._heap.now() + self._tell_s, self._send_s(plan.num_tokens)
        for stage, layers in enumerate(self._stages):
            begin = max(comes_s, self._busy_until_s[stage])
            for place, layer in enumerate(layers, 1):
                if layer in reported:
                    at_s = begin + seconds * place / len(layers)
                    done = LayerDone(step_id=plan.step_id, layer=layer)
                    self._heap.at(at_s, partial(self._deliver, done))
            self._busy_until_s[stage] = begin + seconds
            comes_s = begin + seconds + send_s
        self.busy_s += seconds
        self._heap.at(self._busy_until_s[-1], partial(self._finish, plan, seconds))

    def _finish(self, plan: StepPlan, seconds: float) -> None:
        if self.hung:
            return
        tokens: dict[int, list[int]] = {}
        for slot in plan.slots:
            if slot.sample:
                known, made = self._known[slot.sequence_id], tokens.setdefault(slot.sequence_id, [])
                for draft in (*slot.drafts, None):
                    token = self._oracle(known.sampling, known.num_outputs)
                    known.num_outputs += 1
                    made.append(token)
                    if token != draft:
                        break
        self._deliver(StepResult(step_id=plan.step_id, tokens=tokens, seconds=seconds))
