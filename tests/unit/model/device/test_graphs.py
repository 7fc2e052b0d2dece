"""Replayed decode steps against steps run as they come; the memory a GPU has left."""

from __future__ import annotations

import itertools
import select
from collections.abc import Sequence

import msgspec
import pytest
import torch

from mooncake.base import ConfigError, Failure, KvLayout, PageArray, SamplingParams
from mooncake.engine.plan import StepPlan, StepResult, StepSlot
from mooncake.model.backends import Backends
from mooncake.model.device.graphs import DecodeGraphs, EagerSteps, ladder
from mooncake.model.inputs import build_inputs
from mooncake.model.kimi_k2 import KimiK2, ReadStates
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.memory import GpuMemory, pages_that_fit
from mooncake.model.running.computed_step import CapturedSteps
from mooncake.model.running.runner import ModelRunner
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.ranks import ThreadRanks
from tests.support.model.recorder import Recorder
from tests.support.model.tiny_models import (
    CPU,
    forward,
    kv_for,
    random_tokens,
    slot,
    source_of,
    truth,
)


class PickySampler(Sampler):
    """Takes sequence 2 for one whose grammar cannot be followed."""

    def broken(self, sequence_ids: Sequence[int]) -> dict[int, Failure]:
        return {s: Failure.invalid("it is broken") for s in sequence_ids if s == 2}


INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)
"""Triton's interpreter takes ten seconds for what a GPU does at once."""


@pytest.fixture(scope="module", params=["reference", INTERPRETED])
def model(request: pytest.FixtureRequest) -> KimiK2:
    source = source_of(truth("yarn", num_hidden_layers=2))
    backends = Backends(request.param, "triton" if request.param == "triton" else "auto")
    return load_model(source, dtype=torch.float32, device=CPU, backends=backends)


def test_replays_give_what_steps_do_and_touch_no_other_page(model: KimiK2) -> None:
    recorder = Recorder()
    kv, other = kv_for(model.spec), kv_for(model.spec)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, kv, recorder, most_sequences=5, most_pages=6)
    assert recorder.captured == [5, 4, 2, 1]
    assert not kv.pages.any(), "capturing wrote KV"
    tables = {1: [9, 3, 7], 2: [0], 3: [11, 5]}
    prompts = {1: random_tokens(34, 1), 2: random_tokens(3, 2), 3: random_tokens(16, 3)}
    forward(model, kv, [slot(s, 0, prompts[s], tables[s]) for s in tables])
    other.pages.copy_(kv.pages)
    # Sequences join and leave, tables grow: what is left in unused rows must not be seen.
    for position, running in enumerate(([1, 2, 3], [3, 1], [3, 1, 2], [2])):
        slots = [slot(s, len(prompts[s]), [10 * position + s], tables[s]) for s in running]
        for s in running:
            prompts[s] = [*prompts[s], 0]
        assert graphs.takes(slots)
        with torch.inference_mode():
            found = graphs.logits(slots).clone()
        wanted = forward(model, other, slots)
        torch.testing.assert_close(
            found, torch.cat([wanted[s] for s in running]), atol=2e-4, rtol=0
        )
        torch.testing.assert_close(kv.pages, other.pages, atol=1e-4, rtol=0)
    assert recorder.replayed == [4, 2, 4, 1]


