"""`torch.cuda` over a machine, and the driver's part of a GPU: the names that served code calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.cuda.graphs import CUDAGraph, graph, graph_pool_handle
from tests.support.cuda.memory import Memory
from tests.support.cuda.streams import Event, Machine, Stream

NAME = "GPU made of CPU memory"


def names(machine: Machine, memory: Memory, guard: Any) -> dict[str, Any]:
    """Return what stands in for the attributes of torch.cuda."""

    @contextmanager
    def stream(chosen: Stream | None) -> Iterator[None]:
        if chosen is None:
            yield
            return
        before, device = machine.current(chosen.device_index), machine.device
        set_device(chosen.device_index)
        machine.choose(chosen)
        try:
            yield
        finally:
            machine.choose(before)
            set_device(device)

    def set_device(device: Any) -> None:
        machine.device = machine.index_of(device)
        guard.set_device(machine.device)

    @contextmanager
    def on_device(device: Any) -> Iterator[None]:
        before = machine.device
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return memory.device_bytes - memory.reserved(machine.index_of(device)), memory.device_bytes

    def reset_peak_memory_stats(device: Any = None) -> None:
        index = machine.index_of(device)
        memory.peak[index] = memory.in_use(index)

    def empty_cache() -> None:
        machine.refuse_in_capture("empty_cache")
        memory.empty_cache()

    properties = SimpleNamespace(
        name=NAME, multi_processor_count=4, total_memory=memory.device_bytes, major=9, minor=0
    )
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: machine.num_devices,
        "current_device": lambda: machine.device,
        "set_device": set_device,
        "device": on_device,
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": machine.current,
        "default_stream": machine.default,
        "set_stream": machine.choose,
        "synchronize": machine.finish_all,
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "mem_get_info": mem_get_info,
        "memory_allocated": lambda device=None: memory.in_use(machine.index_of(device)),
        "memory_reserved": lambda device=None: memory.reserved(machine.index_of(device)),
        "max_memory_allocated": lambda device=None: memory.peak[machine.index_of(device)],
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "empty_cache": empty_cache,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
    }


class DriverGpu:
    """What `cuda_driver.Gpu` asks of the driver; NICs do not reach this memory."""

    orders_writes = can_flush = has_dmabufs = False
    pci_address = "0000:00:00.0"

    def __init__(self, memory: Memory) -> None:
        self._memory, self._lock = memory, threading.Lock()

    def pin(self, address: int, num_bytes: int) -> None:
        with self._lock:
            self._memory.pinned_ranges.append((address, num_bytes))

    def unpin(self, address: int) -> None:
        with self._lock:
            found = [each for each in self._memory.pinned_ranges if each[0] == address]
            self._memory.pinned_ranges.remove(found[0])


def pinning(memory: Memory) -> dict[tuple[Any, str], Any]:
    """Return what stands in for torch's ways to pin memory of the host."""
    empty = torch.empty

    def pinned_empty(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if not pin_memory:
            return empty(*size, **kwargs)
        like = empty(*size, **kwargs, device="meta")
        return memory.pin(like.untyped_storage().nbytes()).view(like.dtype).view(like.shape)

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if memory.is_pinned(self):
            return self
        there = memory.pin(self.numel() * self.element_size()).view(self.dtype).view(self.shape)
        return there.copy_(self)

    def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
        return memory.is_pinned(self)

    return {
        (torch, "empty"): pinned_empty,
        (torch.Tensor, "pin_memory"): pin_memory,
        (torch.Tensor, "is_pinned"): is_pinned,
    }
