"""Every wait of the code that serves on a GPU is needed: each is taken out in turn, and something
here fails for it.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mooncake.base import KvLayout, PageArray, SamplingParams
from mooncake.engine.plan import StepPlan
from mooncake.model import copies, placing, rank_device
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.copies import LayerReports
from mooncake.model.device import cuda, cuda_memory
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from mooncake.model.running import runner
from tests.device.served import BLOCK_TOKENS, CONFIG, Joins, prompt, served
from tests.support.cuda.install import emulated
from tests.support.cuda.mutants import Wait, waits_of, without
from tests.support.cuda.ops import reference_ops
from tests.support.cuda.streams import ORDERS
from tests.support.engine.fake_runner import sequence_of
from tests.support.model.tiny_models import slot
from tests.support.waiting import LONG_S

JOINS: Joins = {
    0: [
        (prompt(5, 0), SamplingParams(temperature=0, max_tokens=16)),
        (prompt(23, 1), SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=18)),
    ]
}
PAGE = 2


class Pages:
    """Pages of a device as a transfer engine has them, and pinned memory of the host for one."""

    def __init__(self, path: Path) -> None:
        layout = KvLayout.for_model(
            Checkpoint.open(path).spec, block_tokens=BLOCK_TOKENS, dtype="float32",
            weights_revision="none",
        )  # fmt: skip
        options = ModelOptions(
            device="cuda", attention_backend="reference", moe_backend="reference"
        )
        self.device = RankDevice(options, torch.float32)
        self.memory = self.device.pages(PageArray(layout, 4))
        self.page = self.memory.kv.pages[:, PAGE]
        size = layout.slice_bytes
        self.ranges = [((n * 4 + PAGE) * size, size) for n in range(layout.num_layers)]
        self.host = torch.zeros(layout.block_bytes // 4)
        self._buffer = memoryview(self.host.numpy()).cast("B")
        self.memory.pin(self._buffer)

    def copy_out(self, done: Callable[[str | None], None]) -> None:
        self.memory.copy_out(self.ranges, self._buffer, done)

    def copy_in(self, done: Callable[[str | None], None]) -> None:
        self.memory.copy_in(self.ranges, self._buffer, done)


class Ended:
    """Hears that something has ended, and that it went well."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._error: str | None = None

    def __call__(self, error: str | None = None) -> None:
        self._error = error
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(LONG_S), "nobody says that it has ended"
        assert self._error is None, self._error


def captured_steps(path: Path, wanted: dict[int, list[int]]) -> None:
    """Weights are placed, steps captured and replayed, some of them ahead of their plan."""
    with reference_ops(), served(path, "cuda", "auto", measure_pages=True) as engine:
        layout = engine.pages.kv.layout
        assert engine.source.num_pages(layout, CONFIG) > CONFIG.num_blocks
        assert engine.run(JOINS) == wanted


def new_pages(path: Path, _: object) -> None:
    """What comes to pages from elsewhere as soon as there are any stays there."""
    pages, ended = Pages(path), Ended()
    pages.host.fill_(1.0)
    pages.copy_in(ended)
    ended.wait()
    assert bool((pages.page == 1.0).all())


def a_layer_that_is_reported(path: Path, _: object) -> None:
    """A layer's pages are read by who hears of the layer."""
    pages, ended = Pages(path), Ended()
    pages.page.fill_(3.0)
    reports: LayerReports[int] = LayerReports(lambda _: pages.copy_out(ended))
    reports.add(0, pages.device.page_device.copies.mark())
    reports.drain()
    ended.wait()
    reports.close()
    assert bool((pages.host == 3.0).all())


def pages_behind_a_wrong_guess(path: Path, _: object) -> None:
    """What comes to pages of an ended sequence stays there, though a guess wrote to them."""
    pages, settled, ended = Pages(path), Ended(), Ended()
    pages.host.fill_(1.0)
    pages.page.fill_(5.0)
    mark = pages.device.page_device.copies.mark()
    pages.memory.last_guess = lambda: mark
    pages.memory.settle(settled)
    settled.wait()
    pages.copy_in(ended)
    ended.wait()
    assert bool((pages.page == 1.0).all())


def a_step_that_samples_nothing(path: Path, _: object) -> None:
    """Pages of a step are read as soon as its result is there."""
    with served(path, "cuda") as engine:
        start = sequence_of(1, SamplingParams(), prompt(20, 3))
        slots = [slot(1, 0, prompt(16, 3), [PAGE], sample=False)]
        plan = StepPlan(step_id=0, starts=[start], slots=slots, ended=[], report_layers=False)
        engine.runner.submit(plan)
        assert select.select([engine.runner.fileno()], [], [], 60)[0], "the runner is silent"
        engine.runner.poll()
        size, ended = engine.pages.kv.layout.block_bytes, Ended()
        host = bytearray(size)
        engine.pages.pin(memoryview(host))
        each = size // 3
        ranges = [((layer * 40 + PAGE) * each, each) for layer in range(3)]
        engine.pages.copy_out(ranges, memoryview(host), ended)
        ended.wait()
        there = engine.pages.kv.pages[:, PAGE].cpu()
        assert bytes(host) == there.contiguous().numpy().tobytes()


SCENES = (
    new_pages, a_layer_that_is_reported, pages_behind_a_wrong_guess, a_step_that_samples_nothing,
    captured_steps,
)  # fmt: skip
"""The last takes ten seconds, and most waits are missed by one of the others."""
_BY_GRAPH = "torch waits for the whole device before it begins to capture"
_BY_COUNT = "memory is counted when the host takes it; a wait brings errors of the step"
NOT_NEEDED = {
    "cuda.CudaGraphs.capture: self._cuda.current_stream().wait_stream(side)": _BY_GRAPH,
    "cuda.CudaMeter.measure: cuda.synchronize()": _BY_COUNT,
}
WAITS = [
    wait
    for module in (copies, cuda, cuda_memory, placing, rank_device, runner)
    for wait in waits_of(module)
    if "_lead" not in wait.text and "lead." not in wait.text
]


@pytest.fixture(scope="module")
def wanted(nano: Path) -> dict[int, list[int]]:
    with served(nano, "cpu") as engine:
        return engine.run(JOINS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_all_goes_well_with_all_waits(
    nano: Path,
    wanted: dict[int, list[int]],
    scene: Callable[[Path, dict[int, list[int]]], None],
    order: str,
) -> None:
    with emulated(order=order, seed=5) as gpu:
        scene(nano, wanted)
        gpu.finish()


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_a_wait_that_is_taken_out_is_missed(
    nano: Path, wanted: dict[int, list[int]], wait: Wait
) -> None:
    missed = []
    for scene in SCENES:
        with emulated() as gpu, without(wait):
            try:
                scene(nano, wanted)
                gpu.finish()
            except (AssertionError, RuntimeError) as error:
                missed.append(f"{scene.__name__}: {error}")
                break
    assert bool(missed) != (wait.name in NOT_NEEDED), f"line {wait.line}: {missed}"
