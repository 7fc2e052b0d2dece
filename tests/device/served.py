"""An engine over a checkpoint, opened as a worker opens it, on the CPU or on the emulated GPU."""

from __future__ import annotations

import dataclasses
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake.base import GenerateRequest, KvLayout, SamplingParams, pack_tokens
from mooncake.engine.config import EAGLE3, MTP, EngineConfig, SpeculativeConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import LayerDone, StepResult
from mooncake.engine.sequence import Sequence as Running
from mooncake.launch.worker.ranks.rank_processes import start_ranks
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.device.pages import PageMemory
from mooncake.model.opening import ModelSource
from mooncake.model.options import ModelOptions
from mooncake.model.parallel.peers import Peers
from mooncake.model.running.runner import ModelRunner

BLOCK_TOKENS = 16
CONFIG = EngineConfig(
    num_blocks=40, max_num_seqs=4, max_batched_tokens=64, max_chunk_tokens=32, max_model_len=96,
    max_waiting=9, block_tokens=BLOCK_TOKENS,
)  # fmt: skip
STEP_S = 600.0
"""A step of four emulated ranks may take this long where they share two cores with others."""
Joins = Mapping[int, Sequence[tuple[list[int], SamplingParams]]]
"""Prompts and their settings, by the step before which they come."""


def prompt(length: int, seed: int) -> list[int]:
    """Return tokens of k2-nano."""
    return [(seed * 7919 + place * 104729) % 500 for place in range(length)]


class Served:
    """An engine and its runner."""

    def __init__(
        self, source: ModelSource, runner: ModelRunner, pages: Any, config: EngineConfig
    ) -> None:
        self.source, self.runner, self.pages = source, runner, pages
        self.engine = Engine(config, "layout", runner)
        self.layers: list[LayerDone] = []
        self.logprobs: dict[int, list[float]] = {}
        self.counters: dict[str, float] = {}

    def run(
        self, joins: Joins, first: int = 0, aborted: tuple[int, int] | None = None
    ) -> dict[int, list[int]]:
        """Return each sequence's tokens, all steps having ended well. first: the number of the
        first one. aborted: (step, sequence), once that step has been submitted.
        """
        made: dict[int, Running] = {}
        step = 0
        while not self.engine.idle or step <= max(joins):
            for tokens, sampling in joins.get(step, ()):
                number = first + len(made)
                request = GenerateRequest(
                    request_id=str(number), sampling=sampling, prompt=pack_tokens(tokens)
                )
                made[number] = Running(sequence_id=number, request=request)
                assert self.engine.add(made[number], 0.0)
            self.engine.tick(0.0)
            if aborted is not None and step == aborted[0]:
                assert self.engine.abort(aborted[1])
            self._hear()
            step += 1
        return {number: list(each.output_tokens) for number, each in made.items()}

    def hear_until_it_fails(self) -> None:
        """Hear the runner without a request. Raises what it fails with."""
        while True:
            self._hear()

    def _hear(self) -> None:
        assert select.select([self.runner.fileno()], [], [], STEP_S)[0], "the runner is silent"
        for event in self.runner.poll():
            if isinstance(event, LayerDone):
                self.layers.append(event)
            if not isinstance(event, StepResult):
                continue
            assert event.error is None, event.error
            self.counters |= event.counters
            for sequence_id, entries in event.logprobs.items():
                found = self.logprobs.setdefault(sequence_id, [])
                found += [entry.logprob for entry in entries]
            for sequence, output in self.engine.on_step(event, 0.0):
                if output.finish is not None:
                    self.engine.release(sequence)


@contextmanager
def served(
    path: Path,
    device: str,
    backend: str = "reference",
    peers: Peers | None = None,
    drafts: SpeculativeConfig | None = None,
    config: EngineConfig = CONFIG,
    measures: bool = False,
    **options: Any,
) -> Iterator[Served]:
    """Open a checkpoint as a worker's process does, with followers where it has several ranks, and
    close it. peers: the workers with which it shares experts. drafts: where they come from.
    measures: see `opened`; what is measured takes longer than the tests' requests.
    """
    with_mtp = drafts is not None and drafts.method == MTP
    if drafts is not None and drafts.method == EAGLE3:
        options["draft_model"] = drafts.model
    made = ModelOptions(
        device=device, attention_backend=backend, moe_backend=backend, num_threads=1,
        with_mtp=with_mtp, **options,
    )  # fmt: skip
    layout = KvLayout.for_model(
        Checkpoint.open(path).spec, block_tokens=BLOCK_TOKENS, dtype="float32",
        weights_revision="none", with_mtp=with_mtp,
    )  # fmt: skip
    shape = made.shape
    config = dataclasses.replace(
        config, num_homes=shape.dcp, num_stages=shape.pp, speculation=drafts
    )
    if shape.pp > 1:
        config = dataclasses.replace(config, max_steps_in_flight=shape.pp + 1)
    with opened(path, made, layout, config, peers, measures=measures) as engine:
        yield engine


@contextmanager
def opened(
    path: Path,
    options: ModelOptions,
    layout: KvLayout,
    config: EngineConfig,
    peers: Peers | None = None,
    *,
    measures: bool = True,
) -> Iterator[Served]:
    """Open an engine of these settings in float32 as a worker's process does, and close it.
    measures: whether it gets no more pages than its GPUs are found to have room for.
    """
    several = options.shape.num_ranks > 1
    lead = start_ranks(str(path), "float32", options, peers) if several else None
    source = ModelSource(path, "float32", options, lead=lead, peers=peers)
    try:
        source.load()
        if measures:
            most = source.num_pages(layout, config)
            config = dataclasses.replace(config, num_blocks=min(most, config.num_blocks))
        pages: memoryview | PageMemory | None
        if peers is not None and options.shape.experts and peers.number >= options.shape.dp:
            pages = None  # it holds experts and nothing else
        elif source.owns_pages:
            pages = source.device_pages(layout, config.num_blocks)
        else:
            pages = memoryview(bytearray(config.num_blocks * layout.block_bytes))
        runner = source.runner(layout, config, pages, num_threads=1)
        try:
            yield Served(source, runner, pages, config)
        finally:
            runner.close()
    finally:
        source.close()
