"""Pages moved by copies of their device: what is gathered and scattered is what ranges say."""

from __future__ import annotations

import queue
import random
import threading
from pathlib import Path

import pytest
import torch

from mooncake.base import KvLayout
from mooncake.engine.plan import LayerDone
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.copies import HostCopies, LayerReports, Mark
from mooncake.model.device.pages import LEAST_ROW_BYTES, PageMemory, row_bytes
from mooncake.model.kv_tensors import KvTensors
from mooncake.transfer.device import CopyDone, Ranges, read_now, write_now
from tests.support.model.page_device import FarDevice, FarPages
from tests.support.waiting import LONG_S

NEEDS_GPU = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here"
)


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout(num_layers=3, block_tokens=16, kv_width=36, dtype=dtype, fingerprint="f")


def pages(dtype: str = "float32", num_pages: int = 7) -> PageMemory:
    kv = KvTensors.allocate(layout(dtype), num_pages, torch.device("cpu"))
    memory = PageMemory(kv, FarDevice())
    kv.pages.view(-1).view(torch.uint8).copy_(_random_bytes(memory.num_bytes))
    return memory


def _random_bytes(count: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.Random(5).randbytes(count)), dtype=torch.uint8)


SLICE = layout().slice_bytes
RANGES: dict[str, list[tuple[int, int]]] = {
    "one": [(SLICE, SLICE)],
    "slices": [(page * SLICE, SLICE) for page in (5, 0, 13, 2)],
    "cut slices": [(4 * SLICE + SLICE // 2, SLICE // 2), (0, SLICE), (9 * SLICE, SLICE // 4)],
    "odd": [(1, 1), (77, 1000), (2 * SLICE - 3, 7), (20_001, 4097)],
}


@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_ranges_come_and_go_in_order(ranges: Ranges, dtype: str) -> None:
    memory = pages(dtype)
    ranges = [(at, size) for at, size in ranges if at + size <= memory.num_bytes]
    before = bytes(memory.kv.pages.view(-1).view(torch.uint8).numpy())
    expected = b"".join(before[at : at + size] for at, size in ranges)
    assert read_now(memory, ranges) == expected
    changed = random.Random(9).randbytes(len(expected))
    write_now(memory, ranges, memoryview(bytearray(changed)))
    wanted, done = bytearray(before), 0
    for at, size in ranges:
        wanted[at : at + size] = changed[done : done + size]
        done += size
    assert bytes(memory.kv.pages.view(-1).view(torch.uint8).numpy()) == wanted


def test_slices_are_gathered_and_odd_ranges_are_not() -> None:
    assert row_bytes(RANGES["slices"]) == SLICE
    assert row_bytes(RANGES["cut slices"]) == SLICE // 4 >= LEAST_ROW_BYTES
    assert row_bytes(RANGES["one"]) is None
    assert row_bytes(RANGES["odd"]) is None


def test_slices_are_gathered_eight_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, moved = pages("bfloat16"), []
    gather = torch.Tensor.index_select

    def seen(self: torch.Tensor, *args: object) -> torch.Tensor:
        moved.append(self.dtype)
        return gather(self, *args)

    monkeypatch.setattr(torch.Tensor, "index_select", seen)
    read_now(memory, [(page * SLICE // 2, SLICE // 2) for page in (5, 0, 13, 2)])
    assert moved == [torch.int64]


class Gate:
    """A mark that is reached when a test says so."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def reached(self) -> None:
        assert self.opened.wait(LONG_S)


class GatedDevice(FarDevice):
    """Tells of marks from a thread, as real ones do."""

    def when(self, mark: Mark, done: CopyDone) -> None:
        threading.Thread(target=super().when, args=(mark, done)).start()


def test_writes_wait_for_a_step_begun_on_a_guess() -> None:
    memory = PageMemory(pages().kv, GatedDevice())
    settled = threading.Event()
    memory.settle(lambda _error: settled.set())
    assert settled.is_set(), "nothing runs ahead"
    gate, settled = Gate(), threading.Event()
    memory.last_guess = lambda: gate
    memory.settle(lambda _error: settled.set())
    assert not settled.is_set()
    gate.opened.set()
    assert settled.wait(LONG_S)


def test_pages_are_zero_before_peers_may_write_to_them(tmp_path: Path) -> None:
    """The device's own copies and NICs know nothing of the stream that zeroes them."""
    path = init_checkpoint("k2-nano", seed=1, out=tmp_path / "nano", dtype="float32")
    begun: list[Counted] = []

    class Counted(Gate):
        num_waits = 0

        def reached(self) -> None:
            self.num_waits += 1

    class Behind(HostCopies):
        def mark(self) -> Counted:
            begun.append(Counted())
            return begun[-1]

    source = FarPages(path, "float32")
    far = source.far
    far.copies = Behind()
    memory = source.device_pages(layout(), 3)
    assert memory.num_bytes == 3 * layout().block_bytes
    assert [mark.num_waits for mark in begun] == [1]


def test_layers_are_told_of_in_order_once_they_are_done() -> None:
    told: list[LayerDone] = []
    reports = LayerReports(told.append)
    events = [LayerDone(step_id=1, layer=layer) for layer in range(3)]
    gates = [Gate(), Gate()]
    reports.add(events[0], gates[0])
    reports.add(events[1], gates[1])
    gates[1].opened.set()
    assert told == []
    gates[0].opened.set()
    reports.drain()
    assert told == events[:2]
    reports.add(events[2], HostCopies().mark())
    assert told == events
    reports.close()


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_on_a_gpu_ranges_are_those_of_the_cpu(ranges: Ranges) -> None:
    from mooncake.model.device.cuda_memory import CudaDevice

    plain = pages()
    device = torch.device("cuda", 0)
    there = PageMemory(KvTensors(layout(), plain.kv.pages.to(device)), CudaDevice(device))
    assert there.location.startswith("gpu:")
    host = memoryview(bytearray(2**20))
    there.pin(host)
    size = sum(length for _, length in ranges)
    ended: queue.Queue[str | None] = queue.Queue()
    there.copy_out(ranges, host[:size], ended.put)
    assert ended.get(timeout=LONG_S) is None
    assert bytes(host[:size]) == bytes(read_now(plain, ranges))
    host[:size] = random.Random(3).randbytes(size)
    there.copy_in(ranges, host[:size], ended.put)
    assert ended.get(timeout=LONG_S) is None
    write_now(plain, ranges, host[:size])
    assert torch.equal(there.kv.pages.cpu(), plain.kv.pages)
    there.unpin(host)
