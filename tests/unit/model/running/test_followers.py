"""A lead and its followers, which are threads here: the results of one rank, and one end."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from mooncake.base import (
    CheckpointError,
    InternalError,
    ModelSpec,
    PageArray,
    SamplingParams,
    Shape,
)
from mooncake.engine.plan import (
    BY_MODEL,
    LayerDone,
    RunnerEvent,
    StepPlan,
    StepResult,
    StepSlot,
)
from mooncake.engine.ranks.kv_moves import Alive, encode_answer
from mooncake.engine.ranks.step_log import (
    CapturedSizes,
    Held,
    Measure,
    UsePages,
    decode,
    encode,
)
from mooncake.model.backends import Backends
from mooncake.model.copies import HostCopies
from mooncake.model.drafts.eagle3 import Eagle3Head, Eagle3Rows
from mooncake.model.drafts.layers import MtpRows, draft_layer, load_head
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.measuring import measure_memory
from mooncake.model.memory import GpuMemory
from mooncake.model.parallel.group import GroupError
from mooncake.model.parallel.lead import Lead, Loaded
from mooncake.model.parallel.shared_memory import SharedGroup, shared_bytes
from mooncake.model.running.computed_step import ComputedStep, capture_steps
from mooncake.model.running.follower import Follower, Guesses, heard
from mooncake.model.running.runner import ModelRunner
from mooncake.transfer.memory import allocate_shared
from mooncake.transfer.net.blocking import receive, send
from tests.support.engine.fake_runner import Running, sequence_of
from tests.support.model.eagle3_heads import (
    config_of,
    mla_config_of,
    random_tensors,
    write_head,
)
from tests.support.model.recorder import Recorder
from tests.support.model.tiny_models import (
    CPU,
    DictSource,
    layout_for,
    random_source,
    random_tokens,
    slot,
    source_of,
    truth,
)
from tests.support.waiting import LONG_S

NUM_PAGES = 32


class Process:
    """Stands for a follower's process."""

    def __init__(self) -> None:
        self.killed = 0

    def kill(self) -> None:
        self.killed += 1

    def wait(self, timeout: float | None = None) -> int:
        return 0


class Meter:
    """Stands for a device that has `total_bytes`; sees how many exchanges were before."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self.exchanges: Callable[[], int] = lambda: 0
        self.exchanges_before = 0

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        self.exchanges_before = self.exchanges()
        step()
        return GpuMemory(self._total_bytes, 10**9 + self._total_bytes // 2, 7)


class Gated(Sampler):
    """Has a lead compute nothing of a sequence's first step while `opened` is not set."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.opened = threading.Event()
        self.opened.set()

    def start(self, start: Running) -> None:
        assert self.opened.wait(LONG_S)
        super().start(start)


