"""What a rank computes with on a GPU. None is here: what is CUDA's is replaced or looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mooncake.base import ConfigError, KvLayout, PageArray, Shape
from mooncake.base.kv_layout import Home
from mooncake.base.models.parallel import stage_layers
from mooncake.model import rank_device
from mooncake.model.backends import Backends
from mooncake.model.device import cuda
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.model.page_device import FarDevice

LAYOUT = KvLayout(num_layers=3, block_tokens=16, kv_width=36, dtype="float32", fingerprint="f")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Two GPUs, as far as one can ask for them; returns those that were made a thread's own."""
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(rank_device, "settle", lambda *of, **_: Backends(moe=str(of[2])))
    monkeypatch.setattr(rank_device, "CudaSide", lambda device: f"side of {device}")
    monkeypatch.setattr(rank_device, "CudaGraphs", lambda: "graphs")
    return taken


def test_each_rank_has_a_gpu_and_all_that_belongs_to_it(gpus: list[torch.device]) -> None:
    options = ModelOptions(device="cuda", shape=Shape(tp=2))
    assert options.group_kind == "nccl"
    assert options.own_memories
    second = torch.device("cuda:1")
    found = RankDevice(options, torch.bfloat16, 1)
    assert found.device == second
    assert gpus == [second], "NCCL exchanges and graphs are of the thread's GPU"
    assert found.owns_pages
    side: Any = "side of cuda:1"
    assert found.backends == Backends(moe=str(second), side=side)
    assert isinstance(found.open_copies(), cuda.CudaCopies)
    assert isinstance(found.open_meter(), cuda.CudaMeter)
    assert found.open_graphs() == "graphs"
    assert RankDevice(options, torch.bfloat16).device == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="torch sees 2 GPUs here; each rank needs its own"):
        RankDevice(options, torch.bfloat16, 2)


def test_one_rank_on_a_gpu_and_ranks_on_cpus_are_as_they_were(gpus: list[torch.device]) -> None:
    alone = ModelOptions(device="cuda")
    assert RankDevice(alone, torch.bfloat16).device == torch.device("cuda")
    assert not alone.own_memories
    options = ModelOptions(shape=Shape(tp=2))
    found = RankDevice(options, torch.bfloat16, 1)
    assert found.device == torch.device("cpu")
    assert (found.open_copies(), found.open_graphs(), found.open_meter()) == (None, None, None)
    assert not found.owns_pages
    assert found.backends.side is None
    assert (options.group_kind, options.own_memories) == ("auto", False)
    assert ModelOptions(shape=Shape(tp=2), rank_backend="gloo").own_memories
    stages = ModelOptions(shape=Shape(tp=2, pp=2, dcp=2), rank_backend="gloo")
    whole = PageArray(LAYOUT, 6, 2)
    held = [stages.held_by(rank, whole) for rank in range(4)]
    first, last = stage_layers(LAYOUT.num_layers, 2)
    assert [(each.home, each.layers) for each in held] == [
        (0, last), (1, last), (0, first), (1, first),
    ]  # fmt: skip
    assert sum(each.num_bytes for each in held) == whole.num_bytes
    assert gpus == []


@pytest.mark.parametrize(("homes", "held", "home"), [(1, 6, Home(0, 1)), (2, 3, Home(1, 2))])
def test_a_rank_has_pages_for_its_part(homes: int, held: int, home: Home) -> None:
    found = RankDevice(ModelOptions(shape=Shape(tp=2)), torch.float32, 1)
    found.page_device = FarDevice()
    memory = found.pages(PageArray(LAYOUT, 6, homes).of_rank(1))
    assert (memory.kv.num_pages, memory.kv.home) == (held, home)
    assert memory.num_bytes == held * LAYOUT.block_bytes


def test_memory_that_another_process_took_meanwhile_is_an_error_that_says_what_to_do(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 97.20 GiB")

    monkeypatch.setattr(rank_device.KvTensors, "allocate", full)
    found = RankDevice(ModelOptions(device="cuda"), torch.bfloat16)
    with pytest.raises(ConfigError, match=r"cuda has no room for .* KiB of KV pages") as raised:
        found.pages(PageArray(LAYOUT, 8))
    assert "one after the other" in str(raised.value)
