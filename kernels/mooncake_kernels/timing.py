"""Device time of a function on a CUDA GPU: a captured graph, replayed with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_FLUSH_BYTES = 256 * 2**20
"""Five times the L2 of an H200, so that writing it leaves nothing of the last run there."""
_WARM_UP = 3

Timer = Callable[[Callable[[], object]], float]
"""Returns the seconds that a call takes."""


def local_device() -> tuple[torch.device, str]:
    """Return the device to run on here, a CUDA GPU if there is one, and its name."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.cuda.get_device_name()
    return torch.device("cpu"), "this CPU"


def cuda_seconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median device seconds of `function`, which must not touch the host.

    The call is captured once, so that the time is the device's and not that of launching. A large
    buffer is written before each replay, so that weights and KV come from memory as in serving.
    """
    cuda: Any = torch.cuda
    stream = cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # others may allocate
        function()
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    for _ in range(repeats):
        flushed.zero_()
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int = 4 * 2**30) -> float:
    """Return the bytes per second (read plus written) of a large copy by a kernel, from which
    floors are computed.

    A captured `copy_` is no kernel but a node of its own, and slower: 2.77 TB/s on an H200 where
    a kernel of ours read 3.67. So the copy inverts the bits. They are random, because a GPU moves
    zeros faster.
    """
    source = torch.empty(num_bytes // 16, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    return num_bytes / cuda_seconds(lambda: torch.bitwise_not(source, out=target))