class Instance:
    """A runner with followers in threads."""

    def __init__(
        self,
        source: DictSource,
        shape: Shape,
        captured: bool,
        with_mtp: bool = False,
        head: Callable[[KimiK2], Eagle3Head | None] = lambda _: None,
    ) -> None:
        """head: makes the head that drafts for a rank's model."""
        num_ranks, num_homes = shape.num_ranks, shape.dcp
        memory = mmap.mmap(-1, shared_bytes(num_ranks))
        groups = [SharedGroup(rank, num_ranks, memory, LONG_S) for rank in range(num_ranks)]
        models = [
            load_model(
                source, dtype=torch.float32, device=CPU, group=group, shape=shape,
                with_mtp=with_mtp, drafts=True,
            )
            for group in groups
        ]  # fmt: skip
        heads = [head(model) for model in models]
        reads = (source.spec.num_hidden_layers,) if with_mtp else ()
        if heads[0] is not None:
            reads = heads[0].spec.layers
        pairs = [socket.socketpair() for _ in range(num_ranks - 1)]
        self.links = [theirs for _, theirs in pairs]
        self.answers: queue.SimpleQueue[tuple[socket.socket, bytes]] = queue.SimpleQueue()
        """What followers answer to a step begun ahead; `answering` says when the lead gets it."""
        self.answering = threading.Event()
        self.answering.set()
        threading.Thread(target=self._answer, daemon=True).start()
        self.processes = [Process() for _ in pairs]
        self.lead = Lead(
            groups[0], [ours for ours, _ in pairs], self.processes, LONG_S, stage_ranks=shape.tp
        )
        self.graphs = [Recorder() for _ in groups]
        self.meters = [Meter(1000 + 100 * rank) for rank in range(num_ranks)]
        self.followers = [
            Follower(
                models[rank],
                groups[rank],
                lambda rank=rank: self.graphs[rank],  # type: ignore[misc]
                meter=self.meters[rank],
                answer=lambda answer, rank=rank: send(  # type: ignore[misc]
                    self.links[rank - 1], encode_answer(answer)
                ),
                open_head=lambda rank=rank: heads[rank],  # type: ignore[misc]
            )
            for rank in range(1, num_ranks)
        ]
        self.threads = [
            threading.Thread(target=self._run, args=(link, follower, group))
            for link, follower, group in zip(self.links, self.followers, groups[1:], strict=True)
        ]
        for thread in self.threads:
            thread.start()
        self.lead.wait_until_loaded()
        array = PageArray(layout_for(source.spec, with_mtp=with_mtp), NUM_PAGES, num_homes)
        pages, descriptor = allocate_shared(array.num_bytes, "pages")
        tokens = 32 if num_homes == shape.pp == 1 and not reads else 0
        most_drafts = 3 if reads else 0
        sizes = CapturedSizes(4, 8, tokens, most_drafts) if captured else CapturedSizes()
        self.lead.use_pages(UsePages(array, None, sizes, num_drafted=2, reads=reads), descriptor)
        os.close(descriptor)
        kv = self.kv = KvTensors.view(array, memoryview(pages))
        steps, layer = None, draft_layer(models[0], heads[0], kv, 2, HostCopies())
        if captured:
            steps = capture_steps(models[0], kv, self.graphs[0], sizes, None, layer, reads)
        sampler = self.sampler = Gated(source.spec.vocab_size)
        self.runner = ModelRunner(
            models[0], kv, sampler, captured=steps, lead=self.lead, draft_layer=layer
        )

    def _run(self, link: socket.socket, follower: Follower, group: SharedGroup) -> None:
        send(link, msgspec.msgpack.encode(Loaded()))
        answer = lambda answer: self.answers.put((link, encode_answer(answer)))  # noqa: E731
        try:
            follower.follow(heard(link, Guesses(answer)))
        except Exception:
            group.fail()
        link.close()

    def _answer(self) -> None:
        while True:
            link, answer = self.answers.get()
            self.answering.wait()
            with contextlib.suppress(OSError):  # the lead has gone
                send(link, answer)

    def run(self, plan: StepPlan) -> StepResult:
        return run(self.runner, plan)

    def close(self) -> None:
        self.runner.close()
        self.lead.close()
        for thread in self.threads:
            thread.join(LONG_S)
            assert not thread.is_alive()


def events_until(runner: ModelRunner, step_id: int) -> list[RunnerEvent]:
    """Return what the runner says until a step has ended, and what it has said by then."""
    events: list[RunnerEvent] = []
    while not any(isinstance(each, StepResult) and each.step_id >= step_id for each in events):
        assert select.select([runner.fileno()], [], [], 30)[0]
        events += runner.poll()
    return events


def run(runner: ModelRunner, plan: StepPlan) -> StepResult:
    runner.submit(plan)
    *_, result = events_until(runner, plan.step_id)
    assert isinstance(result, StepResult)
    return result


Open = Callable[..., Instance]


@pytest.fixture(scope="module")
def source() -> DictSource:
    return source_of(truth("grouped routing", vocab_size=212))


@pytest.fixture
def instance(source: DictSource) -> Iterator[Open]:
    opened: list[Instance] = []

    def make(shape: Shape = Shape(tp=2), captured: bool = False) -> Instance:  # noqa: B008
        opened.append(Instance(source, shape, captured))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def start(sequence: int, prompt: list[int], **settings: object) -> Running:
    sampling = SamplingParams(**{"temperature": 0.0, **settings})  # type: ignore[arg-type]
    return sequence_of(sequence, sampling, prompt)


def plan(
    step: int, slots: list[StepSlot], starts: list[Running] | None = None,
    ended: list[int] | None = None,
) -> StepPlan:  # fmt: skip
    return StepPlan(step_id=step, starts=starts or [], slots=slots, ended=ended or [])


