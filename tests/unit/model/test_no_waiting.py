"""Decode steps that nobody waits in: begun ahead of their plan, and no look at the device.

No GPU is needed: tensors without numbers stand for those of one, and any number that would have to
be read from them raises.
"""

from __future__ import annotations

import itertools
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode

from mooncake.base import GenerateRequest, SamplingParams, pack_tokens
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import BY_MODEL, StepResult
from mooncake.engine.ranks.step_log import CapturedSizes
from mooncake.engine.sequence import Sequence
from mooncake.model.backends import Backends
from mooncake.model.copies import Here
from mooncake.model.device.graphs import DecodeGraphs, EagerSteps, Replay
from mooncake.model.drafts.layers import MtpRows
from mooncake.model.drafts.model_drafts import ModelDrafts
from mooncake.model.inputs import SlotRows
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.sampler import Sampler, SamplingOps
from mooncake.model.loading import load_model
from mooncake.model.running.computed_step import CapturedSteps
from mooncake.model.running.runner import ModelRunner
from tests.support.engine.fake_runner import Running, sequence_of
from tests.support.model.tiny_models import (
    CPU,
    kv_for,
    layout_for,
    random_source,
    random_tokens,
    slot,
    source_of,
    truth,
)

VOCAB = 211
NOWHERE = torch.device("meta")
"""A device whose tensors have shapes and no numbers."""
MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_p=0.9, seed=3),
    SamplingParams(top_k=5, min_p=0.01, seed=4, frequency_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(
        bad_words=[[7]], logit_bias={3: 1.0}, min_tokens=90, stop_token_ids=frozenset({5})
    ),
]


def start_of(sequence_id: int, prompt: list[int], sampling: SamplingParams) -> Running:
    return sequence_of(sequence_id, sampling, prompt)


# ---------------------------------------------------------------- nothing is read


class NoWaiting(TorchDispatchMode):
    """Refuses every copy between host and device that is not one of `FakeCopies`."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.ops += 1
        out = func(*args, **(kwargs or {}))
        moved = [*args, *(kwargs or {}).values()]
        devices = {x.device.type for x in moved if isinstance(x, torch.Tensor) and x.dim()}
        if isinstance(out, torch.Tensor) and devices:
            assert {out.device.type} == devices, f"{func} copies between host and device"
        return out


class FakeCopies:
    """Copies of a device that is not there; both directions pass the watch."""

    def __init__(self) -> None:
        self.num_fetched = 0

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return torch.empty(values.shape, dtype=values.dtype, device=NOWHERE)

    def fetch(self, values: torch.Tensor) -> Here:
        self.num_fetched += 1
        return Here(torch.zeros(values.shape, dtype=values.dtype))

    def mark(self) -> None:
        """Nobody transfers pages here."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are launched and nothing runs: results are tensors without numbers anyway."""
    names: list[str] = []
    function = "triton.runtime.interpreter.InterpretedFunction.run"
    monkeypatch.setattr(function, lambda self, *a, **k: names.append(self.fn.__name__))
    return names


def test_a_decode_step_reads_nothing(launches: list[str]) -> None:
    copies, source = FakeCopies(), source_of(truth("yarn", num_hidden_layers=2))
    model = load_model(
        source, dtype=torch.bfloat16, device=NOWHERE, backends=Backends("triton", "triton")
    )
    kv = KvTensors.allocate(layout_for(model.spec), 8, NOWHERE)
    graphs = DecodeGraphs(model, kv, EagerSteps(), most_sequences=4, most_pages=3, copies=copies)
    sampler = Sampler(
        VOCAB, copies=copies, ops=SamplingOps(draw=kernel("draw", "triton"), waits=False)
    )
    for number, sampling in enumerate(MIXED):
        sampler.start(start_of(number, [1, 2], sampling))
    launches.clear()
    with NoWaiting() as watch, torch.inference_mode():
        for step in range(10):
            now = [slot(n, 17 + step, [0 if step else 3], [n, n + 4]) for n in range(4)]
            logits = graphs.logits(now)
            assert graphs.settled(now) == (step >= 8)
            begin_next = partial(graphs.run_ahead, now) if step >= 8 else None
            graphs.confirm(sampler.sample(logits, [0, 1, 2, 3], begin_next)[0])
    assert watch.ops > 500
    assert copies.num_fetched == 10
    assert {"_schedule", "_attend", "_draw", "down_kernel"} <= set(launches)
    assert launches.count("_draw") == 10
    assert launches.count("_attend") == 2 * 11, "ten steps, and one begun for a plan not made"


