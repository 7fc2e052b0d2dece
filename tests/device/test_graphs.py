"""Captured graphs on the GPU at hand: what a replay does, and what may not be captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.cuda.install import Emulated, Real

CUDA = torch.device("cuda")
Gpu = Real | Emulated

pytestmark = pytest.mark.any_gpu


def test_a_replay_computes_anew_from_what_its_tensors_hold(gpu: Gpu) -> None:
    x = torch.ones(2, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    y.fill_(7.0)
    assert y.tolist() == [7.0] * 2, "what is captured has not run"
    for value in (3.0, 4.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value + 1] * 2


def test_branches_are_replayed_in_their_order(gpu: Gpu) -> None:
    x, side = torch.ones(2, device=CUDA), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            y = x * 2
        z = x + 1
        main.wait_stream(side)
        out = y + z
    x.fill_(5.0)
    graph.replay()
    assert out.tolist() == [16.0, 16.0]


def test_a_branch_that_no_one_waits_for_cannot_be_captured(gpu: Gpu) -> None:
    x, side = torch.ones(2, device=CUDA), torch.cuda.Stream()

    def fork() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined"):
        fork()


FORBIDDEN: dict[str, Callable[[torch.Tensor], object]] = {
    "a number is read": lambda x: x.sum().item(),
    "a tensor is read": lambda x: x.tolist(),
    "rows are chosen by a mask": lambda x: x[x > 0],
    "pageable memory is copied": lambda x: x.copy_(torch.ones(2)),
    "the device is waited for": lambda x: torch.cuda.synchronize(),
    "a stream is waited for": lambda x: torch.cuda.current_stream().synchronize(),
    "another graph is replayed": lambda x: torch.cuda.CUDAGraph().replay(),
}


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # what a real one says then too
@pytest.mark.parametrize("work", FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_cuda_forbids_in_a_capture_raises(
    gpu: Gpu, work: Callable[[torch.Tensor], object]
) -> None:
    x = torch.ones(2, device=CUDA)
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        work(x)
    assert x.tolist() == [1.0, 1.0], "the device goes on"


def test_graphs_of_a_pool_share_what_the_earlier_ones_left(gpu: Gpu) -> None:
    pool = torch.cuda.graph_pool_handle()
    x = torch.ones(256, device=CUDA)
    graphs, outs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    side = torch.cuda.Stream()
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            outs.append((x * 2 + 1)[:1].clone())
        if graph is graphs[0]:
            before = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() - before <= 512, "the second took one output's memory"
    graphs[0].replay()
    assert outs[0].item() == 3.0
    graphs[1].replay()
    assert outs[1].item() == 3.0