def scenario(go: Callable[[StepPlan], StepResult]) -> list[object]:
    """A chunked prompt beside another with log-probabilities, decode steps, one with drafts, right
    ones after the sequence has begun anew on other pages, an end; return what is known of all.
    """
    long, short = random_tokens(40, seed=1), random_tokens(7, seed=2)
    starts = [start(1, long), start(2, short, num_prompt_logprobs=2, num_logprobs=1)]
    found: list[Any] = []

    def step(*arguments: object) -> dict[int, int]:
        result = go(plan(len(found), *arguments))  # type: ignore[arg-type]
        assert result.error is None
        rounded = {
            sequence: [round(each.logprob, 3) for each in rows]
            for sequence, rows in result.prompt_logprobs.items()
        }
        found.append((result.tokens, rounded))
        return {sequence: tokens[-1] for sequence, tokens in result.tokens.items()}

    step([slot(1, 0, long[:30], [3, 1], sample=False), slot(2, 0, short, [5])], starts)
    one = step([slot(1, 30, long[30:], [3, 1, 7])])[1]
    step([slot(1, 30, long[30:], [3, 1, 7], sample=False)])
    for number in range(40, 50):
        one = step([slot(1, number, [one], [3, 1, 7, 9])])[1]
    step([slot(1, 50, [one], [3, 1, 7, 9], drafts=[5, 6])])
    step([], [], [2])
    again = [start(1, long)]
    two = step([slot(1, 0, long, [11, 12, 13])], again, [])[1]
    firsts = [tokens[1][0] for tokens, _ in found[3:7]]
    step([slot(1, 40, [two], [11, 12, 13], drafts=firsts)])
    assert len(found[-1][0][1]) >= 4, "its tokens of before are drafts that are accepted"
    step([slot(4, 0, short, [5])], [start(4, short)], [1])
    return found


SHAPES = ("tp2", "tp4", "tp2-dcp2", "tp4-dcp2", "tp1-pp2", "tp1-pp3", "tp2-pp2", "tp2-pp2-dcp2")


@pytest.mark.parametrize("words", SHAPES)
def test_followers_compute_with_the_lead(instance: Open, source: DictSource, words: str) -> None:
    model = load_model(source, dtype=torch.float32, device=CPU)
    kv = KvTensors.allocate(layout_for(source.spec), NUM_PAGES, CPU)
    alone = ModelRunner(model, kv, Sampler(source.spec.vocab_size))
    expected = scenario(lambda each: run(alone, each))
    alone.close()
    made = instance(Shape.parse(words))
    assert scenario(made.run) == expected
    made.runner.check_integrity()
    assert made.lead.lost is None


def drafted(go: Callable[[StepPlan], StepResult]) -> list[dict[int, list[int]]]:
    """Prompts, one in chunks that are handed on, then steps whose drafts the model makes, one of
    the sequences begun anew in between; return what is sampled.
    """
    prompts = {1: random_tokens(40, seed=1), 2: random_tokens(21, seed=2)}
    pages = {1: [3, 1, 7, 9, 10], 2: [5, 6, 4]}
    known = {key: list(tokens) for key, tokens in prompts.items()}
    found: list[dict[int, list[int]]] = []

    def step(
        slots: list[StepSlot], starts: Sequence[int] = (), ended: Sequence[int] = (),
        handed_on: bool = False,
    ) -> None:  # fmt: skip
        made = plan(len(found), slots, [start(key, prompts[key]) for key in starts], list(ended))
        result = go(msgspec.structs.replace(made, report_layers=handed_on))
        assert result.error is None
        found.append(result.tokens)
        for key, tokens in result.tokens.items():
            known[key] += tokens

    def more(key: int, num_drafts: int) -> StepSlot:
        at = len(known[key]) - 1
        return slot(key, at, known[key][at:], pages[key], drafts=[BY_MODEL] * num_drafts)

    step([slot(1, 0, prompts[1][:30], pages[1], sample=False)], [1])
    step([slot(1, 30, prompts[1][30:], pages[1]), slot(2, 0, prompts[2], pages[2])], [2], (), True)
    for number in range(8):
        step([more(1, number % 4), more(2, 2 - number % 3)])
    known[2] = list(prompts[2])
    pages[2] = [12, 13, 14]
    step([slot(2, 0, prompts[2], pages[2]), more(1, 1)], [2], [2])
    for _ in range(3):
        step([more(1, 3), more(2, 3)])
    return found


