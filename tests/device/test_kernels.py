"""Triton's kernels on the emulated GPU: a launch waits in its stream, and is seen to the byte."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import TRITON, kernel

from tests.support.cuda.install import Emulated

CUDA = torch.device("cuda")


@torch.inference_mode()
def test_a_launch_is_queued_and_computes_what_it_does_on_the_cpu(gpu: Emulated) -> None:
    norm = kernel("rms_norm", TRITON)
    x, weight = torch.randn(3, 32), torch.randn(32)
    wanted = norm(x, weight, 1e-5)
    there = x.to(CUDA)
    found = norm(there, weight.to(CUDA), 1e-5)
    there.fill_(7.0)
    assert "_norm" in gpu.machine.launched
    assert torch.equal(found.cpu(), wanted), "it read what was there in its turn"


@torch.inference_mode()
def test_kernels_on_two_streams_race_where_they_touch_the_same_rows(gpu: Emulated) -> None:
    norm, weight = kernel("rms_norm", TRITON), torch.ones(32, device=CUDA)
    x = torch.ones(4, 32, device=CUDA)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x[2:].fill_(1.0)
    with torch.cuda.stream(side):
        first = norm(x[:2], weight, 1e-5)
    torch.cuda.synchronize()
    assert not gpu.machine.races, "other rows of the same block"
    x[2:].fill_(1.0)
    with torch.cuda.stream(side):
        second = norm(x[1:3], weight, 1e-5)
    torch.cuda.synchronize()
    assert "_norm on stream" in gpu.machine.races[0]
    assert first.shape == second.shape
    gpu.machine.races.clear()


@torch.inference_mode()
def test_an_address_outside_of_what_a_kernel_was_given_is_an_error(gpu: Emulated) -> None:
    norm = kernel("rms_norm", TRITON)
    norm(torch.ones(2, 32, device=CUDA), torch.ones(1, device=CUDA), 1e-5)
    torch.cuda.synchronize()  # 32 numbers of a block that holds 128
    norm(torch.ones(2, 512, device=CUDA), torch.ones(1, device=CUDA), 1e-5)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    gpu.machine.failed = None
