"""Runs programs with a compiler that makes Triton's first form of a kernel and nothing of it: what
compiled code is found by is real, and the code is empty. To be used in a process of its own.

`compile WORDS…` runs `mooncake compile`; `really compile WORDS…` does with the real compiler.
`launch DIR MODEL NAME=VALUE…`: launches steps other than those that `mooncake compile` ran, with
the compile cache in DIR, and prints how many kernels were read from it and how many were not in it.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from mooncake_kernels.triton import ahead, shipped
from mooncake_kernels.triton.device import stand_for
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mooncake.base import SamplingParams
from mooncake.cli.main import run
from mooncake.cli.models import compile as command
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.launch.config.plan import make_plan
from mooncake.model.compiling import META, model_without_numbers
from mooncake.model.inputs import build_inputs
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler, sampling_ops
from mooncake.model.running.computed_step import capture_steps
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.tiny_models import slot

ROWS = (
    [(1, 0)], [(3, 0)], [(17, 0)], [(33, 60)], [(100, 0)], [(1, 99)] * 3, [(1, 120)] * 7,
    [(1, 5), (1, 90), (5, 40), (64, 0)], [(20, 0), (50, 7)], [(77, 50)],
)  # fmt: skip
"""(new tokens, tokens before them) of each sequence of a step."""


def quickly() -> None:
    """Replace what follows the first form of a kernel."""

    def stages(_: Any, stages: dict[str, Any], options: Any, language: Any) -> None:
        del options, language
        stages["ttir"] = stages["ttgir"] = lambda source, _: source

        def empty(_: object, metadata: dict[str, Any]) -> bytes:
            metadata |= {"name": "kernel", "shared": 0}
            return b"code"

        stages["cubin"] = empty

    CUDABackend.add_stages = stages


class Steps:
    """Captures steps by running them."""

    def capture(self, step: Any) -> Any:
        step()
        return step


def launch(folder: Path, words: list[str]) -> dict[str, int]:
    """Launch steps as they come while it serves."""
    given: dict[str, object] = {"model": words[0], "gpu": "h200", "output": str(folder)}
    given |= {name: value for name, _, value in (word.partition("=") for word in words[1:])}
    config = command.read(given, None, {}).serve
    assert config is not None
    plan, gpu = make_plan(config, 1), ahead.GPUS["h200"]
    assert shipped.use(folder, gpu.arch)
    driver.set_active(ahead.StandInDriver(gpu.arch))
    stand_for(gpu)
    ready = JITFunction.run

    def warm(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        return ready(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = warm
    model, layout = plan.model, plan.layout
    for role, memory in plan.ranks.items():
        homes = plan.engine_of(role).num_homes
        options = msgspec.structs.replace(plan.options, shape=memory.shape)
        made, _, backends = model_without_numbers(
            model.spec, model.quantization, model.dtype, options
        )
        if homes > 1:
            continue
        kv = KvTensors.allocate(layout, 4, META)
        with torch.inference_mode():
            for rows in ROWS:
                slots = [
                    slot(number, before, [1] * new, [0] * layout.num_blocks(before + new))
                    for number, (new, before) in enumerate(rows)
                ]
                inputs = build_inputs(slots, frozenset(), kv.page_shape, made.prefers_absorbed)
                made.logits(made.forward(inputs.to(META), kv))
            for most, pages in itertools.product((1, 5, 13), (1, 3, 16)):
                capture_steps(made, kv, Steps(), CapturedSizes(most, pages, 40), None)
            sampler = Sampler(model.spec.vocab_size, ops=sampling_ops(backends))
            for rows in (1, 3, 7):
                for row in range(rows):
                    sampling = SamplingParams(repetition_penalty=1.5 if row % 2 else 1.0)
                    sampler.start(sequence_of(row, sampling, [1]))
                sampler.begin(torch.zeros(rows, model.spec.vocab_size), range(rows))
    return dict(shipped._counts)


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[0] == "really":
        sys.exit(run(words[1:]))
    quickly()
    if words[0] == "compile":
        sys.exit(run(words))
    print(json.dumps(launch(Path(words[1]), words[2:])))
