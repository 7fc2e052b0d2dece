"""The emulated GPU itself: it finds missing waits, and early uses of memory, in every order."""

from __future__ import annotations

import pytest
import torch

from tests.support.cuda.install import Emulated, Real, emulated
from tests.support.cuda.streams import ORDERS

CUDA = torch.device("cuda")


def two_streams(ordered: bool) -> torch.Tensor:
    """Return what a side stream makes of a tensor of the main stream."""
    x = torch.zeros(4, device=CUDA)
    x.add_(1)
    side = torch.cuda.Stream()
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    side.synchronize()
    return y


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_wait_is_found_in_every_order_and_named_with_both_stacks(order: str) -> None:
    with emulated(order=order, seed=3) as made:
        assert two_streams(ordered=True).tolist() == [2.0] * 4
        made.finish()
        two_streams(ordered=False)
        with pytest.raises(AssertionError) as found:
            made.finish()
    text = str(found.value)
    assert "mul" in text
    assert "neither waits for the other" in text
    assert text.count("two_streams") >= 2


def test_what_no_one_waits_for_does_not_run(gpu: Emulated) -> None:
    x = torch.zeros(2, device=CUDA)
    there = torch.empty(2, pin_memory=True)
    there.copy_(x, non_blocking=True)
    assert there.isnan().all(), "a copy that no one has waited for has not come"
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    done.synchronize()
    assert done.query()
    assert there.tolist() == [0.0, 0.0]


def test_a_copy_reads_pinned_memory_when_it_runs(gpu: Emulated) -> None:
    here = torch.ones(2).pin_memory()
    assert here.is_pinned()
    x = here.to(CUDA, non_blocking=True)
    here.fill_(5.0)
    assert x.tolist() == [5.0, 5.0]
    pageable = torch.ones(2)
    y = pageable.to(CUDA, non_blocking=True)
    pageable.fill_(5.0)
    assert y.tolist() == [1.0, 1.0], "the driver takes pageable memory before the call returns"


def test_a_use_after_free_between_streams_is_found(gpu: Emulated) -> None:
    """The side stream reads memory that the main one gives to the next at once."""
    side = torch.cuda.Stream()
    x = torch.ones(4, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    address = x.data_ptr()
    del x
    z = torch.zeros(4, device=CUDA)
    assert z.data_ptr() == address
    torch.cuda.synchronize()
    assert y.shape == z.shape
    assert "zero_" in gpu.machine.races[0] or "poison" in gpu.machine.races[0]
    gpu.machine.races.clear()


@pytest.mark.any_gpu
def test_record_stream_keeps_memory_until_its_readers_have_run(gpu: Real | Emulated) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    x.record_stream(side)
    del x
    torch.zeros(4, device=CUDA)
    side.synchronize()
    assert y.cpu().tolist() == [2.0] * 4


def test_memory_is_bounded_and_counted() -> None:
    with emulated(2, device_bytes=4096) as made:
        x = torch.empty(512, device=CUDA)
        assert torch.cuda.memory_allocated() == 2048
        with pytest.raises(torch.OutOfMemoryError, match="cuda:0"):
            torch.empty(1024, device=CUDA)
        assert torch.empty(1024, device="cuda:1").device.index == 1
        assert x.isnan().all(), "memory comes filled with NaN"
        del x
        assert torch.empty(1024, device=CUDA).numel() == 1024, "what is cached is given back first"
        made.finish()


def test_devices_are_told_apart() -> None:
    with emulated(2):
        x, y = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
        with pytest.raises(RuntimeError, match=r"cuda:0.*cuda:1"):
            x + y
        with pytest.raises(RuntimeError, match="cuda:0 and on cpu"):
            x + torch.ones(2)
        assert (x + y.to("cuda:0")).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="ordinal 2"):
            torch.cuda.set_device(2)


def test_an_error_of_the_device_comes_to_all_who_wait(gpu: Emulated) -> None:
    torch.ones(2, device=CUDA).index_select(0, torch.tensor([7]).pin_memory().to(CUDA))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="CUDA error"):
            torch.cuda.synchronize()
    gpu.machine.failed = None
