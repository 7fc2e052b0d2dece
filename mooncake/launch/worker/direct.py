"""An engine without an API server: tokens in, tokens out, in this thread. It serves to measure an
engine alone.

Needs neither the HTTP nor the cluster packages, so it runs on a machine that has only torch.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from mooncake.base import (
    CostSample,
    GenerateRequest,
    InternalError,
    InvalidRequest,
    MonotonicClock,
    PageArray,
    Role,
    SamplingParams,
    pack_tokens,
)
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Made
from mooncake.engine.sequence import Sequence as EngineSequence
from mooncake.launch.config.config import resolve
from mooncake.launch.config.plan import ServePlan, check_memory, make_plan
from mooncake.launch.host import machine_facts
from mooncake.launch.worker.profile import Shape, profile
from mooncake.launch.worker.weights.open_model import open_model
from mooncake.model.opening import ModelSource
from mooncake.transfer.memory import allocate_shared

STEP_TIMEOUT_S = 600.0


class DirectEngine:
    """Runs one engine of a plan in this process. Use as a context, or `close` it."""

    def __init__(self, plan: ServePlan, progress: Callable[[int, int], None] | None = None) -> None:
        """Load the model and make its pages; `progress(done, whole)` counts tensors.

        Raises:
            MooncakeError: the model cannot be loaded, or cannot be run as planned.
        """
        source = open_model(str(plan.model.path), plan.model.dtype, plan.options)
        self._source: ModelSource | None = source
        try:
            source.load(progress)
            engine = plan.engine_of(Role.DECODE)
            config = replace(engine, num_blocks=source.num_pages(plan.layout, engine))
            array = PageArray(plan.layout, config.num_blocks, config.num_homes)
            held = plan.options.held_by(0, array).num_bytes
            in_host = plan.layout.block_bytes if source.owns_pages else held
            self.expert_timings = [asdict(found) for found in source.expert_timings()]
            memory, descriptor = allocate_shared(in_host, "kv-pages")
            with os.fdopen(descriptor):  # closed once every rank has mapped it
                self._runner = source.runner(
                    plan.layout, config, memoryview(memory), plan.options.num_threads, descriptor
                )
        except BaseException:
            source.close()
            raise
        self._engine = Engine(config, plan.layout.fingerprint, self._runner)
        self._poller = select.poll()
        self._poller.register(self._runner.fileno(), select.POLLIN)
        self._num_requests = 0

    @classmethod
    def open(cls, model: str, **settings: object) -> DirectEngine:
        """Make an engine for the checkpoint at `model`; settings are those of `mooncake serve`.

        Raises:
            MooncakeError: a setting is wrong, the model does not fit, or it cannot be loaded.
        """
        fixed = {"colocated": True, "target_tbt_ms": 0}  # nobody watches the text appear
        config = resolve({"model": model, **fixed, **settings}, None, {})
        plan = make_plan(config, machine_facts.num_cores())
        check_memory(plan, machine_facts.available_bytes())
        return cls(plan)

    @property
    def num_pages(self) -> int:
        return self._engine.config.num_blocks

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Return the continuation of each prompt with its own sampling. As many prompts run at once
        as fit.

        Raises:
            MooncakeError: a prompt does not fit, or a step failed. The engine cannot be used
                afterwards.
        """
        waiting = deque(self._sequences(prompts, sampling))
        everyone, left = list(waiting), len(waiting)
        while left:
            while waiting and self._engine.add(waiting[0], time.monotonic()):
                waiting.popleft()
            outputs = self._engine.tick(time.monotonic())
            if not outputs:
                outputs = self._step()
            for sequence, output in outputs:
                if output.finish is None:
                    continue
                if output.finish.failure is not None:
                    raise InternalError(output.finish.failure.message)
                self._engine.release(sequence)
                left -= 1
        return [list(sequence.output_tokens) for sequence in everyone]

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    def time_step(self, shape: Shape) -> CostSample:
        """Run one step of a size a few times and return the shortest. Leaves nothing behind.

        Raises:
            InternalError: the step failed.
        """
        [sample] = profile(self._runner, [shape], self.config, MonotonicClock())
        return sample

    def check_integrity(self) -> None:
        """Raise if a page is neither free nor held, or if another rank disagrees."""
        self._engine.check_integrity()
        self._runner.check_integrity()

    def close(self) -> None:
        try:
            self._runner.close()
        finally:
            if self._source is not None:
                self._source.close()
            self._source = None  # the model belongs to the source

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sequences(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
    ) -> list[EngineSequence]:
        made = []
        longest = self._engine.config.max_model_len
        for prompt, settings in zip(prompts, sampling, strict=True):
            if len(prompt) + settings.max_tokens > longest:
                raise InvalidRequest(
                    f"{len(prompt)} + {settings.max_tokens} tokens are more than max-model-len "
                    f"{longest}"
                )
            number = self._num_requests = self._num_requests + 1
            request = GenerateRequest(
                request_id=f"direct-{number}", prompt=pack_tokens(prompt), sampling=settings
            )
            made.append(EngineSequence(sequence_id=number, request=request))
        return made

    def _step(self) -> list[Made]:
        if not self._poller.poll(STEP_TIMEOUT_S * 1000):
            raise InternalError(f"a step did not end within {STEP_TIMEOUT_S:.0f} s")
        return [
            output
            for event in self._runner.poll()
            if isinstance(event, StepResult)
            for output in self._engine.on_step(event, time.monotonic())
        ]