def test_drafts_are_rows_of_replays_whose_states_are_read(model: KimiK2) -> None:
    """Some sequences have drafts, and others none; what an earlier step has left is not seen."""
    reads = (0, 1, model.spec.num_hidden_layers)
    recorder, kv, other = Recorder(), kv_for(model.spec), kv_for(model.spec)
    with torch.inference_mode():
        graphs = DecodeGraphs(
            model, kv, recorder, most_sequences=3, most_pages=6, most_drafts=3, reads=reads
        )
    assert recorder.captured == [12, 8, 4, 2, 1]
    tables = {1: [9, 3, 7], 2: [0], 3: [11, 5]}
    at = {1: 34, 2: 3, 3: 14}
    forward(model, kv, [slot(s, 0, random_tokens(at[s], s), tables[s]) for s in tables])
    other.pages.copy_(kv.pages)
    for drafts in ({1: 2, 2: 0, 3: 3}, {3: 0, 1: 0}, {2: 3}, {1: 0, 3: 1, 2: 3}):
        slots = [
            slot(s, at[s], [10 + s], tables[s], drafts=[7 * s + n for n in range(num)])
            for s, num in drafts.items()
        ]
        for s, num in drafts.items():
            at[s] += 1 + num // 2
        assert graphs.takes(slots)
        every, read = frozenset(drafts), ReadStates(reads)
        with torch.inference_mode():
            found = graphs.logits(slots).clone()
            rows, states = graphs.read_rows(slots)
            inputs = build_inputs(slots, every, other.page_shape, lambda *_: True)
            logits = model.logits(model.forward(inputs, other, read=read))
        places = {each.slot.sequence_id: each for each in inputs.input_rows}
        for mine in rows:
            wanted = places[mine.slot.sequence_id]
            here, there = (slice(e.first, e.first + e.num_rows) for e in (mine, wanted))
            torch.testing.assert_close(found[here], logits[there], atol=2e-4, rtol=0)
            torch.testing.assert_close(states[here], read.rows[there], atol=1e-4, rtol=0)
        torch.testing.assert_close(kv.pages, other.pages, atol=1e-4, rtol=0)
    assert recorder.replayed == [8, 2, 4, 8]
    assert not graphs.takes([slot(1, 3, [5], [0], drafts=[1, 2, 3, 4])]), "more than captured"


def test_all_sizes_share_one_tensor_of_logits() -> None:
    """Each captured size keeps its outputs: 8 GB at 1,024 sequences of Kimi-K2."""
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        graphs = DecodeGraphs(
            model, kv_for(model.spec), EagerSteps(), most_sequences=4, most_pages=2
        )
        found = [graphs.logits([slot(n, 3, [n], [n]) for n in range(rows)]) for rows in (1, 3, 4)]
    assert [each.shape[0] for each in found] == [1, 3, 4]
    assert len({each.untyped_storage().data_ptr() for each in found}) == 1


def test_what_cannot_be_replayed() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        graphs = DecodeGraphs(
            model, kv_for(model.spec), EagerSteps(), most_sequences=2, most_pages=2
        )
    one = slot(1, 3, [5], [0])
    assert graphs.takes([one])
    assert not graphs.takes([])
    assert not graphs.takes([one, slot(2, 0, [5, 6], [1])])
    assert not graphs.takes([slot(1, 40, [5], [0, 1, 2])])
    assert not graphs.takes([slot(n, 0, [5], [n]) for n in range(3)])
    with pytest.raises(ValueError, match="sequence 1: 17 tokens need 2 pages, the table has 1"):
        graphs.logits([slot(1, 16, [5], [0])])


def test_the_runner_samples_from_replays() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    prompts = {1: random_tokens(20, 1), 2: [210, 4, 5], 3: random_tokens(6, 3)}
    tables = {1: [0, 1], 2: [2], 3: [3]}
    results = []
    for captured in (False, True):
        recorder, kv = Recorder(), kv_for(model.spec)
        with torch.inference_mode():
            decoder = DecodeGraphs(model, kv, recorder, most_sequences=4, most_pages=3)
        runner = ModelRunner(
            model, kv, PickySampler(211), num_threads=1,
            captured=CapturedSteps(decoder) if captured else None,
        )  # fmt: skip
        try:
            results.append(run(runner, prompts, tables))
        finally:
            runner.close()
        assert recorder.replayed == ([4] if captured else [])
    assert results[0] == results[1]
    last = results[0][-1]
    assert last.tokens.keys() == {1}
    assert last.failures == {2: Failure.invalid("it is broken")}


