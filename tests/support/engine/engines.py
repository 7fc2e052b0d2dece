"""Engines on fake runners, and requests for them: what engine and role tests build on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mooncake.base import pack_tokens
from mooncake.base.kv_layout import KvLayout
from mooncake.base.request import (
    Failure,
    FinishInfo,
    FinishReason,
    GenerateRequest,
    Priority,
    RequestOutput,
    SamplingParams,
)
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Made, Sequence
from mooncake.engine.speculation import Drafter
from tests.support.engine.fake_runner import FakeRunner, small_layout

ROOMY = EngineConfig(
    num_blocks=64,
    max_num_seqs=8,
    max_batched_tokens=64,
    max_chunk_tokens=32,
    max_model_len=128,
    max_waiting=32,
    block_tokens=4,
)


def request(
    prompt: list[int],
    *,
    max_tokens: int = 4,
    priority: Priority = Priority.INTERACTIVE,
    tenant: str = "",
    name: str = "r",
    **sampling: Any,
) -> GenerateRequest:
    """Return a request for `max_tokens` tokens after `prompt`."""
    return GenerateRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        priority=priority,
        tenant=tenant,
    )


def failure_of(output: RequestOutput) -> Failure:
    """Return the failure with which `output` ends its sequence."""
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ERROR
    assert output.finish.failure is not None
    return output.finish.failure


class Bench:
    """An engine, its fake runner, and a clock that counts steps."""

    def __init__(
        self, layout: KvLayout | None = None, drafter: Drafter | None = None, **config: Any
    ) -> None:
        self.layout = layout or small_layout(block_tokens=config.get("block_tokens", 4))
        self.config = replace(ROOMY, **config)
        self.runner = FakeRunner(self.layout, self.config.num_blocks)
        self.engine = Engine(self.config, self.layout.fingerprint, self.runner, drafter)
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, FinishInfo] = {}
        self._last_id = 0

    def sequence(self, prompt: list[int], **settings: Any) -> Sequence:
        """Return a new sequence, not added."""
        self._last_id += 1
        return Sequence(sequence_id=self._last_id, request=request(prompt, **settings))

    def add(self, prompt: list[int], **settings: Any) -> Sequence:
        """Add a sequence that the engine must accept."""
        sequence = self.sequence(prompt, **settings)
        assert self.engine.add(sequence, self.now)
        return sequence

    def tick(self) -> list[Made]:
        """Let the engine submit what it can."""
        outputs = self.engine.tick(self.now)
        self._take(outputs)
        return outputs

    def finish_step(self) -> list[Made]:
        """Run the oldest step to its end and commit it; ended sequences are released."""
        self.now += 1.0
        while True:
            events = self.runner.poll(limit=1)
            assert events, "no step is in flight"
            if isinstance(events[0], StepResult):
                outputs = self.engine.on_step(events[0], self.now)
                self._take(outputs)
                return outputs

    def step(self) -> list[Made]:
        """One round: submit, run a step, commit, check the booking table."""
        outputs = self.tick()
        if self.runner.num_steps:
            outputs = outputs + self.finish_step()
        self.engine.check_integrity(role_holds=(), unreleased_ids=())
        return outputs

    def run(self, limit: int = 10_000) -> None:
        """Go on until nothing is left to do."""
        for _ in range(limit):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def _take(self, outputs: list[Made]) -> None:
        for sequence, output in outputs:
            sequence_id = sequence.sequence_id
            assert sequence_id not in self.ends, f"sequence {sequence_id} goes on after its end"
            if output.tokens:
                self.tokens.setdefault(sequence_id, []).extend(output.tokens)
            if output.finish is not None:
                self.ends[sequence_id] = output.finish
                self.engine.release(sequence)
