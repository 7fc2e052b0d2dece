"""Time for an output token with drafts and without: `python -m benchmarks speculation [DIR]`.

One model, two engines in turn over the same requests, no server. "repeats": greedy answers of
twelve tokens, those of a prompt that repeats itself, so that even random weights do. "new": answers
sampled from all tokens, in which nothing is found again.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.support.servers import machine
from mooncake.base import KvLayout, SamplingParams, pack_tokens
from mooncake.base.request import GenerateRequest
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Sequence
from mooncake.engine.speculation import ACCEPTED_TOKENS, DRAFT_TOKENS, DRAFTS, SpeculativeConfig
from mooncake.model.backends import settle
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.runner import ModelRunner

PHRASE = 12
"""Tokens that a prompt of "repeats" repeats, and that its answer may have."""
PROMPT_TOKENS = 192
TEXTS = ("repeats", "new")


class Side:
    """An engine with drafts, or without."""

    def __init__(self, model: KimiK2, speculation: SpeculativeConfig | None, threads: int) -> None:
        layout = KvLayout.for_model(
            model.spec, block_tokens=64, dtype="bfloat16", weights_revision="benchmark"
        )
        config = EngineConfig(
            num_blocks=512, max_num_seqs=64, max_batched_tokens=2048, max_chunk_tokens=2048,
            max_model_len=2048, max_waiting=64, enable_prefix_caching=False,
            speculation=speculation,
        )  # fmt: skip
        kv = KvTensors.allocate(layout, config.num_blocks, torch.device("cpu"))
        sampler = Sampler(model.spec.vocab_size)
        self.runner = ModelRunner(model, kv, sampler, num_threads=threads)
        self.engine = Engine(config, layout.fingerprint, self.runner)
        self._last_id = 0

    def run(self, text: str, batch: int, num_tokens: int, seed: int) -> tuple[float, float]:
        """Answer `batch` prompts together; return the wall and CPU milliseconds of the steps that
        follow the prompts, for each token of one answer.
        """
        for request in _requests(text, batch, num_tokens, seed):
            self._last_id += 1
            sequence = Sequence(sequence_id=self._last_id, request=request)
            assert self.engine.add(sequence, 0.0)
        wall_s = cpu_s = 0.0
        num_made = 0
        while not self.engine.idle:
            began, began_cpu = time.perf_counter(), time.process_time()
            self.engine.tick(began)
            outputs = self.engine.on_step(self._wait(), time.perf_counter())
            wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            # The first tokens come with prompts.
            first = any(len(out.sequence.output_tokens) == len(out.tokens) for out in outputs)
            if not first:
                wall_s, cpu_s = wall_s + wall, cpu_s + cpu
                num_made += sum(len(output.tokens) for output in outputs)
            for output in outputs:
                if output.finish is not None:
                    self.engine.release(output.sequence)
        return 1e3 * wall_s * batch / num_made, 1e3 * cpu_s * batch / num_made

    def _wait(self) -> StepResult:
        while True:
            select.select([self.runner.fileno()], [], [])
            for event in self.runner.poll():
                if isinstance(event, StepResult):
                    assert event.error is None, event.error
                    return event


def _requests(text: str, batch: int, num_tokens: int, seed: int) -> Iterator[GenerateRequest]:
    for number in range(batch):
        generator = torch.Generator().manual_seed(1000 * seed + number)
        phrase = torch.randint(1, 200, (PHRASE,), generator=generator).tolist()
        repeats = text == "repeats"
        sampling = SamplingParams(
            max_tokens=num_tokens,
            ignore_eos=True,
            temperature=0.0 if repeats else 1.0,
            seed=seed,
            allowed_token_ids=phrase if repeats else [],
        )
        tokens = phrase * (PROMPT_TOKENS // PHRASE)
        yield GenerateRequest(
            request_id=f"{seed}-{number}", prompt=pack_tokens(tokens), sampling=sampling
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("checkpoints/k2-small"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--lookup", type=int, default=3, help="prompt_lookup_max and _min")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    cpu = torch.device("cpu")
    model = load_model(
        Checkpoint.open(args.model),
        dtype=torch.bfloat16,
        device=cpu,
        backends=settle("auto", "auto", cpu, dtype=torch.bfloat16),
    )
    speculation = SpeculativeConfig(
        method="ngram", num_speculative_tokens=args.drafts,
        prompt_lookup_max=args.lookup, prompt_lookup_min=args.lookup,
    )  # fmt: skip
    sides = [Side(model, None, args.threads), Side(model, speculation, args.threads)]
    print(machine())
    print("text     batch  ms a token: without  with  gain (CPU)  accepted  tokens a draft step")
    for batch in args.batches:
        for text in TEXTS:
            for side in sides:
                side.run(text, batch, 8, 0)  # warm
            before = dict(sides[1].engine.counters)
            found: list[list[tuple[float, float]]] = [[], []]
            for round_no in range(1, args.rounds + 1):
                for which in (0, 1) if round_no % 2 else (1, 0):
                    found[which].append(sides[which].run(text, batch, args.tokens, round_no))
            wall = [statistics.median(wall for wall, _ in side) for side in found]
            spent = [statistics.median(cpu for _, cpu in side) for side in found]
            now = sides[1].engine.counters
            drafts, proposed, accepted = (
                now[name] - before[name] for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS)
            )
            share = (
                f"{accepted / proposed:8.0%}  {1 + accepted / drafts:.2f}" if drafts else "  none"
            )
            print(
                f"{text:8} {batch:5} {wall[0]:20.1f} {wall[1]:5.1f} {wall[0] / wall[1]:5.2f}"
                f" ({spent[0] / spent[1]:.2f}) {share}",
                flush=True,
            )
    for side in sides:
        side.runner.close()
    return 0
