"""Copies weights to their place with several threads, which disks and GPU uploads need for speed.

Reading a mapped file waits for its pages, and copying waits for memory; threads wait in parallel.
On the way to a GPU each thread has one pinned buffer, so memory holds at most one tensor for each
thread beside the weights.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_THREADS = 8


class Placer:
    """A pool of copying threads; a context manager that ends them."""

    def __init__(self, num_threads: int | None = None, *, staged: bool = False) -> None:
        """`staged`: copy through a buffer of the thread's own, which is pinned if there is
        a GPU.
        """
        count = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="place-weights")
        self._staged = staged
        self._own = threading.local()

    def do(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run all tasks in parallel. After all have ended, raise the error of the first that
        failed.
        """
        inference = torch.is_inference_mode_enabled()  # it is set for this thread only

        def run(task: Callable[[], None]) -> None:
            with torch.inference_mode(inference):
                task()

        running = [self._threads.submit(run, task) for task in tasks]
        try:
            for task in running:
                task.result()
        finally:
            for task in running:
                task.cancel()
            for task in running:
                if not task.cancelled():
                    task.exception()

    def copy(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy `tensor` (of any float dtype) into `out` of the same shape. The copy is complete on
        return.
        """
        if not self._staged:
            out.copy_(tensor)
            return
        stage = self._stage(out)
        stage.copy_(tensor)
        if not out.is_cuda:
            out.copy_(stage)
            return
        stream = torch.cuda.current_stream(out.device)
        out.copy_(stage, non_blocking=True)
        stream.synchronize()

    def _stage(self, out: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `out` in the thread's own buffer."""
        num_bytes = out.numel() * out.element_size()
        buffer: torch.Tensor | None = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=out.is_cuda)
            self._own.buffer = buffer
        return buffer[:num_bytes].view(out.dtype).view(out.shape)

    def __enter__(self) -> Placer:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
