"""Whole ops in place of Triton's kernels, where interpreting them would take too long: a task that
computes the op's reference in its turn. As from a kernel's launch, the host learns no number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from mooncake_kernels import dispatch
from mooncake_kernels.dispatch import REFERENCE, TRITON
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cuda.accesses import Access, merged
from tests.support.cuda.memory import Block
from tests.support.cuda.streams import the_machine
from tests.support.cuda.tensors import BY_ROW, DeviceTensor, empty_strided, is_view, written_by
from tests.support.cuda.trees import leaves, mapped

_shapes: dict[Any, Any] = {}


@contextmanager
def reference_ops() -> Iterator[None]:
    """Have the triton backend's ops be tasks made of the references until the block ends."""
    table = {
        op: backends | ({TRITON: f"{__name__}:{op}"} if TRITON in backends else {})
        for op, backends in dispatch._TABLE.items()
    }
    with mock.patch.dict(dispatch._TABLE, table):
        yield


def __getattr__(op: str) -> Any:
    """Return the op as tasks; what holds experts is made of them first."""
    if op not in dispatch.ops():
        raise AttributeError(op)
    made = dispatch.kernel(op, REFERENCE)
    if not isinstance(made, type):
        return lambda *args, **kwargs: queue(op, made, args, kwargs)
    return lambda *stored, in_place=False: _Stored(op, made, stored)


class _Stored:
    """An op that holds weights."""

    def __init__(self, op: str, made: Any, stored: tuple[Any, ...]) -> None:
        self._op, self._stored = op, stored
        self._reference = made(*(inner(each) for each in stored))
        the_machine().finish_all()  # a reference may read what it is made of
        self.num_bytes = sum(each.nbytes for each in stored)

    def slot(self, number: int) -> list[Any]:
        """Return where the weights of an expert lie."""
        return [each[number] for each in self._stored]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return queue(self._op, self._reference, args, kwargs, self._stored)


def queue(
    op: str,
    reference: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    held: tuple[DeviceTensor, ...] = (),
) -> Any:
    """Queue an op on the current stream and return its results."""
    given: list[DeviceTensor] = []
    inner_args, inner_kwargs = inner(args, given), inner(kwargs, given)
    if not given:
        return reference(*args, **kwargs)
    device, machine = given[0].device, the_machine()
    if any(each.device != device for each in given):
        raise RuntimeError(f"{op}: tensors are on several devices")
    key = op, tuple((each.shape, each.dtype) for each in given), str(kwargs.get("out_dtype"))
    if key not in _shapes:
        with torch.inference_mode():
            out = reference(*_zeros(inner_args), **_zeros(inner_kwargs))
        _shapes[key] = mapped(
            lambda x: (x.size(), x.dtype) if isinstance(x, torch.Tensor) else x, out,
        )  # fmt: skip
    outs = _allocated(_shapes[key], device)
    into = [each for each in leaves(outs) if isinstance(each, DeviceTensor)]
    there = [each.inner for each in into]
    blocks = {each.hold.block.address: each.hold.block for each in (*given, *held)}
    results = [each.access(True) for each in into]

    def compute() -> list[Access]:
        with Watch(blocks) as watch:
            found = reference(*inner_args, **inner_kwargs)
        values = [each for each in leaves(found) if isinstance(each, torch.Tensor)]
        for place, value in zip(there, values, strict=True):
            place.copy_(value)
        return watch.accesses

    machine.queue(machine.current(device), op, compute, results)
    return outs


class Watch(TorchDispatchMode):
    """Notes what ops touch of some blocks while it is active."""

    def __init__(self, blocks: dict[int, Block]) -> None:
        super().__init__()
        self._blocks = blocks
        self.accesses: list[Access] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_view(func):
            changed = written_by(func, args, kwargs, torch.Tensor)
            for each in leaves((args, kwargs)):
                if isinstance(each, torch.Tensor):
                    self._note(func, args, each, any(each is other for other in changed))
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], tensor: torch.Tensor, writes: bool) -> None:
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is None:
            return
        name = func._schema.name
        if name in BY_ROW and tensor is args[0] and args[1] == 0 and tensor[:1].is_contiguous():
            size = tensor.stride(0) * tensor.element_size()
            begin = tensor.data_ptr() - block.address
            rows = (begin + row * size for row in args[2].tolist())
            self.accesses.append(Access(block, merged((at, at + size) for at in rows), writes))
        else:
            self.accesses.append(block.access(tensor, writes))


def inner(value: Any, found: list[DeviceTensor] | None = None) -> Any:
    """Return `value` with the memory of the tensors in it; these are added to `found`."""
    if isinstance(value, DeviceTensor):
        if found is not None:
            found.append(value)
        return value.inner
    if isinstance(value, tuple | list):
        return type(value)(inner(each, found) for each in value)
    if isinstance(value, dict):
        return {key: inner(each, found) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if any(isinstance(each, DeviceTensor) for each in fields.values()):
            return dataclasses.replace(
                value,
                **{
                    name: {} if isinstance(each, dict) else inner(each, found)
                    for name, each in fields.items()
                },
            )
    return value


def _zeros(value: Any) -> Any:
    """Return `value` with zeros for the tensors in it: what a reference makes of them has the right
    shape.
    """
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, tuple | list):
        return type(value)(_zeros(each) for each in value)
    if isinstance(value, dict):
        return {key: _zeros(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        tensors = {
            f.name: _zeros(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.init and isinstance(getattr(value, f.name), torch.Tensor)
        }
        return dataclasses.replace(value, **tensors) if _is_of_device(value) else value
    return value


def _is_of_device(value: Any) -> bool:
    """Whether a dataclass describes rows on the device, not a span of the host's."""
    return not hasattr(value, "sections")


def _allocated(looks: Any, device: torch.device) -> Any:
    if isinstance(looks, tuple) and len(looks) == 2 and isinstance(looks[1], torch.dtype):
        return empty_strided(looks[0], None, looks[1], device, poisoned=False)
    if isinstance(looks, tuple):
        return tuple(_allocated(each, device) for each in looks)
    return looks
