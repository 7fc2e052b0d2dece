"""Time for an output token with drafts and without: `python -m benchmarks speculation [DIR]`.

One model, an engine without drafts and one for each method in turn over the same requests, no
server. "repeats": greedy answers of twelve tokens, those of a prompt that repeats itself, so that
even random weights do. "new": answers sampled from all tokens, in which nothing is found again.
"tasks": what k2-demo was trained for, greedy, until each answer ends; then another takes its place.
"""

from __future__ import annotations

import argparse
import copy
import os
import select
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmarks.support.servers import machine
from mooncake.api.text.chat_template import load_chat_template
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import KvLayout, SamplingParams, pack_tokens
from mooncake.base.request import GenerateRequest
from mooncake.engine.config import EAGLE3, MTP, NGRAM, EngineConfig, SpeculativeConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import StepResult
from mooncake.engine.sequence import Sequence
from mooncake.engine.speculation import ACCEPTED_TOKENS, DRAFT_TOKENS, DRAFTS
from mooncake.model.backends import settle
from mooncake.model.checkpoint.eagle3 import Eagle3Files
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.copies import HostCopies
from mooncake.model.drafts.eagle3 import Eagle3Head, Eagle3Rows
from mooncake.model.drafts.layers import MtpRows
from mooncake.model.drafts.model_drafts import DraftLayer
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.running.runner import ModelRunner
from mooncake.tasks.mix import evaluation_samples

PHRASE = 12
"""Tokens that a prompt of "repeats" repeats, and that its answer may have."""
PROMPT_TOKENS = 192
TEXTS = ("repeats", "new", "tasks")
TASKS = ("question", "sum", "order", "object", "memory", "call", "result")
ANSWERS = 6
"""How many answers of "tasks" come one after another in each place of the batch."""


class Side:
    """An engine with drafts, or without."""

    def __init__(
        self,
        model: KimiK2,
        speculation: SpeculativeConfig | None,
        threads: int,
        head: Eagle3Head | None = None,
    ) -> None:
        layout = KvLayout.for_model(
            model.spec, block_tokens=64, dtype="bfloat16", weights_revision="benchmark",
            with_mtp=model.mtp is not None,
        )  # fmt: skip
        config = EngineConfig(
            num_blocks=512, max_num_seqs=64, max_batched_tokens=2048, max_chunk_tokens=2048,
            max_model_len=2048, max_waiting=64, enable_prefix_caching=False,
            speculation=speculation,
        )  # fmt: skip
        kv = KvTensors.allocate(layout, config.num_blocks, torch.device("cpu"))
        sampler = Sampler(model.spec.vocab_size)
        layer: DraftLayer | None = None
        if head is not None:
            layer = Eagle3Rows(head, config.max_num_seqs, HostCopies())
        elif model.mtp is not None:
            layer = MtpRows(model, kv, HostCopies())
        self.runner = ModelRunner(model, kv, sampler, num_threads=threads, draft_layer=layer)
        self.engine = Engine(config, layout.fingerprint, self.runner)
        self._last_id = 0

    def run(self, requests: Iterable[GenerateRequest], batch: int) -> tuple[float, float]:
        """Answer `batch` requests at a time; return the wall and CPU milliseconds of the steps
        without prompts, for each token of one answer.
        """
        waiting = deque(requests)
        wall_s = cpu_s = 0.0
        num_made, num_running = 0.0, 0
        while waiting or not self.engine.idle:
            while waiting and num_running < batch:
                self._last_id += 1
                sequence = Sequence(sequence_id=self._last_id, request=waiting.popleft())
                assert self.engine.add(sequence, 0.0)
                num_running += 1
            began, began_cpu = time.perf_counter(), time.process_time()
            self.engine.tick(began)
            outputs = self.engine.on_step(self._wait(), time.perf_counter())
            wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
            # The first tokens come with prompts.
            first = any(output.start == 0 for _, output in outputs)
            if not first:
                wall_s, cpu_s = wall_s + wall, cpu_s + cpu
                # Where fewer are left, a step gives fewer: as if it had taken less.
                num_made += sum(len(output.tokens) for _, output in outputs) / len(outputs)
            for sequence, output in outputs:
                if output.finish is not None:
                    self.engine.release(sequence)
                    num_running -= 1
        return 1e3 * wall_s / num_made, 1e3 * cpu_s / num_made

    def _wait(self) -> StepResult:
        while True:
            select.select([self.runner.fileno()], [], [])
            for event in self.runner.poll():
                if isinstance(event, StepResult):
                    assert event.error is None, event.error
                    return event