DRAFTING = ("tp2", "tp4", "tp2-dcp2", "tp2-ep2", "tp1-pp2", "tp1-pp3", "tp2-pp2-dcp2")


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("words", DRAFTING)
def test_drafts_are_made_by_all_ranks(words: str, captured: bool) -> None:
    """What is sampled is that of one rank, as many drafts are accepted, and the layer's KV is what
    it was. The MTP layer hands tokens on, as `model init` makes it: so some drafts are right.
    """
    spec = ModelSpec.from_config(truth("plain", vocab_size=212).config.to_dict())
    source = random_source(spec, seed=6, with_mtp=True)
    prefix = f"model.layers.{spec.num_hidden_layers}."
    embedding = source.tensors["model.embed_tokens.weight"].mul_(6)
    source.tensors["lm_head.weight"] = embedding.roll(1, 0)  # one token follows the other
    source.tensors[prefix + "eh_proj.weight"][:, : spec.hidden_size] += 3 * torch.eye(64)
    model = load_model(source, dtype=torch.float32, device=CPU, with_mtp=True)
    kv = KvTensors.allocate(layout_for(spec, with_mtp=True), NUM_PAGES, CPU)
    layer = MtpRows(model, kv, HostCopies())
    alone = ModelRunner(model, kv, Sampler(spec.vocab_size), draft_layer=layer)
    expected = drafted(lambda each: run(alone, each))
    alone.close()
    most = max(sum(map(len, tokens.values())) for tokens in expected)
    assert most > 4, "no draft was accepted"
    made = Instance(source, Shape.parse(words), captured, with_mtp=True)
    try:
        assert drafted(made.run) == expected
        assert len(made.graphs[0].replayed) == (11 if captured else 0)
        assert bool(made.graphs[0].guessed) == captured
        made.runner.check_integrity()
        assert made.lead.lost is None
        if made.kv.home.num_homes == 1:
            torch.testing.assert_close(made.kv.pages, kv.pages, rtol=1e-4, atol=1e-4)
    finally:
        made.close()


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("words", DRAFTING)
@pytest.mark.parametrize("named", [config_of, mla_config_of])
def test_a_head_drafts_the_same_on_all_ranks(
    source: DictSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    captured: bool,
    named: Callable[..., dict[str, Any]],
) -> None:
    """Those that it drafts for one rank, from states that may come from earlier stages. It uses the
    embedding and the words of the model, which ranks share out, and its own KV, of which each rank
    of the last stage has all.
    """
    config = named(source.spec, draft_vocab_size=None)
    own = random_tensors(config, source.spec, seed=3)
    write_head(tmp_path, config, {name: own[name] for name in own if "midlayer" in name
                                  or name in ("fc.weight", "norm.weight")})  # fmt: skip
    made: dict[Eagle3Rows, list[list[int]]] = {}
    compute = Eagle3Rows.compute

    def computed(rows: Eagle3Rows, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states, tokens = compute(rows, *args)
        if len(tokens):
            made.setdefault(rows, []).append(tokens.tolist())
        return states, tokens

    monkeypatch.setattr(Eagle3Rows, "compute", computed)
    head = partial(load_head, str(tmp_path), backends=Backends())
    with torch.inference_mode():
        model = load_model(source, dtype=torch.float32, device=CPU)
        kv = KvTensors.allocate(layout_for(source.spec), NUM_PAGES, CPU)
        layer = draft_layer(model, head(model), kv, 2, HostCopies())
    alone = ModelRunner(model, kv, Sampler(source.spec.vocab_size), draft_layer=layer)
    expected = drafted(lambda each: run(alone, each))
    alone.close()
    [wanted] = made.values()
    assert len(wanted) > 15
    made.clear()
    shape = Shape.parse(words)
    ranks = Instance(source, shape, captured, head=head)
    try:
        assert drafted(ranks.run) == expected
        assert len(ranks.graphs[0].replayed) == (11 if captured else 0)
        assert bool(ranks.graphs[0].guessed) == captured
        ranks.runner.check_integrity()
    finally:
        ranks.close()
    assert [*made.values()] == [wanted] * shape.tp


def test_ranks_whose_heads_guess_differently_draft_what_the_first_does(
    source: DictSource, tmp_path: Path
) -> None:
    """As ranks may that round differently; here each has a head of its own."""
    memory = mmap.mmap(-1, shared_bytes(2))
    heads: list[Eagle3Head] = []
    for rank in range(2):
        group = SharedGroup(rank, 2, memory, LONG_S)
        model = load_model(source, dtype=torch.float32, device=CPU, group=group, shape=Shape(tp=2))
        config = config_of(source.spec)
        tensors = random_tensors(config, source.spec, seed=rank)
        head = load_head(str(write_head(tmp_path / str(rank), config, tensors)), model, Backends())
        assert head is not None
        heads.append(head)
    states = torch.randn(20, source.spec.hidden_size, generator=torch.Generator().manual_seed(1))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda head: head.likeliest(states).tolist(), heads)
    assert first == second


