"""Routed experts in the host's memory beside a model on a device: the same numbers, computed while
the device is busy. The device is a second one in the CPU, whose copies are seen.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mooncake_kernels.native import build
from mooncake_kernels.native import experts as native_experts

from mooncake.base import ConfigError, SamplingParams
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.backends import Backends
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.layers.linear import GatedMlp
from mooncake.model.layers.moe import HostExperts
from mooncake.model.loading import load_model
from mooncake.model.opening import ModelSource
from mooncake.model.options import ModelOptions
from mooncake.model.rank_device import RankDevice
from tests.support.model.tiny_models import (
    CPU,
    forward,
    kv_for,
    random_tokens,
    slot,
    source_of,
    truth,
)

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPE = {
    "hidden_size": 128, "moe_intermediate_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3,
}  # fmt: skip


class Coming:
    def __init__(self, values: torch.Tensor, copies: FarCopies) -> None:
        self._values, self._copies = values, copies
        self._late = torch.full_like(values, -1)

    def wait(self) -> torch.Tensor:
        self._copies.events.append("wait")
        return self._late.copy_(self._values)


class FarCopies:
    """Copies of a device whose memory is not the host's: nothing has arrived before it is waited
    for, and both ends have memory of their own.
    """

    def __init__(self) -> None:
        self.events: list[str] = []

    def send(self, values: torch.Tensor) -> torch.Tensor:
        self.events.append("send")
        return values.clone()

    def fetch(self, values: torch.Tensor) -> Coming:
        self.events.append("fetch")
        return Coming(values.clone(), self)

    def mark(self) -> None:
        """Work in the CPU has ended when its call returns."""


def logits(model: KimiK2) -> torch.Tensor:
    found = forward(model, kv_for(model.spec), [slot(1, 0, random_tokens(40, seed=1), range(3, 9))])
    return found[1]


@pytest.mark.parametrize("name", ["yarn", "tied, halves, two shared"])
def test_the_same_numbers_while_the_device_is_busy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(truth(name))
    plain = load_model(source, dtype=torch.float32, device=CPU, backends=Backends("reference"))
    copies = FarCopies()
    host = HostExperts(Backends("reference"), copies)
    apart = load_model(
        source, dtype=torch.float32, device=CPU, backends=Backends("reference"), host=host
    )
    wanted = logits(plain)
    for method in ("add", "__call__"):
        made = getattr(GatedMlp, method)
        monkeypatch.setattr(
            GatedMlp,
            method,
            lambda *given, made=made: copies.events.append("shared") or made(*given),
        )
    torch.testing.assert_close(logits(apart), wanted, atol=1e-5, rtol=1e-5)
    one = ["fetch"] * 3 + ["shared"] + ["wait"] * 3 + ["send"]
    dense = source.spec.first_k_dense_replace
    layers = source.spec.num_hidden_layers - dense
    assert copies.events == ["shared"] * dense + one * layers


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_quantized_experts_stay_so_beside_the_device(tmp_path: Path, kind: str) -> None:
    if (reason := build.why_not()) is not None:
        pytest.skip(reason)
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain", overrides=SHAPE)
    source = Checkpoint.open(convert_checkpoint(plain, tmp_path / kind, kind))
    host = HostExperts(Backends("reference"), FarCopies())
    device = Backends("reference", "reference")  # keeps nothing quantized
    apart = load_model(source, dtype=torch.bfloat16, device=CPU, backends=device, host=host)
    kept = {"int4": native_experts.Int4Experts, "fp8": native_experts.Fp8Experts}[kind]
    assert all(isinstance(layer._mlp._experts, kept) for layer in apart._layers[1:])


@pytest.mark.parametrize("kind", [None, "int4"])
def test_an_engine_gives_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None
) -> None:
    model = init_checkpoint("k2-nano", 0, tmp_path / "plain", overrides=SHAPE)
    if kind is not None:
        model = convert_checkpoint(model, tmp_path / kind, kind)
    prompts = [random_tokens(number, seed=number) for number in (3, 70, 20)]

    def tokens() -> list[list[int]]:
        settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**22, "max_model_len": 256}
        with DirectEngine.open(str(model), device="cpu", num_threads=1, **settings) as engine:
            return engine.generate(prompts, [GREEDY] * len(prompts))

    wanted = tokens()
    copies = FarCopies()
    monkeypatch.setattr(ModelOptions, "experts_apart", True)
    monkeypatch.setattr(RankDevice, "open_copies", lambda device: copies)
    assert tokens() == wanted
    assert copies.events.count("wait") > 3 * 2 * 24


def test_what_cannot_be_apart_is_refused(tmp_path: Path) -> None:
    model = init_checkpoint("k2-nano", 0, tmp_path / "plain")
    assert not ModelOptions(expert_device="cpu").experts_apart, "the CPU is the device"
    assert ModelOptions(device="cuda", expert_device="cpu").experts_apart
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelOptions, "experts_apart", True)
        patch.setattr("mooncake.model.rank_device.settle", lambda *_, **__: Backends())
        options = ModelOptions(expert_device="cpu", deterministic=True)
        with pytest.raises(ConfigError, match="expert-device=cpu: deterministic needs all on"):
            ModelSource(model, "float32", options)