def _requests(
    model: Path, text: str, batch: int, num_tokens: int, seed: int
) -> Iterator[GenerateRequest]:
    if text == "tasks":
        yield from _tasks(model, ANSWERS * batch, num_tokens, seed)
        return
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


def _tasks(model: Path, number: int, num_tokens: int, seed: int) -> Iterator[GenerateRequest]:
    tokenizer = load_tokenizer(model)
    template = load_chat_template(model, tokenizer)
    end = tokenizer.special_id("<|im_end|>")
    assert end is not None
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0.0, stop_token_ids=frozenset({end})
    )
    each = -(-number // len(TASKS))
    found = [evaluation_samples(task, each, seed) for task in TASKS]
    for at in range(number):
        sample = found[at % len(TASKS)][at // len(TASKS)]
        text = template.render(
            list(sample.messages), tools=list(sample.tools) or None, add_generation_prompt=True
        )
        yield GenerateRequest(
            request_id=f"{seed}-{at}", prompt=pack_tokens(tokenizer.encode(text)), sampling=sampling
        )


def _load(path: Path, *, with_mtp: bool) -> KimiK2:
    cpu = torch.device("cpu")
    return load_model(
        Checkpoint.open(path),
        dtype=torch.bfloat16,
        device=cpu,
        backends=settle("auto", "auto", cpu, dtype=torch.bfloat16),
        with_mtp=with_mtp,
    )


def _compare(sides: list[Side], args: argparse.Namespace, batch: int, text: str) -> None:
    """Run all sides in turn and print what each took."""
    for side in sides:
        side.run(_requests(args.model, text, batch, 8, 0), batch)  # warm
    before = [dict(side.engine.counters) for side in sides]
    found: list[list[tuple[float, float]]] = [[] for _ in sides]
    for round_no in range(1, args.rounds + 1):
        order = range(len(sides))
        for which in order if round_no % 2 else reversed(order):
            requests = list(_requests(args.model, text, batch, args.tokens, round_no))
            found[which].append(sides[which].run(requests, batch))
    names = ["none", *args.methods]
    wall = [statistics.median(wall for wall, _ in side) for side in found]
    spent = [statistics.median(cpu for _, cpu in side) for side in found]
    for which, side in enumerate(sides):
        share = ""
        if which:
            now = side.engine.counters
            drafts, proposed, accepted = (
                now[name] - before[which][name] for name in (DRAFTS, DRAFT_TOKENS, ACCEPTED_TOKENS)
            )
            share = "  none"
            if drafts:
                share = f"{accepted / proposed:8.0%}  {1 + accepted / drafts:.2f}"
        print(
            f"{text:8} {batch:5}  {names[which]:8} {wall[which]:9.2f} {wall[0] / wall[which]:6.2f}"
            f" ({spent[0] / spent[which]:.2f}) {share}",
            flush=True,
        )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks speculation", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("checkpoints/k2-small"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=["ngram"], help="ngram, mtp, eagle3")
    parser.add_argument("--head", type=Path, help="of eagle3: its directory")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=TEXTS[:2])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--lookup", type=int, default=3, help="prompt_lookup_max and _min")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    model = _load(args.model, with_mtp=MTP in args.methods)
    plain = copy.copy(model)  # with the very kernels that were measured for the other
    plain.mtp = None
    sides = [Side(plain, None, args.threads)]
    for method in args.methods:
        lookup = args.lookup if method == NGRAM else 0
        head = None
        if method == EAGLE3:
            files = Eagle3Files.open(args.head, plain.spec)
            head = Eagle3Head(files, plain, settle("auto", "auto", plain.device, dtype=plain.dtype))
        speculation = SpeculativeConfig(
            method=method, num_speculative_tokens=args.drafts, prompt_lookup_max=lookup,
            prompt_lookup_min=lookup, model="" if head is None else str(args.head),
        )  # fmt: skip
        sides.append(Side(model if method == MTP else plain, speculation, args.threads, head))
    print(machine())
    print("text     batch  drafts   ms a token  gain (CPU)  accepted  tokens a draft step")
    for batch in args.batches:
        for text in args.texts:
            _compare(sides, args, batch, text)
    for side in sides:
        side.runner.close()
    return 0
