"""Tensors of device "cuda" that are made of CPU memory: views are made at once, all else is queued
on the current stream and computed by the CPU when that stream runs.

What an op's results look like is found by torch's own meta kernels. An op whose result's shape
depends on numbers, or that brings a number to the host, drains its stream first, as on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.support.cuda.accesses import Access, merged
from tests.support.cuda.memory import Hold, the_memory
from tests.support.cuda.streams import Forbidden, Stream, the_machine
from tests.support.cuda.trees import leaves, mapped

aten = torch.ops.aten
_CPU, _META = torch.device("cpu"), torch.device("meta")
_READS_NUMBERS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::bincount",
    "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave",
}  # fmt: skip
_EMPTY = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_LEAVES = {"aten::scaled_dot_product_attention", "aten::grouped_mm"}
"""Composite ops that are one kernel here: their parts ask what a device can."""
_SIDE_RESULTS = {"_embedding_bag", "_embedding_bag_forward_only"}
"""Ops whose results behind the first are the backward pass's and differ between devices."""
_shapes: dict[Any, Any] = {}


class DeviceTensor(torch.Tensor):
    """See the module. `inner` is the CPU memory, which only tasks may touch."""

    inner: torch.Tensor
    hold: Hold

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls: type, inner: torch.Tensor, hold: Hold) -> DeviceTensor:
        # A view made in inference mode of a tensor made outside has to be one made outside too.
        with torch.inference_mode(False):
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=torch.device("cuda", hold.block.device),
            )
        made.inner, made.hold = inner, hold
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def record_stream(self, stream: Stream) -> None:
        self.hold.block.users.append(stream)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> DeviceTensor:
        made: DeviceTensor = self.clone()  # type: ignore[assignment]
        return made

    def access(self, writes: bool) -> Access:
        return self.hold.block.access(self.inner, writes)


def empty_strided(
    size: Iterable[int],
    stride: Iterable[int] | None,
    dtype: torch.dtype | None,
    device: Any,
    poisoned: bool = True,
) -> DeviceTensor:
    """Return memory of the current stream; poisoned: see `Memory.take`."""
    machine = the_machine()
    stream = machine.current(device)
    dtype, size = dtype or torch.get_default_dtype(), tuple(size)
    stride, num_bytes = _placed(size, None if stride is None else tuple(stride), dtype)
    hold = the_memory().take(num_bytes, stream, poisoned)
    whole = hold.block.bytes[:num_bytes].view(dtype)
    return DeviceTensor(whole.as_strided(size, stride), hold)


@functools.lru_cache(4096)
def _placed(
    size: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype
) -> tuple[tuple[int, ...], int]:
    """Return the strides and bytes of a new tensor."""
    like = torch.empty(size, dtype=dtype, device=_META)
    if stride is not None:
        like = torch.empty_strided(size, stride, dtype=dtype, device=_META)
    return like.stride(), like.untyped_storage().nbytes()


def of_host(values: torch.Tensor, device: Any) -> DeviceTensor:
    """Return values that the host gives along with a launch, as a kernel's arguments are."""
    out = empty_strided(values.shape, values.stride(), values.dtype, device, poisoned=False)
    kept, inner = values.clone(), out.inner
    _queue(the_machine().current(device), "fill", lambda: inner.copy_(kept), writes=[out])
    return out


def _queue(
    stream: Stream,
    name: str,
    body: Callable[[], Any],
    reads: Iterable[DeviceTensor] = (),
    writes: Iterable[DeviceTensor] = (),
) -> None:
    accesses = [each.access(False) for each in reads] + [each.access(True) for each in writes]
    the_machine().queue(stream, name, body, accesses)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    if name == "aten::copy_":
        return copy(args[0], args[1], kwargs.get("non_blocking", args[2:] == (True,)))
    if name == "aten::_to_copy":
        return _to_copy(func, args, kwargs)
    if name not in _LEAVES and _has_parts(func):
        made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
    tensors = [each for each in leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    mine = [each for each in tensors if isinstance(each, DeviceTensor)]
    device = mine[0].device
    if any(each.device != device for each in mine):
        raise RuntimeError(f"{name}: tensors are on {sorted({str(e.device) for e in mine})}")
    others = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim()]
    if others and name not in _INDEXED:
        raise RuntimeError(f"{name}: tensors are on {device} and on {others[0].device}")
    if name in _EMPTY:
        like = func(*mapped(_as_meta, args), **_on(kwargs, _META))
        return empty_strided(like.shape, like.stride(), like.dtype, device)
    if is_view(func):
        out = func(*mapped(_as_inner, args), **kwargs)
        return mapped(
            lambda x: DeviceTensor(x, mine[0].hold) if isinstance(x, torch.Tensor) else x, out
        )
    stream = the_machine().current(device)
    if name in _READS_NUMBERS or _has_mask(name, tensors) or others:
        return _read(func, args, kwargs, stream, mine)
    return _compute(func, args, kwargs, stream, mine)