def run(
    runner: ModelRunner, prompts: dict[int, list[int]], tables: dict[int, list[int]]
) -> list[StepResult]:
    """Return the results of a prompt step and a decode step in which sequence 3 does not sample."""
    starts = [sequence_of(s, SamplingParams(temperature=0), prompts[s]) for s in prompts]
    first = StepPlan(
        step_id=1, starts=starts, ended=[],
        slots=[slot(s, 0, prompts[s][:-1], tables[s], sample=False) for s in prompts],
    )  # fmt: skip
    second = StepPlan(
        step_id=2, starts=[], ended=[],
        slots=[
            slot(s, len(prompts[s]) - 1, prompts[s][-1:], tables[s], sample=s != 3)
            for s in prompts
        ],
    )  # fmt: skip
    found = []
    for plan in (first, second):
        runner.submit(plan)
        assert select.select([runner.fileno()], [], [], 60)[0], "the runner is silent"
        (result,) = runner.poll()
        assert isinstance(result, StepResult)
        assert result.error is None
        found.append(msgspec.structs.replace(result, seconds=0.0))
    return found


def test_the_ladder_ends_with_the_most_and_wastes_little() -> None:
    assert ladder(1) == (1,)
    assert ladder(20) == (1, 2, 4, 8, 16, 20)
    sizes = ladder(512)
    assert sizes[-1] == 512
    assert len(sizes) < 50
    assert all(b - a <= max(8, a / 8) for a, b in itertools.pairwise(sizes))


def test_pages_fill_what_weights_and_steps_leave() -> None:
    gib = 2**30
    memory = GpuMemory(total_bytes=100 * gib, resident_bytes=60 * gib, step_bytes=5 * gib)
    pages = pages_that_fit([memory], utilization=0.9, page_bytes=[gib], least_pages=20)
    assert pages == 20
    with pytest.raises(ConfigError, match=r"room for 20 KV pages .* takes 21"):
        pages_that_fit([memory], utilization=0.9, page_bytes=[gib], least_pages=21)
    less = GpuMemory(total_bytes=100 * gib, resident_bytes=63 * gib, step_bytes=5 * gib)
    ranks = [memory, less, memory]
    alike = [gib] * 3
    assert pages_that_fit(ranks, utilization=0.9, page_bytes=alike, least_pages=17) == 17
    with pytest.raises(ConfigError, match=r"leaves on rank 1 room for 17 KV pages .* takes 18"):
        pages_that_fit(ranks, utilization=0.9, page_bytes=alike, least_pages=18)
    of_stages = [gib, gib // 2, gib]
    assert pages_that_fit(ranks, utilization=0.9, page_bytes=of_stages, least_pages=20) == 20


@pytest.mark.parametrize("backend", ["reference", INTERPRETED])
def test_fp8_pages_give_nearly_the_same_logits(backend: str) -> None:
    source = source_of(truth("yarn", num_hidden_layers=2))
    model = load_model(source, dtype=torch.float32, device=CPU, backends=Backends(backend))
    exact, found = [], []
    tokens = random_tokens(40, seed=5)
    for dtype, logits in (("float32", exact), ("float8_e4m3fn", found)):
        layout = KvLayout.for_model(
            model.spec, block_tokens=16, dtype=dtype, weights_revision="test"
        )
        buffer = memoryview(bytearray(6 * layout.block_bytes))
        kv = KvTensors.view(PageArray(layout, 6), buffer)
        forward(model, kv, [slot(1, 0, tokens[:34], [4, 2, 5])])
        for absorbed in (True, False):
            after = [slot(1, 34, tokens[34:], [4, 2, 5])]
            rule = {True: lambda n, c: True, False: lambda n, c: False}[absorbed]
            logits.append(forward(model, kv, after, rule=rule)[1])
        assert any(buffer)
    keys = {
        KvLayout.for_model(
            model.spec, block_tokens=16, dtype=dtype, weights_revision="test"
        ).fingerprint
        for dtype in ("float32", "float8_e4m3fn")
    }
    assert len(keys) == 2, "blocks of another dtype must have other keys"
    error = float((torch.cat(found) - torch.cat(exact)).norm() / torch.cat(exact).norm())
    assert 1e-3 < error < 0.3
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=0)


