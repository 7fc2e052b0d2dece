"""What a captured decode step of a rank launches, layer by layer, counted without a GPU.

Tensors of the meta device have shapes and no numbers: the step takes the way it takes on a GPU,
every operation of torch that would start a kernel is noted, and so is every kernel of ours. One
entry may be two kernels where a library cuts a product's inner axis. What ranks exchange is counted
where a group is given that notes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from mooncake_kernels.triton import experts
from mooncake_kernels.triton.device import INTERPRETED
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.predict import MULTIPROCESSORS, Exchanged
from benchmarks.gpu.rank_slice import KIMI_K2, RANKS, Steps
from mooncake.base import KvLayout, ModelSpec, Shape
from mooncake.model.backends import Backends, SideStream
from mooncake.model.checkpoint.quant_format import (
    FP8_BLOCK,
    INT4_GROUP,
    Fp8Block,
    Int4Group,
    QuantFormat,
)
from mooncake.model.compiling import META, ShapesOnly, SilentRanks
from mooncake.model.device.graphs import DecodeGraphs
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.model.parallel.group import Group
from mooncake.model.parallel.torch_group import NCCL, TorchGroup

FEW_EXPERTS = 16
"""How many there are is no part of the code."""
FORMATS: dict[str, QuantFormat | None] = {
    "int4": Int4Group(INT4_GROUP, (r"re:(?!.*\.mlp\.experts\.)",)),
    "fp8": Fp8Block((FP8_BLOCK, FP8_BLOCK), ("kv_b_proj",)),
    "bf16": None,
}
"""Kind of weights -> the format of their checkpoint: Kimi-K2-Thinking's, in which only routed
experts are quantized, and DeepSeek-V3's.
"""
_START_NOTHING = (
    "empty", "new_empty", "empty_like", "empty_strided", "view", "_unsafe_view", "transpose", "t",
    "permute", "slice", "select", "split", "split_with_sizes", "expand", "squeeze", "unsqueeze",
    "detach", "alias", "as_strided", "unbind", "view_as_real", "lift_fresh", "_reshape_alias",
)  # fmt: skip


class _Noted(TorchDispatchMode):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with self:  # what consists of other operations is counted by these
            made = func.decompose(*args, **(kwargs or {}))
        if made is not NotImplemented:
            return made
        name = func.overloadpacket.__name__
        if name not in _START_NOTHING:
            self._names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(names: list[str] | None = None) -> Iterator[list[str]]:
    """Yield a list, this one or a new one, to which every launch inside adds its name; no kernel
    runs.
    """
    if not INTERPRETED.value:
        pytest.skip("launches are noted in Triton's interpreter; compiled, they would really run")
    names = [] if names is None else names

    def note(self: Any, *args: Any, **options: Any) -> None:
        names.append(self.fn.__name__)

    with (
        mock.patch("triton.runtime.interpreter.InterpretedFunction.run", note),
        mock.patch.object(experts, "num_programs", return_value=MULTIPROCESSORS),
        _Noted(names),
    ):
        yield names


_EXCHANGE = "exchange of "


class _Silent:
    """What a group exchanges by, without other ranks. Its calls are noted in `names`, each with the
    bytes that come from the others.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def _allgather_base(self, made: torch.Tensor, x: torch.Tensor) -> _Silent:
        return self._exchanged(made)

    def alltoall_base(self, made: torch.Tensor, x: torch.Tensor, *sizes: list[int]) -> _Silent:
        return self._exchanged(made)

    def _exchanged(self, made: torch.Tensor) -> _Silent:
        self._names.append(f"{_EXCHANGE}{made.nbytes * (RANKS - 1) // RANKS}")
        return self

    def wait(self) -> None:
        """Return, because nothing was begun."""


def model_of(
    kind: str,
    num_layers: int,
    num_dense: int,
    *,
    num_experts: int = FEW_EXPERTS,
    num_ranks: int = RANKS,
    deterministic: bool = False,
    side: SideStream | None = None,
    group: Group | None = None,
    dcp: int = 1,
) -> KimiK2:
    """Return the first of so many ranks' model. kind: of weights, one of `FORMATS`. group: of eight
    ranks; None: one that exchanges nothing. dcp: how many of them share a context out.
    """
    spec = ModelSpec.from_config(
        {
            **KIMI_K2, "num_hidden_layers": num_layers, "first_k_dense_replace": num_dense,
            "n_routed_experts": num_experts,
        }
    )  # fmt: skip
    return load_model(
        ShapesOnly(spec, FORMATS[kind]),
        dtype=torch.bfloat16,
        device=META,
        backends=Backends("triton", "triton", deterministic=deterministic, side=side),
        group=group or (SilentRanks(RANKS) if num_ranks == RANKS else None),
        shape=Shape(tp=num_ranks, dcp=dcp),
    )


def launches(
    kind: str,
    num_layers: int,
    num_dense: int,
    rows: int = 16,
    *,
    side: SideStream | None = None,
    names: list[str] | None = None,
    group: Group | None = None,
    dcp: int = 1,
) -> list[str]:
    """Return what a decode step of `rows` sequences launches, in order, on one of eight ranks; in
    `names`, where given, beside what else was noted there meanwhile. group, dcp: see `model_of`.
    """
    model = model_of(kind, num_layers, num_dense, side=side, group=group, dcp=dcp)
    layout = KvLayout.for_model(
        model.spec, block_tokens=64, dtype="bfloat16", weights_revision="none"
    )
    steps = Steps()
    with torch.inference_mode(), noted(names) as found:
        kv = KvTensors.allocate(layout, 1, META)
        DecodeGraphs(model, kv, steps, most_sequences=rows, most_pages=4)
        found.clear()
        steps.by_rows[rows]()
    return found


def of_a_layer(kind: str) -> list[str]:
    """Return what one more layer of experts launches, in order."""
    two, three = launches(kind, 2, 0), launches(kind, 3, 0)
    size = len(three) - len(two)
    second = three.index("_norm") + size + len([name for name in three if name == "_schedule"])
    return three[second : second + size]


def of_a_step(kind: str, num_layers: int = 61) -> int:
    """Return how many kernels a step of so many layers launches, the first of them dense."""
    two, three = len(launches(kind, 2, 1)), len(launches(kind, 3, 1))
    return two + (num_layers - 2) * (three - two)


def exchanged_in_a_step(rows: int, dcp: int = 1, num_layers: int = 61) -> Exchanged:
    """Return what ranks exchange in a step of so many layers, and launch for that."""

    def of(layers: int) -> list[int]:
        names: list[str] = []
        group = TorchGroup(NCCL, 0, RANKS, -1, 0.0)
        group._ranks = _Silent(names)
        launches("int4", layers, 1, rows, names=names, group=group, dcp=dcp)
        calls = [int(each.removeprefix(_EXCHANGE)) for each in names if each.startswith(_EXCHANGE)]
        alone = len(launches("int4", layers, 1, rows))
        return [len(calls), len(names) - len(calls) - alone, sum(calls)]

    return Exchanged(
        *(two + (num_layers - 2) * (three - two) for two, three in zip(of(2), of(3), strict=True))
    )


if __name__ == "__main__":
    for each in ("int4", "fp8"):
        found = of_a_layer(each)
        print(f"{each}: {len(found)} a layer of experts: {', '.join(found)}")
        print(f"{of_a_step(each)} a step")