def _compute(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream, mine: list[Any]
) -> Any:
    name = func._schema.name.removeprefix("aten::")
    given, named = mapped(_as_inner, args), _on(mapped(_as_inner, kwargs), _CPU)
    by_row, touched = _rows(func, args)
    known = [each for each in mine if each is not by_row]
    written = written_by(func, args, kwargs)
    if written:
        inners = [(each.inner, each.inner.shape) for each in written]

        def change() -> Any:
            func(*given, **named)
            if any(inner.shape != shape for inner, shape in inners):
                raise NotImplementedError(f"{name} resized a tensor of a device")
            return touched()

        reads = [each for each in known if all(each is not other for other in written)]
        writes = [each for each in known if any(each is other for other in written)]
        _queue(stream, name, change, reads, writes)
        return written[0] if len(written) == 1 else tuple(written)
    looks = _look(func, args, kwargs)
    if looks is NotImplemented:
        return _read(func, args, kwargs, stream, mine)
    outs = mapped(
        lambda x: (
            empty_strided(*x.args, stream.device, poisoned=False) if isinstance(x, _Look) else x
        ),
        looks,
    )
    made = [each for each in leaves(outs) if isinstance(each, DeviceTensor)]
    into = [each.inner for each in made]

    def compute() -> Any:
        found = leaves(func(*given, **named))
        values = [each for each in found if isinstance(each, torch.Tensor)]
        for there, value in zip(into, values, strict=True):
            if there is into[0] or name not in _SIDE_RESULTS:
                there.copy_(value)
        return touched()

    _queue(stream, name, compute, known, made)
    return outs


def _read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream, mine: list[Any]
) -> Any:
    """Do what has to know numbers: drain the stream, then compute at once."""
    machine, name = the_machine(), func._schema.name
    machine.refuse_in_capture(f"{name}, which brings numbers to the host,")
    written = written_by(func, args, kwargs)
    given, named = mapped(_as_inner, args), _on(mapped(_as_inner, kwargs), _CPU)
    found: list[Any] = []
    _queue(
        stream, name.removeprefix("aten::"), lambda: found.append(func(*given, **named)), mine,
        written,
    )  # fmt: skip
    machine.finish(stream)
    if written:
        return written[0]
    if name in ("aten::_local_scalar_dense", "aten::equal"):
        return found[0]
    return mapped(
        lambda x: of_host(x, stream.device) if isinstance(x, torch.Tensor) else x, found[0]
    )


# ---------------------------------------------------------------- copies