def test_numbers_too_large_for_fp8_pages_are_cut_off() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    layout = KvLayout.for_model(
        model.spec, block_tokens=16, dtype="float8_e4m3fn", weights_revision="test"
    )
    kv = KvTensors.allocate(layout, 2, CPU)
    kv.write(1, torch.tensor([17]), torch.full((1, layout.kv_width), 1e4))
    assert kv.layers[1][1, 1].float().unique().tolist() == [448.0]


@pytest.mark.parametrize(
    ("num_ranks", "num_homes", "whole_experts"),
    [(2, 1, False), (2, 2, False), (4, 2, False), (2, 1, True), (4, 2, True)],
)
def test_replays_of_ranks_give_what_steps_of_one_do(
    num_ranks: int, num_homes: int, whole_experts: bool
) -> None:
    """Exchanges are part of what is captured: by all ranks alike, padding rows included."""
    source = source_of(truth("yarn", vocab_size=212, num_hidden_layers=2))
    one = load_model(source, dtype=torch.float32, device=CPU)
    kv = kv_for(one.spec)
    ranks = ThreadRanks(
        lambda _: source, num_ranks, num_homes=num_homes, whole_experts=whole_experts
    )
    tables = {1: [9, 43, 7], 2: [50], 3: [11, 35]}  # of both homes, of one, of both
    prompts = {number: random_tokens(count, number) for number, count in ((1, 40), (2, 3), (3, 15))}
    begin = [slot(number, 0, prompts[number], tables[number]) for number in tables]
    forward(one, kv, begin)
    ranks.forward(begin)

    def capture(rank: int) -> DecodeGraphs:
        with torch.inference_mode():
            return DecodeGraphs(
                ranks.models[rank], ranks.kv[rank], Recorder(), most_sequences=5, most_pages=6,
                most_drafts=2,
            )  # fmt: skip

    graphs = ranks.on_all(capture)
    for step in range(3):  # sequence 3 goes on into its second page
        slots = [
            slot(
                number, len(prompts[number]) + step, [50 + 10 * number + step], tables[number],
                drafts=[8, 9][: number * step % 3],
            )
            for number in tables
        ]  # fmt: skip
        found_by_one = forward(one, kv, slots)
        wanted = torch.cat([found_by_one[number] for number in tables])

        def replay(rank: int, slots: list[StepSlot] = slots) -> torch.Tensor:
            with torch.inference_mode():
                return graphs[rank].logits(slots).clone()

        for found in ranks.on_all(replay):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    whole = torch.cat([held.pages for held in ranks.kv[:num_homes]], dim=1)
    torch.testing.assert_close(whole, kv.pages, atol=1e-4, rtol=1e-4)
    for rank, held in enumerate(ranks.kv):
        assert torch.equal(held.pages, ranks.kv[rank % num_homes].pages)


def test_rows_of_replays_are_counted_and_those_of_captures_are_not() -> None:
    """What ranks that share experts do between two steps is no part of what is captured."""
    source = source_of(truth("yarn", vocab_size=212, num_hidden_layers=2))
    ranks = ThreadRanks(lambda _: source, 2, whole_experts=True)

    def run(rank: int) -> list[list[int]]:
        model = ranks.models[rank]
        with torch.inference_mode():
            graphs = DecodeGraphs(model, ranks.kv[rank], Recorder(), most_sequences=4, most_pages=2)
            for step in range(2):
                graphs.logits([slot(1, step, [5], [3]), slot(2, step, [6], [4])])
        return [layer.counts.tolist() for layer in model.expert_slots]

    first, second = ranks.on_all(run)
    assert first == second
    assert first
    assert [sum(each) for each in first] == [2 * 2 * source.spec.num_experts_per_tok] * len(first)