def test_the_watch_sees_what_waits() -> None:
    there = torch.empty(3, device=NOWHERE)
    for wait in (there.tolist, there.sum().item, there.nonzero, there.cpu, lambda: bool(there[0])):
        with NoWaiting(), pytest.raises((RuntimeError, NotImplementedError)):
            wait()
    with NoWaiting(), pytest.raises(AssertionError, match="copies between"):
        torch.zeros(3).to(NOWHERE)


# ---------------------------------------------------------------- ahead of the plan


class Recorder:
    """One output tensor a graph, as CUDA graphs have it: a replay overwrites what was in it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        out = step().clone()

        def replay() -> torch.Tensor:
            self._log.append("replay")
            return out.copy_(step())

        return replay


class LateCopies:
    """Brings what was there at the time of `fetch`, and says when somebody waits for it."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def send(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def fetch(self, values: torch.Tensor) -> Late:
        self._log.append("fetch")
        return Late(values.clone(), self._log)

    def mark(self) -> None:
        """Nobody transfers pages here."""


class Late:
    def __init__(self, values: torch.Tensor, log: list[str]) -> None:
        self._values = values
        self._log = log

    def wait(self) -> torch.Tensor:
        self._log.append("wait")
        return self._values


class Bench:
    """An engine and a runner over one model; logs what the runner does."""

    def __init__(self, model: KimiK2, *, captured: bool) -> None:
        self.log: list[str] = []
        kv, copies = kv_for(model.spec, 40), LateCopies(self.log)
        with torch.inference_mode():
            decoder = DecodeGraphs(
                model, kv, Recorder(self.log), most_sequences=4, most_pages=8, copies=copies
            )
        self.runner = ModelRunner(
            model, kv, Sampler(VOCAB, copies=copies), num_threads=1,
            captured=CapturedSteps(decoder) if captured else None, copies=copies,
        )  # fmt: skip
        config = EngineConfig(
            num_blocks=40, max_num_seqs=4, max_batched_tokens=64, max_chunk_tokens=64,
            max_model_len=120, max_waiting=9, block_tokens=16,
        )  # fmt: skip
        self.engine = Engine(config, "layout", self.runner)

    def run(self, joins: dict[int, list[tuple[int, SamplingParams]]]) -> dict[int, list[int]]:
        """Return each sequence's tokens; `joins`: by the step before which they come."""
        made: dict[int, Sequence] = {}
        step = 0
        while step in joins or not self.engine.idle or step < max(joins):
            for number, sampling in joins.get(step, []):
                request = GenerateRequest(
                    request_id=str(number), sampling=sampling,
                    prompt=pack_tokens(random_tokens(5 + number, seed=number)),
                )  # fmt: skip
                made[number] = Sequence(sequence_id=number, request=request)
                assert self.engine.add(made[number], 0.0)
            self.engine.tick(0.0)
            assert select.select([self.runner.fileno()], [], [], 60)[0], "the runner is silent"
            for event in self.runner.poll():
                assert isinstance(event, StepResult)
                assert event.error is None
                for sequence, output in self.engine.on_step(event, 0.0):
                    if output.finish is not None:
                        self.engine.release(sequence)
            step += 1
        return {number: list(sequence.output_tokens) for number, sequence in made.items()}


@pytest.fixture(scope="module")
def model() -> KimiK2:
    return load_model(source_of(truth("plain")), dtype=torch.float32, device=CPU)


@contextmanager
def bench(model: KimiK2, *, captured: bool) -> Iterator[Bench]:
    made = Bench(model, captured=captured)
    try:
        yield made
    finally:
        made.runner.close()


