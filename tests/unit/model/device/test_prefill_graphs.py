"""Replayed steps with prompts against steps run as they come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mooncake.base import SamplingParams
from mooncake.base.kv_layout import Home
from mooncake.engine.plan import LayerDone, StepPlan, StepResult, StepSlot
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.model.backends import Backends
from mooncake.model.device.graphs import EagerSteps
from mooncake.model.device.prefill_graphs import MORE_FLOPS, PrefillGraphs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.mla import flops_of_forms
from mooncake.model.layers.sampler import Sampler
from mooncake.model.loading import load_model
from mooncake.model.running.computed_step import ForwardPass, capture_steps
from mooncake.model.running.runner import ModelRunner
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.recorder import Recorder
from tests.support.model.tiny_models import (
    CPU,
    kv_for,
    random_tokens,
    slot,
    source_of,
    truth,
)
from tests.unit.model.device.test_timeline import events

INTERPRETED = pytest.param("triton", marks=pytest.mark.slow)
"""Triton's interpreter takes half a minute for what a GPU does at once."""
NONE = frozenset[int]()


@pytest.fixture(scope="module", params=["reference", INTERPRETED])
def model(request: pytest.FixtureRequest) -> KimiK2:
    source = source_of(truth("yarn", num_hidden_layers=2))
    backends = Backends(request.param, "triton" if request.param == "triton" else "auto")
    return load_model(source, dtype=torch.float32, device=CPU, backends=backends)


def captured(model: KimiK2, kv: KvTensors, port: Recorder | EagerSteps) -> PrefillGraphs:
    with torch.inference_mode():
        return PrefillGraphs(model, kv, port, most_tokens=40, most_sequences=4, most_pages=6)


def passed(
    forward: ForwardPass, slots: Sequence[StepSlot], whole: frozenset[int] = NONE
) -> list[tuple[int, torch.Tensor]]:
    """Return the sequences whose states are read, and these, as the pass orders them."""
    with torch.inference_mode():
        inputs, states = forward(slots, whole)
    return [
        (rows.slot.sequence_id, states[rows.first : rows.first + rows.num_rows].clone())
        for rows in inputs.output_rows
    ]


def compare(found: list[tuple[int, torch.Tensor]], wanted: list[tuple[int, torch.Tensor]]) -> None:
    for (sequence, states), (of, expected) in zip(
        sorted(found, key=lambda each: each[0]), sorted(wanted, key=lambda each: each[0]),
        strict=True,
    ):  # fmt: skip
        assert sequence == of
        torch.testing.assert_close(states, expected, atol=2e-4, rtol=0)


