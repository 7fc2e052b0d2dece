"""The shared expert beside the routed ones: what a captured step begins on which stream, and that
results keep their bits, whichever ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

from benchmarks.gpu import predict
from mooncake.base import ModelSpec
from mooncake.model.backends import Backends, SideStream
from mooncake.model.compiling import META
from mooncake.model.device.cuda import CudaGraphs, CudaSide
from mooncake.model.layers.linear import GatedMlp, Linear
from mooncake.model.layers.moe import BESIDE_ROWS, Moe, MoeWeights
from tests.support.kernels.step_launches import launches
from tests.support.model.side_streams import FakeStreams
from tests.support.model.tiny_models import source_of, truth

FORK, JOIN = "side waits for main", "main waits for side"
STREAMS = {FORK, JOIN, "on side", "on main"}


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_a_captured_step_forks_before_the_router_and_joins_before_down(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = launches(kind, 2, 1)
    streams = FakeStreams(monkeypatch)
    found = launches(kind, 2, 1, side=CudaSide(META), names=streams.noted)
    fork, back, join = (found.index(name) for name in (FORK, "on main", JOIN))
    assert found[fork - 1] == "_norm", "the layer's rows"
    assert found[fork + 1] == "on side"
    beside, main = found[fork + 2 : back], found[back + 1 : join]
    assert (len(beside), beside[-1]) == (predict.BESIDE, "_gated")
    assert main[:3] == ["mm", "_choose", "_sort_and_tile"]
    assert main[-1] == "sum_kernel"
    assert "_gated" not in main
    assert sorted(set(found) - STREAMS) == sorted(set(alone))
    assert len(found) == len(alone) + len(STREAMS), "nothing is launched besides"


class Late:
    """A stream that does its work when the other one has ended, or at once."""

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self.num_forks = 0

    @contextmanager
    def beside(self, work: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        self.num_forks += 1
        made = work()
        if not self._late:
            yield made
            return
        comes = torch.full_like(made, float("nan"))
        yield comes
        comes.copy_(work())


def layer(side: SideStream | None, device: torch.device | str = "cpu") -> Moe:
    """Return a layer of eight experts, 64 wide."""
    spec: ModelSpec = source_of(truth("plain")).spec
    seeded = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=seeded) * shape[-1] ** -0.5
        return values.to(device, torch.bfloat16)

    inner, hidden, count = 32, spec.hidden_size, spec.n_routed_experts
    shared = GatedMlp(Linear(weight(2 * inner, hidden)), Linear(weight(hidden, inner)))
    experts = weight(count, 2 * inner, hidden), weight(count, hidden, inner)
    router = weight(count, hidden).float(), torch.zeros(count, device=device)
    backends = Backends(moe="reference", side=side)
    return Moe(spec, MoeWeights(*router, "experts", experts, shared), backends)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("rows", [1, 7, BESIDE_ROWS, BESIDE_ROWS + 1])
def test_bits_are_those_of_one_stream(rows: int, late: bool) -> None:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    side = Late(late=late)
    assert torch.equal(layer(side)(x), layer(None)(x))
    assert side.num_forks == (rows <= BESIDE_ROWS)


def test_an_error_of_either_joins_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step that leaves a branch open could not even end its capture."""
    streams = FakeStreams(monkeypatch)
    side = CudaSide(META)

    def fails() -> torch.Tensor:
        raise RuntimeError("no memory")

    for work, inside in ((fails, nullcontext), (lambda: torch.empty(1), fails)):
        streams.noted.clear()
        with pytest.raises(RuntimeError, match="no memory"), side.beside(work):
            inside()
        assert streams.noted == [FORK, "on side", "on main", JOIN]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch sees none here")
@torch.inference_mode()
def test_a_gpu_gives_the_same_bits_captured_and_not() -> None:
    device = torch.device("cuda")
    x = torch.randn(64, 64, device=device).bfloat16()
    beside, alone = layer(CudaSide(device), device), layer(None, device)
    replay = CudaGraphs().capture(lambda: beside(x))
    for _ in range(100):
        x.normal_()
        wanted = alone(x)
        assert torch.equal(beside(x), wanted)
        assert torch.equal(replay(), wanted)
