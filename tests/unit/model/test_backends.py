"""The whole model on Triton's kernels (interpreted here): as the reference, and batch-invariant."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mooncake_kernels.native.build import CannotBuild

from mooncake.base import ConfigError
from mooncake.model.backends import Backends, settle
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.loading import load_model
from tests.support.model.tiny_models import (
    CPU,
    forward,
    kv_for,
    random_tokens,
    slot,
    source_of,
    truth,
)

TRITON = Backends("triton", "triton")
FIXED = Backends("triton", "triton", deterministic=True)


class KeptReference(Backends):
    """Plain torch that multiplies with quantized weights too: what the kernels must equal."""

    def keeps(self, dtype: torch.dtype, *widths: int) -> bool:
        return True


KEPT = KeptReference(moe="reference")
LAYERS = {"num_hidden_layers": 2}
PREFIX = random_tokens(70, seed=1)
CHUNK = random_tokens(9, seed=2)


def loaded(backends: Backends, name: str = "yarn") -> KimiK2:
    source = source_of(truth(name, **LAYERS))
    return load_model(source, dtype=torch.float32, device=CPU, backends=backends)


def steps(model: KimiK2, absorbed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logits of a chunk after a cached prefix beside another sequence, all KV written)."""
    kv = kv_for(model.spec)
    prefix = [slot(1, 0, PREFIX, range(3, 9)), slot(2, 0, CHUNK[:5], [1])]
    forward(model, kv, prefix, rule=lambda new, context: absorbed)
    after = [slot(1, len(PREFIX), CHUNK, range(3, 9)), slot(2, 5, [7], [1])]
    logits = forward(model, kv, after, whole=True, rule=lambda new, context: absorbed or new == 1)
    return torch.cat([logits[1], logits[2]]), kv.pages


@pytest.mark.parametrize("absorbed", [True, False], ids=["absorbed", "expanded"])
@pytest.mark.parametrize("name", ["yarn", "tied, halves, two shared"])
def test_the_model_on_triton_is_the_reference(name: str, absorbed: bool) -> None:
    wanted, wanted_kv = steps(loaded(Backends(), name), absorbed)
    found, found_kv = steps(loaded(TRITON, name), absorbed)
    assert wanted.std() > 0.5, "flat logits would make this comparison empty"
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    torch.testing.assert_close(found_kv, wanted_kv, atol=1e-4, rtol=0)


def test_a_long_prefix_is_expanded_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = steps(loaded(Backends()), absorbed=False)
    monkeypatch.setattr("mooncake_kernels.triton.mla.mla_expanded.__defaults__", (32,))
    found, _ = steps(loaded(TRITON), absorbed=False)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize(("inner", "said"), [(128, ""), (64, "takes 2.0 times their memory")])
def test_weights_that_need_more_memory_than_they_have_say_so(inner: int, said: str) -> None:
    """INT4 of a rank that has few rows of each expert: Kimi-K2's 2,048 shared out among 32."""
    gate_up = torch.zeros(2, 2, inner, 16).int(), torch.zeros(2, 2, inner, 4).bfloat16()
    down = torch.zeros(2, 128, inner // 8).int(), torch.zeros(2, 128, inner // 32).bfloat16()
    _, by = TRITON.experts("experts_int4", *gate_up, *down)
    assert (said in by) if said else by == "triton"


@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_quantized_weights_stay_so_and_mean_the_same(name: str, tmp_path: Path) -> None:
    widths = {"hidden_size": 160, "moe_intermediate_size": 64, **LAYERS}
    truth("yarn", dtype="float32", **widths).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(convert_checkpoint(tmp_path / "plain", tmp_path / "out", name))
    counts: list[tuple[int, int]] = []
    kept, wanted, widened = (
        load_model(
            checkpoint, dtype=torch.float32, device=CPU, backends=backends,
            progress=lambda done, whole: counts.append((done, whole)),
        )
        for backends in (TRITON, KEPT, Backends())
    )  # fmt: skip
    third = len(counts) // 3
    assert counts[third - 1] == counts[-1] == (third, third), "each tensor is counted once"
    tokens = random_tokens(11, seed=3)
    logits = [
        forward(model, kv_for(model.spec), [slot(1, 0, tokens, range(2))], whole=True)[1]
        for model in (kept, wanted, widened)
    ]

    def error(one: int, other: int) -> float:
        return float((logits[one] - logits[other]).norm() / logits[other].norm())

    assert error(0, 1) < (0.02 if name == "fp8" else 1e-4)
    # FP8 products quantize activations too: 1 part in 16 each. INT4 is weight only.
    assert error(0, 2) < (0.3 if name == "fp8" else 1e-4)
    assert name == "int4" or error(1, 2) > 1e-3, "nothing was multiplied in FP8"


def row_by_row(a: np.ndarray, b: np.ndarray, **ignored: object) -> np.ndarray:
    """A product as tensor cores make it: a row's sums know nothing of its place in the tile."""
    return (a[:, :, None] * b[None]).sum(axis=1)


@pytest.mark.slow
def test_deterministic_bits_depend_on_no_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.runtime.interpreter.np.matmul", row_by_row)
    model = loaded(FIXED)
    tokens = random_tokens(18, seed=4)
    pages = {1: [5, 6], 2: [1, 2], 3: [8]}

    def results(neighbours: bool, cut: int) -> torch.Tensor:
        kv = kv_for(model.spec)
        found = []
        for begin, end in ((0, cut), (cut, 17), (17, 18)):
            slots = [slot(1, begin, tokens[begin:end], pages[1])]
            if neighbours:
                slots.insert(0, slot(2, begin, random_tokens(end - begin, seed=begin), pages[2]))
                slots.append(slot(3, 0, [begin + 1, 5, 3], pages[3]))
            logits = forward(model, kv, slots, whole=True, rule=lambda new, context: True)
            found.append(logits[1])
        return torch.cat(found)

    alone = results(neighbours=False, cut=10)
    assert torch.equal(results(neighbours=True, cut=10), alone)
    assert torch.equal(results(neighbours=True, cut=7), alone)
    wanted = forward(
        loaded(Backends()), kv_for(model.spec), [slot(1, 0, tokens, pages[1])], whole=True
    )[1]
    torch.testing.assert_close(alone, wanted, atol=2e-4, rtol=0)


def test_what_cannot_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settle("auto", "auto", CPU) == Backends("reference", "auto")
    gpu = torch.device("cuda")
    assert settle("auto", "auto", gpu) == Backends("triton", "triton")
    assert settle("reference", "auto", gpu) == Backends("reference", "triton")
    assert settle("auto", "auto", gpu, deterministic=True).deterministic
    assert not settle("auto", "reference", gpu).keeps(torch.bfloat16, 128, 128)
    with pytest.raises(ConfigError, match="moe-backend=onednn: it computes bfloat16 on CPUs"):
        settle("auto", "onednn", gpu)
    with pytest.raises(ConfigError, match="deterministic needs"):
        settle("auto", "onednn", CPU, deterministic=True)
    no_compiler = CannotBuild("there is no C++ compiler")
    monkeypatch.setattr("mooncake_kernels.native.build._tried", lambda isa: no_compiler)
    with pytest.raises(ConfigError, match=r"deterministic on the CPU needs .*: there is no C"):
        settle("auto", "auto", CPU, deterministic=True)
    monkeypatch.setattr("mooncake_kernels.triton.device.INTERPRETED.value", False)
    with pytest.raises(ConfigError, match="needs a CUDA GPU"):
        settle("triton", "auto", CPU)