def test_ranks_that_come_back_as_prefill_draft_no_more(source: DictSource, tmp_path: Path) -> None:
    """Their lead does not: an exchange of drafts would take the place of one of its own."""
    config = config_of(source.spec)
    written = write_head(tmp_path, config, random_tensors(config, source.spec))
    made = Instance(
        source, Shape(tp=2), captured=False,
        head=lambda model: load_head(str(written), model, Backends()),
    )  # fmt: skip
    try:
        model = made.runner._model
        assert [each._drafts is None for each in made.followers] == [False]
        made.runner.close()
        array = PageArray(layout_for(source.spec), NUM_PAGES)
        pages, descriptor = allocate_shared(array.num_bytes, "pages")
        made.lead.use_pages(UsePages(array, None, CapturedSizes(), num_drafted=0), descriptor)
        os.close(descriptor)
        assert [each._drafts is None for each in made.followers] == [True]
        kv = KvTensors.view(array, memoryview(pages))
        made.runner = ModelRunner(model, kv, Sampler(source.spec.vocab_size), lead=made.lead)
        prompt = random_tokens(20, seed=1)
        result = made.run(plan(0, [slot(1, 0, prompt, [3, 1])], [start(1, prompt)]))
        assert (result.error, list(result.tokens)) == (None, [1])
    finally:
        made.close()


