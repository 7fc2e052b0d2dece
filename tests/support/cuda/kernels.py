"""Triton's kernels: a launch is queued, and interpreted when its stream runs. What its programs
load and store is known by address, to the byte.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from triton.runtime import interpreter

from tests.support.cuda.accesses import Access, merged
from tests.support.cuda.memory import Block
from tests.support.cuda.streams import the_machine
from tests.support.cuda.tensors import DeviceTensor


class _Touched:
    """Addresses that the running kernel has touched."""

    def __init__(self, blocks: list[Block]) -> None:
        self._blocks = {block.address: block for block in blocks}
        self._starts = np.array(sorted(self._blocks), dtype=np.uint64)
        self._ends = np.array(
            [int(at) + self._blocks[int(at)].bytes.numel() for at in self._starts], np.uint64
        )
        self._found: dict[tuple[int, bool], list[Any]] = {}

    def note(self, addresses: Any, mask: Any, size: int, writes: bool) -> None:
        at = np.unique(
            np.asarray(addresses, dtype=np.uint64)[np.broadcast_to(mask, addresses.shape)]
        )
        if not at.size:
            return
        place = np.searchsorted(self._starts, at, side="right").astype(np.int64) - 1
        if (place < 0).any() or (at + np.uint64(size) > self._ends[place]).any():
            raise RuntimeError("an illegal memory access was encountered")
        for number in np.unique(place):
            part = at[place == number]
            cuts = np.flatnonzero(np.diff(part) > np.uint64(size)) + 1
            begins = part[np.concatenate(([0], cuts))]
            ends = part[np.concatenate((cuts - 1, [part.size - 1]))] + np.uint64(size)
            start = self._starts[number]
            self._found.setdefault((int(start), writes), []).append((begins - start, ends - start))

    def accesses(self) -> list[Access]:
        return [
            Access(
                self._blocks[start],
                merged(
                    (int(a), int(b))
                    for begins, ends in parts
                    for a, b in zip(begins, ends, strict=True)
                ),
                writes,
            )
            for (start, writes), parts in self._found.items()
        ]


_running: list[_Touched] = []


@contextmanager
def queued_launches() -> Iterator[None]:
    """Queue launches with tensors of a device in them; all others run as ever."""
    run = interpreter.InterpretedFunction.run
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, DeviceTensor)]
        if not given or warmup:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        device = given[0].device
        if any(each.device != device for each in given):
            raise ValueError(f"{self.fn.__name__}: its tensors are on several devices")
        blocks = list({id(each.hold.block): each.hold.block for each in given}.values())
        inner = tuple(_inner(each) for each in args)
        named = {key: _inner(each) for key, each in kwargs.items()}

        def body() -> list[Access]:
            _running.append(_Touched(blocks))
            try:
                run(self, *inner, grid=grid, warmup=False, **named)
            finally:
                touched = _running.pop()
            return touched.accesses()

        machine = the_machine()
        machine.queue(machine.current(device), self.fn.__name__, body)
        return None

    @functools.wraps(load)
    def noted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        _note(ptrs, mask, False)
        return load(self, ptrs, mask, *rest)

    @functools.wraps(store)
    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(ptrs, mask, True)
        return store(self, ptrs, value, mask, *rest)

    @functools.wraps(atomic)
    def noted_atomic(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        _note(ptr, mask, True)
        return atomic(self, op, ptr, val, mask, *rest)

    interpreter.InterpretedFunction.run = launch
    builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
    builder.create_atomic_rmw = noted_atomic
    try:
        yield
    finally:
        interpreter.InterpretedFunction.run = run
        builder.create_masked_load, builder.create_masked_store = load, store
        builder.create_atomic_rmw = atomic


def _note(pointers: Any, mask: Any, writes: bool) -> None:
    if _running:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        _running[-1].note(pointers.data, mask.data, size, writes)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, DeviceTensor) else value
