"""Runs a Gluon kernel without a GPU: a stand-in for the language, on torch tensors.

Gluon has no interpreter. Here the kernel's own Python is run, one program after another, all of its
threads at once. What a GPU does later is done as late as it may be: copies when they are waited
for, products when they are; a place in shared memory that is being written holds NaN until then.
And what other warps must be told of is checked: a product reads what is fenced and behind a
barrier, a place is not overwritten before a barrier behind its last product. Layouts mean nothing
here: that they can be compiled, the compiler says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

WARPS = 8


class Place:
    """What is known of one place in shared memory."""

    def __init__(self) -> None:
        self.unfenced = self.unseen = self.read = False

    def write(self) -> None:
        assert not self.read, "overwritten while other warps may still multiply with it"
        self.unfenced = self.unseen = True


class Shared:
    """A descriptor of shared memory."""

    def __init__(self, data: torch.Tensor, places: list[Place]) -> None:
        self.data = data
        self.places = places

    def index(self, index: Any) -> Shared:
        return Shared(self.data[int(index)], [self.places[int(index)]])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.places)

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length), self.places)

    def load(self, layout: object) -> torch.Tensor:
        assert not self.places[0].unseen, "read before a barrier"
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        self.places[0].write()
        self.data.copy_(value)


class Pointer:
    """Places in a tensor."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat = flat
        self.at = torch.as_tensor(at)
        self.dtype = SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.flat, self.at + more)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.flat, self.at[index])

    def load(self, mask: Any, other: float) -> torch.Tensor:
        mask = torch.as_tensor(True if mask is None else mask).expand(self.at.shape)
        found = torch.full(self.at.shape, other, dtype=self.flat.dtype)
        found[mask] = self.flat[self.at[mask].long()]
        return found

    def store(self, value: torch.Tensor, mask: Any) -> None:
        at, mask = torch.broadcast_tensors(self.at, torch.as_tensor(mask))
        self.flat[at[mask].long()] = value.expand(at.shape)[mask].to(self.flat.dtype)


class Product:
    """A product that has begun: it is made when it is waited for."""

    def __init__(self, a: Shared, b: Shared, acc: Any, use_acc: bool) -> None:
        for operand in (a, b):
            assert not operand.places[0].unfenced, "a product of what is not fenced"
            assert not operand.places[0].unseen, "a product of what other warps write"
            operand.places[0].read = True
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def made(self) -> torch.Tensor:
        acc = self.acc.made() if isinstance(self.acc, Product) else self.acc
        product = self.a.data.float() @ self.b.data.float()
        return product + acc if self.use_acc else product


class Language:
    """One program's view of the language; `globals` are the names that kernels know it by."""

    def __init__(self, program: int, num_programs: int) -> None:
        self._places: list[Place] = []
        self._copies: list[list[Callable[[], None]]] = [[]]
        plain = {name: staticmethod(getattr(torch, name)) for name in ("where", "exp2", "log2")}
        layouts = (
            "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "NVMMASharedLayout",
            "SwizzledSharedLayout",
        )  # fmt: skip
        self.gl = SimpleNamespace(
            **{name: value.__func__ for name, value in plain.items()},
            **{name: lambda *_: None for name in layouts},
            constexpr=object, int32=torch.int32, int64=torch.int64, float32=torch.float32,
            program_id=lambda _: program, num_programs=lambda _: num_programs,
            num_warps=lambda: WARPS, static_range=range,
            arange=lambda begin, end, layout: torch.arange(begin, end, dtype=torch.int32),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            minimum=lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
            maximum=torch.maximum, max=torch.amax, sum=lambda x, axis: x.sum(axis),
            convert_layout=lambda x, layout: x,
            load=lambda pointer, mask=None, other=math.nan, volatile=False: pointer.load(
                mask, 0 if mask is None else other
            ),
            store=lambda pointer, value, mask: pointer.store(value, mask),
            allocate_shared_memory=self._allocate,
        )  # fmt: skip
        self.globals: Mapping[str, Any] = {
            "gl": self.gl,
            "async_copy": SimpleNamespace(commit_group=self._commit, wait_group=self._wait),
            "async_load": self._copy,
            "barrier": self._barrier,
            "fence_async_shared": self._fence,
            "warpgroup_mma": lambda a, b, acc, *, use_acc=True, is_async: Product(
                a, b, acc, use_acc
            ),
            "warpgroup_mma_wait": lambda outstanding, deps: deps[0].made(),
        }

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        places = [Place() for _ in range(shape[0] if len(shape) == 3 else 1)]
        self._places += places
        return Shared(torch.full(shape, math.nan).to(dtype), places)

    def _copy(self, shared: Shared, pointer: Pointer, mask: Any) -> None:
        at, live = torch.broadcast_tensors(pointer.at, torch.as_tensor(mask))
        shared.places[0].write()
        shared.data.fill_(math.nan)
        found = Pointer(pointer.flat, at).load(live, 0)
        self._copies[-1].append(lambda: shared.data.copy_(found))

    def _commit(self) -> None:
        self._copies.append([])

    def _wait(self, outstanding: int) -> None:
        while len(self._copies) - 1 > outstanding:
            for copy in self._copies.pop(0):
                copy()

    def _fence(self) -> None:
        for place in self._places:
            place.unfenced = False

    def _barrier(self) -> None:
        for place in self._places:
            place.unseen = place.read = False


class StandIn:
    """A Gluon kernel that is launched as on a GPU, and run here."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return lambda *args, num_warps, **constants: self._run(grid[0], args, constants)

    def _run(self, num_programs: int, args: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
        given = [Pointer(arg.view(-1)) if isinstance(arg, torch.Tensor) else arg for arg in args]
        for program in range(num_programs):
            function = bound(self._kernel, Language(program, num_programs).globals)
            function(*given, **constants)


def bound(kernel: Any, names: Mapping[str, Any]) -> FunctionType:
    """Return the Python function behind a kernel, with `names` in place of the language's, as those
    that it calls.
    """
    known = dict(kernel.fn.__globals__) | dict(names)
    for name, value in list(known.items()):
        if hasattr(value, "fn") and value is not kernel and name in kernel.fn.__code__.co_names:
            known[name] = bound(value, names)
        elif type(value).__name__ == "constexpr":
            known[name] = value.value
    return FunctionType(kernel.fn.__code__, known, kernel.fn.__name__)
