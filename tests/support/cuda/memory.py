"""Memory of devices and pinned memory of the host, as blocks that are handed out again at once.

A device's block belongs to the stream it was taken on, as in torch's allocator: whoever takes it
there next comes behind its last owner in that stream's order, and in no other's. Each block comes
filled with 0xFF, which is NaN in every floating type.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from typing import Any

import torch

from tests.support.cuda.accesses import Access, ranges_of
from tests.support.cuda.streams import Machine, Stream, the_machine

_GRAIN = 512
POISON = 0xFF
HOST = -1
"""The device of pinned memory."""


class Block:
    """Bytes with an owner."""

    def __init__(self, num_bytes: int, device: int, pool: Any) -> None:
        self.bytes = torch.full((num_bytes,), POISON, dtype=torch.uint8)
        self.address = self.bytes.data_ptr()
        self.device = device
        self.pool = pool
        self.users: list[Stream] = []
        """Other streams that the next owner waits for (`Tensor.record_stream`)."""

    @property
    def name(self) -> str:
        place = "pinned memory" if self.device == HOST else f"memory of cuda:{self.device}"
        return f"{self.bytes.numel()} bytes of {place} at {self.address:#x}"

    def access(self, inner: torch.Tensor, writes: bool) -> Access:
        """Return the access of a tensor that lies in this block."""
        return Access(self, ranges_of(inner), writes, inner.data_ptr() - self.address)


class Hold:
    """What keeps a block from being handed out again: all tensors in it share one."""

    def __init__(self, block: Block, memory: Memory) -> None:
        self.block = block
        self._memory = memory

    def __del__(self) -> None:
        self._memory.released.append(self.block)


class Memory:
    """The blocks of all devices of a machine, and the host's pinned ones."""

    def __init__(self, machine: Machine, device_bytes: int) -> None:
        self.machine = machine
        self.device_bytes = device_bytes
        self.released: deque[Block] = deque()
        self.allocated: dict[int, int] = defaultdict(int)
        """Bytes in use, by device."""
        self.peak: dict[int, int] = defaultdict(int)
        self._reserved: dict[int, int] = defaultdict(int)
        self._free: dict[tuple[int, Any, int], list[Block]] = defaultdict(list)
        self._pinned: dict[int, Block] = {}
        """Pinned blocks by their address."""
        self.pinned_ranges: list[tuple[int, int]] = []
        """(address, bytes) of the host's own memory that the driver was told to pin."""

    def take(self, num_bytes: int, stream: Stream, poisoned: bool) -> Hold:
        """Return memory of a stream's device, filled with NaN unless a task that the caller queues
        next fills it. OutOfMemoryError: there is not so much.
        """
        device, capture = stream.device_index, stream.capture
        pool = (stream.number, None if capture is None else capture.pool)
        with self.machine.lock:
            block = self._block(num_bytes, device, pool)
        for other in block.users:
            stream.wait_stream(other)
        block.users = []
        if poisoned:
            there = block.bytes
            self.machine.queue(
                stream, "poison", lambda: there.fill_(POISON),
                [Access(block, [(0, there.numel())], True)],
            )  # fmt: skip
        return Hold(block, self)

    def pin(self, num_bytes: int) -> torch.Tensor:
        """Return bytes of pinned host memory, filled with garbage."""
        with self.machine.lock:
            block = self._block(num_bytes, HOST, None)
            self._pinned[block.address] = block
        block.bytes.fill_(POISON)
        view = (ctypes.c_char * max(1, num_bytes)).from_address(block.address)
        view.hold = Hold(block, self)  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)[:num_bytes]

    def pinned_block(self, tensor: torch.Tensor) -> Block | None:
        """Return the block of a tensor in pinned memory of torch's."""
        return self._pinned.get(tensor.untyped_storage().data_ptr())

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a host tensor lies in pinned memory."""
        if self.pinned_block(tensor) is not None:
            return True
        begin, length = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return any(at <= begin and begin + length <= at + n for at, n in self.pinned_ranges)

    def in_use(self, device: int) -> int:
        self._collect()
        return self.allocated[device]

    def reserved(self, device: int) -> int:
        self._collect()
        return self._reserved[device]

    def empty_cache(self) -> None:
        """Give back what nobody holds, but for the pools of graphs."""
        with self.machine.lock:
            self._collect()
            for (device, pool, size), blocks in self._free.items():
                if device != HOST and pool[1] is None:
                    self._reserved[device] -= size * len(blocks)
                    blocks.clear()

    def _collect(self) -> None:
        while self.released:
            block = self.released.popleft()
            size = block.bytes.numel()
            self.allocated[block.device] -= size
            self._free[block.device, block.pool, size].append(block)

    def _block(self, num_bytes: int, device: int, pool: Any) -> Block:
        size = max(_GRAIN, -(-num_bytes // _GRAIN) * _GRAIN)
        self._collect()
        free = self._free[device, pool, size]
        if not free:
            if device != HOST and self._reserved[device] + size > self.device_bytes:
                self.empty_cache()
            if device != HOST and self._reserved[device] + size > self.device_bytes:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory: {size} bytes asked of cuda:{device}, which has "
                    f"{self.device_bytes}, {self._reserved[device]} in use"
                )
            free.append(Block(size, device, pool))
            self._reserved[device] += size
        self.allocated[device] += size
        self.peak[device] = max(self.peak[device], self.allocated[device])
        return free.pop()


_memory: list[Memory] = []


def the_memory() -> Memory:
    """Return the installed machine's memory. RuntimeError: no machine is installed."""
    the_machine()
    return _memory[-1]


def use(memory: Memory | None) -> None:
    """Install a memory, or none."""
    _memory[:] = [] if memory is None else [memory]