def test_replays_give_what_steps_do_and_touch_no_other_page(model: KimiK2) -> None:
    """Whole prompts, chunks behind a context, one that is not read, and decoding ones beside them:
    each mix in the same graph, whatever was in it before.
    """
    recorder, kv, other = Recorder(), kv_for(model.spec), kv_for(model.spec)
    graphs = captured(model, kv, recorder)
    assert recorder.captured == [40, 32, 16]
    assert not kv.pages.any(), "capturing wrote KV"
    replayed, eager = ForwardPass(model, kv, graphs), ForwardPass(model, other)
    prompts = {n: random_tokens(60, seed=n) for n in range(1, 5)}
    tables = {1: [9, 3, 7, 12], 2: [0, 1, 2, 4], 3: [11, 5, 6, 8], 4: [10, 13, 14, 15]}

    def part(number: int, start: int, stop: int, *, sample: bool = True) -> StepSlot:
        pages = tables[number][: -(-stop // 16)]
        return slot(number, start, prompts[number][start:stop], pages, sample=sample)

    steps: list[tuple[list[StepSlot], frozenset[int]]] = [
        ([part(1, 0, 3)], NONE),
        ([part(2, 0, 30, sample=False), part(1, 3, 4), part(3, 0, 9)], NONE),
        ([part(3, 9, 10), part(2, 30, 37), part(1, 4, 5), part(4, 0, 16)], frozenset([4])),
        ([part(3, 10, 11), part(2, 37, 38)], NONE),
        ([part(4, 16, 56)], NONE),
    ]
    for slots, whole in steps:
        compare(passed(replayed, slots, whole), passed(eager, slots, whole))
        torch.testing.assert_close(kv.pages, other.pages, atol=1e-4, rtol=0)
    assert recorder.replayed == [16, 40, 32, 16, 40]


def test_what_is_not_replayed() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    graphs = captured(model, kv_for(model.spec), EagerSteps())
    assert graphs.takes([slot(1, 0, [5] * 40, [0, 1, 2])])
    assert not graphs.takes([])
    assert not graphs.takes([slot(1, 0, [5] * 41, [0, 1, 2])]), "too many rows"
    assert not graphs.takes([slot(n, 0, [5], [n]) for n in range(5)]), "too many sequences"
    assert not graphs.takes([slot(1, 0, [5], list(range(7)))]), "too many pages"
    shared = KvTensors.allocate(kv_for(model.spec).layout, 8, CPU, Home(0, 2))
    with pytest.raises(AssertionError, match="prompts are gathered"):
        captured(model, shared, EagerSteps())


def test_long_contexts_are_left_to_the_cheaper_form(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    graphs = captured(model, kv_for(model.spec), EagerSteps())
    two = [slot(1, 20, [5] * 20, [0, 1, 2]), slot(2, 0, [5] * 20, [3, 4])]
    heads = model.spec.num_attention_heads * model.spec.num_hidden_layers
    forms = flops_of_forms(model.spec)
    more = heads * sum(max(0.0, a - e) for a, e in (forms(20, 40), forms(20, 20)))
    assert 0 < more < MORE_FLOPS
    monkeypatch.setattr("mooncake.model.device.prefill_graphs.MORE_FLOPS", more)
    assert graphs.takes(two)
    monkeypatch.setattr("mooncake.model.device.prefill_graphs.MORE_FLOPS", more - 1)
    assert not graphs.takes(two)


def test_kimi_k2_replays_short_prompts_and_no_chunks_of_long_ones() -> None:
    """On one of eight ranks, by the bound of FLOPs alone."""
    from tests.support.kernels.step_launches import model_of

    model = model_of("int4", 2, 1)
    forms, heads = flops_of_forms(model.spec), 8 * 61
    more = {
        (new, context): heads * (forms(new, context)[0] - forms(new, context)[1])
        for new, context in ((256, 256), (256, 4096), (256, 131072), (64, 131072))
    }
    assert [each <= MORE_FLOPS for each in more.values()] == [True, True, False, True]


def test_the_runner_samples_the_same_and_reports_all_layers_at_once() -> None:
    model = load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)
    prompts = {1: random_tokens(20, 1), 2: [210, 4, 5]}
    found, layers = [], []
    for sizes in (None, CapturedSizes(4, 6, 40)):
        kv, recorder = kv_for(model.spec), Recorder()
        steps = None if sizes is None else capture_steps(model, kv, recorder, sizes, None)
        runner = ModelRunner(model, kv, Sampler(211), num_threads=1, captured=steps)
        starts = [
            sequence_of(number, SamplingParams(temperature=0), tokens)
            for number, tokens in prompts.items()
        ]  # fmt: skip
        slots = [slot(1, 0, prompts[1], [0, 1]), slot(2, 0, prompts[2], [2])]
        try:
            runner.submit(
                StepPlan(step_id=1, starts=starts, ended=[], slots=slots, report_layers=True)
            )
            told = []
            while not told or not isinstance(told[-1], StepResult):
                told += events(runner, 1)
        finally:
            runner.close()
        *before, result = told
        assert isinstance(result, StepResult)
        assert result.error is None
        found.append(result.tokens)
        layers.append(before)
        assert recorder.replayed == ([] if sizes is None else [32])
    assert found[0] == found[1]
    assert layers[0] == [LayerDone(step_id=1, layer=layer) for layer in range(3)]
    assert layers[1] == layers[0][-1:], "which says it of all before"
