"""The features that only a CUDA GPU has: captured graphs, asynchronous copies, memory measurement.
It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mooncake.model.copies import Arriving
from mooncake.model.device.graphs import Replay
from mooncake.model.memory import GpuMemory

_WARM_UP = 2


class CudaGraphs:
    """A `graphs.GraphPort` with CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._cuda: Any = torch.cuda
        self._pool = self._cuda.graph_pool_handle()

    def capture(self, step: Callable[[], torch.Tensor]) -> Replay:
        """Run `step` on a side stream (kernels compile there), record it, return its replay."""
        side = self._cuda.Stream()
        side.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(side):
            for _ in range(_WARM_UP):
                step()
        self._cuda.current_stream().wait_stream(side)
        graph = self._cuda.CUDAGraph()
        # Other threads may use the device meanwhile. Only this thread's calls must keep the rules
        # of capture.
        with self._cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class CudaCopies:
    """`copies.Copies` through pinned memory, on the current stream.

    Pinned memory comes from torch's cache, which does not reuse memory that a copy still needs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda: Any = torch.cuda

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy on the device without blocking."""
        return values.pin_memory().to(self._device, non_blocking=True)

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Start a copy to pinned memory and record an event at its end."""
        there = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        there.copy_(values, non_blocking=True)
        done = self._cuda.Event()
        done.record(self._cuda.current_stream(self._device))
        return _Marked(there, done)

    def mark(self) -> CudaMark:
        """Return an event on the current stream."""
        done = self._cuda.Event(blocking=True)
        done.record(self._cuda.current_stream(self._device))
        return CudaMark(done)


class CudaSide:
    """A `backends.SideStream`. It also works inside a captured step, whose graph then has both
    branches.

    The memory of what `work` makes comes from the side stream and is freed to it. Each `beside`
    begins after the main stream, so whoever gets that memory next comes after all its readers.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = torch.cuda
        self._device = device
        self._side = self._cuda.Stream(device)

    @contextmanager
    def beside(self, work: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        """Run `work` on the side stream, from an event of the current stream to one that the
        current stream waits for. This holds even when the context raises, because a captured step
        may leave no branch open.
        """
        main = self._cuda.current_stream(self._device)
        self._side.wait_stream(main)
        try:
            with self._cuda.stream(self._side):
                made = work()
            yield made
        finally:
            main.wait_stream(self._side)


class CudaMark:
    """A `copies.Mark` with a CUDA event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def reached(self) -> None:
        """Block until the GPU has reached the event."""
        self._event.synchronize()


class _Marked:
    def __init__(self, values: torch.Tensor, done: Any) -> None:
        self._values = values
        self._done = done

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._values


class CudaMeter:
    """A `measuring.MemoryMeter` of the current GPU."""

    def measure(self, step: Callable[[], None]) -> GpuMemory:
        """Return the memory in use now, and the extra memory that `step` takes while it runs."""
        cuda: Any = torch.cuda
        cuda.synchronize()
        cuda.empty_cache()
        free, total = cuda.mem_get_info()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        step()
        cuda.synchronize()
        step_bytes = max(0, cuda.max_memory_allocated() - before)
        cuda.empty_cache()
        return GpuMemory(total_bytes=total, resident_bytes=total - free, step_bytes=step_bytes)