@pytest.mark.parametrize("words", ["tp2", "tp4-dcp2", "tp2-pp2"])
def test_memory_is_measured_by_all_ranks_in_one_step(
    instance: Open, source: DictSource, words: str
) -> None:
    """Once all exchanges have been used; each rank's own memory, in the order of ranks."""
    made = instance(Shape.parse(words))
    group, layout = made.lead.group, layout_for(source.spec)
    models = [made.runner._model, *(follower._model for follower in made.followers)]
    for meter, model in zip(made.meters, models, strict=True):
        meter.exchanges = lambda ranks=model.stage.ranks: ranks.traffic.num_calls  # type: ignore[misc]
    homes = made.kv.home.num_homes
    asked = Measure(layout, homes, step_tokens=40, step_sequences=3, context_tokens=100)

    def own() -> list[GpuMemory]:
        return measure_memory(made.runner._model, made.meters[0], asked, group)

    found = made.lead.measure(asked, own)
    pages = -(-layout.num_blocks(100) // homes) * layout.slice_bytes
    assert found == [
        GpuMemory(total, 10**9 + total // 2 - pages, 7)
        for total, _ in zip(itertools.count(1000, 100), models, strict=False)
    ]
    assert all(meter.exchanges_before > 0 for meter in made.meters), "nothing was warm"
    made.run(plan(0, [slot(1, 0, [5], [7])], [start(1, [5])]))


@pytest.mark.parametrize("words", ["tp2", "tp4-dcp2", "tp1-pp3", "tp2-pp2"])
def test_captured_steps_are_replayed_by_all_ranks(
    instance: Open, source: DictSource, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two streams that run ahead, one that joins and one that ends meanwhile; the same sizes in the
    same order on all ranks.
    """
    monkeypatch.setattr("mooncake.model.device.graphs._SETTLED", 1)
    tables = {1: [3, 1, 7], 2: [5, 9], 3: [11, 12]}
    prompts = {n: random_tokens(9 + n, seed=n) for n in tables}

    def streams(runner: ModelRunner) -> list[dict[int, int]]:
        known = {n: list(tokens) for n, tokens in prompts.items()}
        found: list[dict[int, int]] = []

        def step(running: list[int], joins: list[int] = (), ended: list[int] = ()) -> None:
            slots = [slot(n, 0, known[n], tables[n]) for n in joins]
            slots += [slot(n, len(known[n]) - 1, known[n][-1:], tables[n]) for n in running]
            starts = [start(n, prompts[n]) for n in joins]
            result = run(runner, plan(len(found), slots, starts, list(ended)))
            assert result.error is None
            found.append({number: tokens[-1] for number, tokens in result.tokens.items()})
            for number, token in found[-1].items():
                known[number].append(token)

        step([], joins=[1, 2])
        for _ in range(5):
            step([1, 2])
        step([1, 2], joins=[3])  # what ran ahead is dropped
        for _ in range(4):
            step([2, 1, 3])
        step([3, 1], ended=[2])  # what ran ahead holds for the two that are left
        for _ in range(2):
            step([3, 1])
        return found

    model = load_model(source, dtype=torch.float32, device=CPU)
    kv = KvTensors.allocate(layout_for(source.spec), NUM_PAGES, CPU)
    alone = ModelRunner(model, kv, Sampler(source.spec.vocab_size))
    expected = streams(alone)
    alone.close()
    made = instance(Shape.parse(words), captured=True)
    assert streams(made.runner) == expected
    made.runner.check_integrity()
    first, *others = made.graphs
    shape = Shape.parse(words)
    prompts_too = shape.dcp == shape.pp == 1
    assert first.captured == [4, 2, 1] + [32, 16] * prompts_too
    assert len([size for size in first.replayed if size < 16]) == 12 + 2 * (shape.pp == 1), (
        "of twelve steps, one dropped and one not asked for; stages begin none on a guess"
    )
    assert [size for size in first.replayed if size > 4] == [32, 16] * prompts_too
    for other in others:
        assert (other.captured, other.replayed) == (first.captured, first.replayed)


def test_samples_are_told_once_all_ranks_have_heard_of_the_step_begun_on_them(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that ends with them gives its pages to others, and a peer that writes there asks
    the rank that has them alone.
    """
    monkeypatch.setattr("mooncake.model.device.graphs._SETTLED", 1)
    made, prompt = instance(Shape(tp=2), captured=True), [5, 6, 7]
    runner = made.runner
    tokens = run(runner, plan(0, [slot(1, 0, prompt, [4])], [start(1, prompt)])).tokens[1]
    for step in (1, 2):
        made.answering.clear()
        runner.submit(plan(step, [slot(1, 2 + step, tokens[-1:], [4])]))
        if step == 2:
            assert not select.select([runner.fileno()], [], [], 0.3)[0]
        made.answering.set()
        *_, result = events_until(runner, step)
        assert isinstance(result, StepResult)
        tokens += result.tokens[1]
    decoded = [size for size in made.graphs[1].replayed if size < 16]
    assert len(decoded) == 3, "one of them is begun on a guess"


def test_a_result_is_told_once_no_rank_writes_to_pages_of_its_step(
    instance: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that ends with it gives its pages to others."""
    made, prompt, through = instance(Shape(tp=2)), [5, 6, 7], threading.Event()
    keep = ComputedStep.keep

    def late(self: ComputedStep, tokens: Any, *, handed_on: bool) -> bool:
        if tokens is None:  # of the follower
            assert through.wait(LONG_S)
        return keep(self, tokens, handed_on=handed_on)

    monkeypatch.setattr(ComputedStep, "keep", late)
    made.runner.submit(plan(0, [slot(1, 0, prompt, [4])], [start(1, prompt)]))
    told = select.select([made.runner.fileno()], [], [], 1.0)[0]
    through.set()
    assert not told
    *_, result = events_until(made.runner, 0)
    assert isinstance(result, StepResult)
    assert len(result.tokens[1]) == 1


def test_who_waits_for_guesses_waits_for_the_device_too() -> None:
    guesses, mark = Guesses(), mock.Mock()
    assert guesses.mark(lambda: mark) is None, "nothing has been guessed"
    guesses.hear()
    guesses.begin()
    behind = guesses.mark(lambda: mark)
    assert behind is not None
    with mock.patch.object(guesses, "wait_until_begun") as begun:
        behind.reached()
    begun.assert_called_once_with(1)
    mark.reached.assert_called_once_with()


def test_who_waits_for_answers_hears_of_a_rank_that_is_lost(instance: Open) -> None:
    made = instance(Shape(tp=2), captured=True)
    made.lead._num_guesses += 1
    threading.Timer(0.1, made.lead.fail, ["it is over"]).start()
    with pytest.raises(InternalError, match="it is over"):
        made.lead.wait_until_guesses_are_heard()


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_chunks_in_flight_give_the_bits_of_one_rank(
    instance: Open, source: DictSource, in_flight: int
) -> None:
    """Whatever stages before the lead's have computed ahead of it."""
    prompt, pages = random_tokens(60, seed=1), [3, 1, 7, 9]

    def first_token(runner: ModelRunner) -> tuple[StepResult, list[int]]:
        events: list[RunnerEvent] = []
        for number, begin in enumerate(range(0, 60, 15)):
            if number >= in_flight:
                events += events_until(runner, number - in_flight)
            chunk = slot(1, begin, prompt[begin : begin + 15], pages, sample=begin == 45)
            starts = [start(1, prompt, num_logprobs=3)] if number == 0 else []
            runner.submit(
                StepPlan(step_id=number, starts=starts, slots=[chunk], ended=[], report_layers=True)
            )
        events += events_until(runner, 3)
        layers: dict[int, list[int]] = {}
        for event in events:
            if isinstance(event, LayerDone):
                layers.setdefault(event.step_id, []).append(event.layer)
        assert [max(found) for found in layers.values()] == [source.spec.num_hidden_layers - 1] * 4
        results = [event for event in events if isinstance(event, StepResult)]
        assert [result.step_id for result in results] == [0, 1, 2, 3]
        return results[-1], sorted({layer for found in layers.values() for layer in found})

    model = load_model(source, dtype=torch.float32, device=CPU)
    kv = KvTensors.allocate(layout_for(source.spec), NUM_PAGES, CPU)
    alone = ModelRunner(model, kv, Sampler(source.spec.vocab_size))
    expected, layers = first_token(alone)
    alone.close()
    assert layers == list(range(source.spec.num_hidden_layers))
    made = instance(Shape(pp=2))
    found, layers = first_token(made.runner)
    assert found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs != {}, "log-probabilities too, bit by bit"
    own = made.runner._model.stage.layers
    assert set(layers) >= {own[0] - 1, *own}, "the lead knows that stages before it have ended"
    assert torch.equal(made.kv.pages[:, pages], kv.pages[:, pages])
    assert {"stage_waited_for_s_0", "stage_waited_for_s_1"} <= made.runner._counters().keys()


@pytest.mark.parametrize("words", ["tp1-pp2", "tp1-pp3", "tp2-pp2-dcp2"])
def test_stages_report_their_layers_while_those_behind_compute_nothing(
    instance: Open, words: str
) -> None:
    """Each stage in the order of its layers, of the second step before the first has ended; what
    comes of a step that has ended is not told.
    """
    made = instance(shape := Shape.parse(words))
    runner, lead = made.runner, made.lead
    made.sampler.opened.clear()
    prompt, pages = random_tokens(30, seed=1), [3, 1]
    chunks = [slot(1, 0, prompt[:15], pages, sample=False), slot(1, 15, prompt[15:], pages)]
    for number, chunk in enumerate(chunks):
        starts = [] if number else [start(1, prompt)]
        runner.submit(msgspec.structs.replace(plan(number, [chunk], starts), report_layers=True))
    last = runner._model.stage.layers
    wanted = [(step, layer) for step in (0, 1) for layer in range(last[0])]
    events: list[RunnerEvent] = []
    while len(events) < 2 * last[0]:
        assert select.select([runner.fileno()], [], [], 30)[0]
        events += runner.poll()
    told = [(each.step_id, each.layer) for each in events if isinstance(each, LayerDone)]
    assert sorted(told) == wanted
    for rank in range(shape.tp, shape.num_ranks, shape.tp):
        own = made.followers[rank - 1]._model.stage.layers
        of_stage = [each for each in told if each[1] in own]
        assert of_stage == sorted(of_stage)
        assert lead.progress_of(rank) == (2, last[0]), "what comes after it has come from it"
    assert lead.progress_of(0) == (0, 0)
    made.sampler.opened.set()
    events += events_until(runner, 1)
    told = [(each.step_id, each.layer) for each in events if isinstance(each, LayerDone)]
    ends = [(step, layer) for step in (0, 1) for layer in (last[0] - 1, *last)]
    assert told[2 * last[0] :] == ends
    runner._hear(LayerDone(step_id=1, layer=0))
    assert runner.poll() == []


def test_the_first_rank_of_a_stage_reports_and_no_step_that_stays_here(instance: Open) -> None:
    made = instance(Shape(tp=2, pp=2))
    heard: list[object] = []
    made.lead.watch(lambda: None, heard.append)
    made.run(plan(0, [slot(1, 0, [5, 6], [7], sample=False)], [start(1, [5, 6, 7])]))
    reported = msgspec.structs.replace(plan(1, [slot(1, 2, [7], [7])]), report_layers=True)
    made.run(reported)
    made.runner.check_integrity()
    first = made.followers[1]._model.stage.layers
    assert heard == [LayerDone(step_id=1, layer=layer) for layer in first]


def test_a_follower_that_holds_other_pages_ends_all_ranks(instance: Open) -> None:
    made = instance(Shape(tp=4))
    made.run(plan(0, [slot(1, 0, [5], [7])], [start(1, [5])]))
    made.runner.check_integrity()
    made.followers[1]._reader._pages[1].append(8)
    with pytest.raises(InternalError, match=r"do not meet|rank [123] of this model has ended"):
        made.runner.check_integrity()
    assert [process.killed for process in made.processes] == [1] * 3


def test_a_step_that_fails_on_the_lead_ends_all_ranks(instance: Open) -> None:
    made = instance()
    made.runner.submit(plan(0, [slot(9, 0, [1], [0])]))  # never started
    while made.lead.lost is None:
        assert select.select([made.runner.fileno()], [], [], 30)[0]
    with pytest.raises(InternalError, match=r"step 0: .*never started: all ranks of this worker"):
        made.runner.poll()
    assert [process.killed for process in made.processes] == [1]


def test_a_follower_that_goes_is_found_out_while_nothing_runs(instance: Open) -> None:
    made = instance(Shape(tp=4))
    made.links[1].shutdown(socket.SHUT_RDWR)
    assert select.select([made.runner.fileno()], [], [], 30)[0]
    with pytest.raises(InternalError, match="rank 2 of this model has ended"):
        made.runner.poll()
    assert [process.killed for process in made.processes] == [1] * 3


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (Loaded("no such tensor"), CheckpointError, "rank 1: no such tensor"),
        (None, InternalError, "rank 1 ended while it loaded its part"),
    ],
)
def test_a_follower_that_cannot_load(
    answer: Loaded | None, error: type[Exception], message: str
) -> None:
    group = SharedGroup(0, 2, mmap.mmap(-1, shared_bytes(2)), 1.0)
    ours, theirs = socket.socketpair()
    lead = Lead(group, [ours], [Process()], 1.0)
    with theirs:
        if answer is not None:
            send(theirs, msgspec.msgpack.encode(answer))
        else:
            theirs.shutdown(socket.SHUT_RDWR)
        with pytest.raises(error, match=message):
            lead.wait_until_loaded()
    lead.close()


def test_a_follower_that_falls_silent_ends_all() -> None:
    """From its first sign of life on; answers of other kinds are none."""
    group = SharedGroup(0, 2, mmap.mmap(-1, shared_bytes(2)), 1.0)
    ours, theirs = socket.socketpair()
    lost = threading.Event()
    lead = Lead(group, [ours], [Process()], 1.0, silent_s=0.2)
    lead.watch(lost.set, lambda _: None)
    with theirs:
        send(theirs, msgspec.msgpack.encode(Loaded()))
        lead.wait_until_loaded()
        assert not lost.wait(0.5)
        send(theirs, encode_answer(Alive()))
        assert lost.wait(LONG_S)
        assert lead.lost == "rank 1 of this model gave no sign of life for 0.2 s"
    lead.close()


def test_a_lead_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.model.parallel.lead.SIGN_S", 0.01)
    group = SharedGroup(0, 2, mmap.mmap(-1, shared_bytes(2)), 1.0)
    ours, theirs = socket.socketpair()
    lead = Lead(group, [ours], [Process()], 1.0)
    with theirs:
        send(theirs, msgspec.msgpack.encode(Loaded()))
        lead.wait_until_loaded()
        theirs.settimeout(30)
        for _ in range(3):
            data = receive(theirs)
            assert data is not None
            assert decode(data) == Alive()
        lead.close()


def test_a_follower_ends_where_its_lead_stands_still() -> None:
    """Whatever else the lead has said counts as a sign; before the first one it may be loading."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = heard(theirs, Guesses(), 0.2)
        send(ours, encode(Held(1, {})))
        assert next(words)[0] == Held(1, {})
        threading.Timer(0.5, send, [ours, encode(Held(1, {}))]).start()
        assert next(words)[0] == Held(1, {}), "it has given no sign yet"
        send(ours, encode(Alive()))
        send(ours, encode(Held(1, {})))
        assert next(words)[0] == Held(1, {})
        with pytest.raises(GroupError, match=r"the lead .* gave no sign of life for 0.2 s"):
            next(words)


def test_messages_keep_their_borders() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for data in (b"one", b"", bytes(100_000)):
            thread = threading.Thread(target=send, args=(ours, data))
            thread.start()
            assert receive(theirs) == data
            thread.join()
        ours.shutdown(socket.SHUT_RDWR)
        assert receive(theirs) is None