def test_tokens_are_those_of_steps_in_turn(model: KimiK2, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences join and end while steps run ahead; some ask for what forbids that."""
    monkeypatch.setattr("mooncake.model.device.graphs._SETTLED", 1)
    joins = {
        0: [(n, replace(MIXED[n], max_tokens=most)) for n, most in enumerate((9, 30, 40))],
        12: [(3, replace(MIXED[3], max_tokens=25))],
        20: [(4, SamplingParams(num_logprobs=2, temperature=0, max_tokens=6))],
    }
    with bench(model, captured=False) as plain:
        wanted = plain.run(joins)
    with bench(model, captured=True) as ahead:
        assert ahead.run(joins) == wanted
    assert [len(tokens) for tokens in wanted.values()] == [9, 30, 40, 25, 6]
    begun = sum(a == "fetch" and b == "replay" for a, b in itertools.pairwise(ahead.log))
    assert begun > 15


def test_the_next_step_begins_before_this_ones_tokens_are_read(model: KimiK2) -> None:
    with bench(model, captured=True) as alone:
        alone.run({0: [(0, SamplingParams(temperature=0, max_tokens=40))]})
    log = alone.log
    settled = log[-3 * 8 :]  # 5 + 40 tokens: the last page begins with token 32
    assert settled == ["fetch", "replay", "wait"] * 8
    # A step each, but for the last: its guess is of a sequence that has ended.
    assert log.count("fetch") == 40
    assert log.count("replay") == 39 + 1


def test_a_guess_that_is_not_confirmed_is_dropped(
    model: KimiK2, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mooncake.model.device.graphs._SETTLED", 0)
    log: list[str] = []
    kv = kv_for(model.spec)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, kv, Recorder(log), most_sequences=2, most_pages=2)
        first = slot(1, 0, [5], [3])
        wanted = graphs.logits([first]).clone()
        for spoil in (None, [8], [9]):
            log.clear()
            graphs.logits([first])
            assert graphs.settled([first])
            graphs.run_ahead([first], torch.tensor([9]))
            if spoil is not None:
                graphs.confirm(spoil)
            after = graphs.logits([slot(1, 1, [9], [3])]).clone()
            assert log == ["replay"] * (2 if spoil == [9] else 3)
            if spoil is None:
                wanted_after = after
            torch.testing.assert_close(after, wanted_after, atol=0, rtol=0)
        log.clear()
        graphs.logits([first])
        graphs.run_ahead([first], torch.tensor([9]))
        graphs.confirm([9])
        graphs.interrupt()
        torch.testing.assert_close(graphs.logits([first]), wanted, atol=0, rtol=0)
        assert not graphs.settled([slot(1, 31, [5], [3, 4])]), "no page"


def test_drafts_are_read_once_for_all_of_a_step(model: KimiK2) -> None:
    """Each is made from the one before it while that is on the device."""
    log: list[str] = []
    source = random_source(model.spec, seed=6, with_mtp=True)
    drafting = load_model(source, dtype=torch.float32, device=CPU, with_mtp=True)
    kv = KvTensors.allocate(layout_for(model.spec, with_mtp=True), 4, CPU)
    copies = LateCopies(log)
    with torch.inference_mode():
        layer = MtpRows(drafting, kv, copies)
        layer.capture(Recorder(log), CapturedSizes(2, 2, most_drafts=3))
        drafts = ModelDrafts(layer, copies)
        asked = [slot(n, 0, [5 + n], [n, n + 2]) for n in range(2)]
        every = torch.zeros(2, model.spec.hidden_size)
        rows = [SlotRows(each, n, 1) for n, each in enumerate(asked)]
        drafts.keep(rows, every, {0: [3], 1: [4]}, handed_on=False)
        log.clear()
        made = drafts.make(
            [slot(n, 1, [3 + n], [n, n + 2], drafts=[BY_MODEL] * (3 - n)) for n in range(2)]
        )
    assert [len(each.drafts) for each in made] == [3, 2]
    assert log == ["replay"] * 3 + ["fetch", "wait"]