def copy(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    """Copy between host and devices as `Tensor.copy_` does."""
    machine, memory = the_machine(), the_memory()
    if isinstance(to, DeviceTensor) and isinstance(source, DeviceTensor):
        return _on_devices(to, source)
    there = to if isinstance(to, DeviceTensor) else source
    assert isinstance(there, DeviceTensor)
    host = source if there is to else to
    stream, pinned = machine.current(there.device), memory.is_pinned(host)
    if stream.capture is not None and not (pinned and non_blocking):
        raise Forbidden(f"a copy {'from' if there is to else 'to'} pageable memory is captured")
    if there is to and not pinned:
        host = host.clone()  # a GPU's driver takes it before the call returns
    accesses = [there.access(there is to)]
    if (block := memory.pinned_block(host)) is not None:
        accesses.append(block.access(host, there is not to))
    inner = there.inner

    def move() -> None:
        if there_is_to:
            inner.copy_(host)
        else:
            host.copy_(inner)

    there_is_to = there is to
    del there
    machine.queue(stream, "copy in" if there_is_to else "copy out", move, accesses)
    if not (non_blocking and pinned) and not (there_is_to and non_blocking):
        machine.finish(stream)
    return to


def _on_devices(to: DeviceTensor, source: DeviceTensor) -> DeviceTensor:
    machine = the_machine()
    stream, other = machine.current(source.device), machine.current(to.device)
    if stream is not other:
        stream.wait_stream(other)
    inner, out = source.inner, to.inner
    _queue(stream, "copy", lambda: out.copy_(inner), [source], [to])
    if stream is not other:
        other.wait_stream(stream)
    return to


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, device = args[0], kwargs.get("device") or args[0].device
    non_blocking = kwargs.get("non_blocking", False)
    if device.type == "cuda" and device.index in (None, source.device.index):
        kept = {key: each for key, each in kwargs.items() if key not in ("device", "non_blocking")}
        stream = the_machine().current(source.device)
        return _compute(func, args, kept, stream, [source])
    dtype = kwargs.get("dtype") or source.dtype
    if device.type == "cuda":
        return copy(empty_strided(source.shape, None, dtype, device), source, non_blocking)
    num_bytes = source.numel() * source.element_size()
    if non_blocking:
        there = the_memory().pin(num_bytes).view(source.dtype).view(source.shape)
    else:
        there = torch.empty(source.shape, dtype=source.dtype)
    copy(there, source, non_blocking)
    return there if dtype == source.dtype else there.to(dtype)


# ---------------------------------------------------------------- what an op is


class _Look:
    """Size, stride and dtype of a result."""

    def __init__(self, like: torch.Tensor) -> None:
        self.args = tuple(like.size()), tuple(like.stride()), like.dtype


def _look(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what results look like; NotImplemented: torch cannot say it without the numbers."""
    key = func, _seen(args), _seen(kwargs)
    if key not in _shapes:
        try:
            if func._schema.name == "aten::_grouped_mm":  # its meta kernel takes bfloat16 only
                rows, weights = args[:2]
                out = torch.empty(rows.shape[0], weights.shape[2], dtype=rows.dtype, device=_META)
            else:
                out = func(*mapped(_as_meta, args), **_on(mapped(_as_meta, kwargs), _META))
        except NotImplementedError:
            _shapes[key] = NotImplemented
        else:
            _shapes[key] = mapped(lambda x: _Look(x) if isinstance(x, torch.Tensor) else x, out)
    return _shapes[key]


def _seen(value: Any) -> Any:
    """Return what tells arguments apart whose results look otherwise."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, tuple | list):
        return type(value), *map(_seen, value)
    if isinstance(value, dict):
        return tuple((key, _seen(each)) for key, each in value.items())
    return type(value), value


def _as_inner(x: Any) -> Any:
    if isinstance(x, DeviceTensor):
        return x.inner
    return x.clone() if isinstance(x, torch.Tensor) else x


def _as_meta(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)


def _on(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: device if key == "device" and each else each for key, each in kwargs.items()}


@functools.cache
def _has_parts(func: Any) -> bool:
    """Whether an op is made of others."""
    found: bool = func._can_decompose()
    return found


@functools.cache
def is_view(func: Any) -> bool:
    """Whether an op's results lie in the memory of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info and not r.alias_info.is_write for r in returns)


def written_by(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type = DeviceTensor
) -> list[Any]:
    """Return the arguments of a kind that an op changes."""
    found = []
    for number, name in _changed(func):
        value = args[number] if number < len(args) else kwargs.get(name)
        found += [each for each in leaves(value) if isinstance(each, kind)]
    return found


@functools.cache
def _changed(func: Any) -> list[tuple[int, str]]:
    """Return the places and names of the arguments that an op changes."""
    return [
        (number, each.name)
        for number, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]


def _has_mask(name: str, tensors: list[torch.Tensor]) -> bool:
    masks = (torch.bool, torch.uint8)
    return name in _INDEXED and any(each.dtype in masks for each in tensors[1:])


BY_ROW = {"aten::index_copy_": True, "aten::index_select": False}
"""Ops that touch the rows of their first argument that an index names; whether they write there."""


def _rows(func: Any, args: tuple[Any, ...]) -> tuple[DeviceTensor | None, Callable[[], Any]]:
    """Return the argument of which an op touches only rows that it learns when it runs, and what
    then says which.
    """
    writes, first = BY_ROW.get(func._schema.name), args[0] if args else None
    if writes is None or not isinstance(first, DeviceTensor) or args[1] != 0:
        return None, list
    inner, block, index = first.inner, first.hold.block, args[2].inner
    if inner.dim() < 2 or not inner[:1][0].is_contiguous():
        return None, list
    size = inner.stride(0) * inner.element_size()
    begin = inner.data_ptr() - block.address

    def touched() -> list[Access]:
        starts = [begin + row * size for row in index.tolist()]
        return [Access(block, merged((at, at + size) for at in starts), writes)]

    return first, touched
