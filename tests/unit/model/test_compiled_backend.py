"""The whole model on compiled code in bfloat16: as near to float32 as plain torch is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from mooncake_kernels.native import build, linear
from mooncake_kernels.native import experts as native_experts
from mooncake_kernels.native.mla_layer import MlaLayer
from mooncake_kernels.onednn import linear as onednn

from mooncake.base import ConfigError, KvLayout
from mooncake.model.backends import Backends, settle
from mooncake.model.checkpoint.making.convert import convert_checkpoint
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.layers.linear import Fp8Linear
from mooncake.model.loading import WeightSource, load_model
from tests.support.model.ranks import ThreadRanks
from tests.support.model.tiny_models import CPU, forward, random_tokens, slot, source_of, truth

needs_compiled_code = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
NATIVE = Backends("native", "native")
PLAIN = Backends("reference", "reference")
WIDTHS = {
    "num_hidden_layers": 3, "hidden_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "qk_rope_head_dim": 32,
}  # fmt: skip
PREFIX = random_tokens(70, seed=1)
FIRST = [slot(1, 0, PREFIX, range(3, 9)), slot(2, 0, PREFIX[:5], [1])]
AFTER = [slot(1, len(PREFIX), [9], range(3, 9)), slot(2, 5, [7, 8], [1])]


def loaded(source: WeightSource, backends: Backends, dtype: torch.dtype) -> KimiK2:
    return load_model(source, dtype=dtype, device=CPU, backends=backends)


def logits(model: KimiK2, dtype: str) -> torch.Tensor:
    """Return those of two sequences' next tokens, after prefixes computed in one step."""
    kv = pages(model, dtype)
    forward(model, kv, FIRST)
    found = forward(model, kv, AFTER, whole=True)
    return torch.cat([found[1], found[2]])


def pages(model: KimiK2, dtype: str) -> KvTensors:
    layout = KvLayout.for_model(model.spec, block_tokens=16, dtype=dtype, weights_revision="test")
    return KvTensors.allocate(layout, 64, CPU)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@needs_compiled_code
@pytest.mark.parametrize("name", ["yarn", "tied, halves, two shared", "grouped routing"])
def test_compiled_code_is_no_further_from_float32_than_plain_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    run = native_experts.PackedBf16Experts.__call__
    monkeypatch.setattr(
        native_experts.PackedBf16Experts, "__call__",
        lambda *given: calls.append("experts") or run(*given),
    )  # fmt: skip
    source = source_of(truth(name, **WIDTHS))
    exact = logits(loaded(source, PLAIN, torch.float32), "float32")
    plain = logits(loaded(source, PLAIN, torch.bfloat16), "bfloat16")
    assert not calls
    found = logits(loaded(source, NATIVE, torch.bfloat16), "bfloat16")
    assert calls
    assert exact.std() > 0.5, "flat logits would make this comparison empty"
    assert error(found, exact) < max(0.02, 1.3 * error(plain, exact))


@needs_compiled_code
@pytest.mark.parametrize("kind", ["compressed queries", "plain queries", "fp8"])
def test_whole_layers_of_few_rows_give_what_their_separate_ops_do(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms, products, cached rows and attention in one call; no router, as an expert chosen
    otherwise would hide what differs.
    """
    widths = {
        "qk_nope_head_dim": 32, "v_head_dim": 32,
        "q_lora_rank": {"compressed queries": 64, "plain queries": None, "fp8": 128}[kind],
        "vocab_size": 256, "attention_bias": False, "first_k_dense_replace": 3,
        "kv_lora_rank": 96,
    }  # fmt: skip
    calls = []
    run = MlaLayer.__call__
    monkeypatch.setattr(MlaLayer, "__call__", lambda *given: calls.append(1) or run(*given))
    made = truth("yarn", **(WIDTHS | widths))
    source: WeightSource = source_of(made)
    if kind == "fp8":
        made.save_pretrained(tmp_path / "plain")
        (tmp_path / "plain" / "tokenizer.json").write_text("{}")
        source = Checkpoint.open(convert_checkpoint(tmp_path / "plain", tmp_path / "out", kind))
    model = loaded(source, NATIVE, torch.bfloat16)
    for layer in model._layers:
        assert isinstance(layer._attention._w.output, Fp8Linear) == (kind == "fp8")
        assert layer._attention._few is not None
        layer._attention._few.most = 64  # whatever was measured on this machine
    found = logits(model, "bfloat16")
    assert len(calls) == 3, "all layers of the second step; the first has a long chunk"
    for layer in model._layers:
        layer._attention._few = None
    separate = logits(model, "bfloat16")
    assert len(calls) == 3
    assert separate.std() > 0.5, "flat logits would make this comparison empty"
    assert error(found, separate) < 0.005


@needs_compiled_code
def test_ranks_compute_whole_layers_of_few_rows_and_write_the_same_kv(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths = {
        "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 96,
        "vocab_size": 256, "first_k_dense_replace": 3, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 128,
    }  # fmt: skip
    source = source_of(truth("yarn", **(WIDTHS | widths)))
    calls = []
    run = MlaLayer.__call__
    monkeypatch.setattr(MlaLayer, "__call__", lambda *given: calls.append(1) or run(*given))
    # Each would measure something else, and must not go by it.
    monkeypatch.setattr(linear, "few_tokens", lambda *_, **__: 1 + len(calls))
    one = loaded(source, NATIVE, torch.bfloat16)
    ranks = ThreadRanks(lambda _: source, 2, torch.bfloat16, backends=NATIVE)
    ranks.kv = [pages(model, "bfloat16") for model in ranks.models]
    ranks.forward(FIRST)
    assert not calls, "a long chunk"
    found = ranks.forward(AFTER, whole=True)
    assert len(calls) == 3 * 2
    assert torch.equal(ranks.kv[0].pages, ranks.kv[1].pages)
    exact = logits(loaded(source, PLAIN, torch.float32), "float32")
    of_ranks = torch.cat([found[1], found[2]])
    assert error(of_ranks, exact) < max(0.02, 1.3 * error(logits(one, "bfloat16"), exact))


@needs_compiled_code
def test_a_cpu_without_bfloat16_computes_all_dense_products_by_compiled_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = source_of(truth("yarn", **WIDTHS))
    exact = logits(loaded(source, PLAIN, torch.float32), "float32")
    plain = logits(loaded(source, PLAIN, torch.bfloat16), "bfloat16")
    monkeypatch.setattr(build, "_limit", ["AVX512_CORE"])
    assert build.isa() is build.AVX2
    model = loaded(source, NATIVE, torch.bfloat16)
    for layer in model._layers:
        assert layer._attention._few is None
        assert layer._attention._w.output.few.most == math.inf
    assert error(logits(model, "bfloat16"), exact) < max(0.02, 1.3 * error(plain, exact))


@needs_compiled_code
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_quantized_weights_stay_so_and_mean_the_same(tmp_path: Path, kind: str) -> None:
    truth("yarn", dtype="float32", **WIDTHS).save_pretrained(tmp_path / "plain")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    source = Checkpoint.open(convert_checkpoint(tmp_path / "plain", tmp_path / "out", kind))
    exact = logits(loaded(source, PLAIN, torch.float32), "float32")
    plain = logits(loaded(source, PLAIN, torch.bfloat16), "bfloat16")
    kept = {"int4": native_experts.Int4Experts, "fp8": native_experts.Fp8Experts}[kind]
    for backends in (NATIVE, Backends()):
        model = loaded(source, backends, torch.bfloat16)
        assert isinstance(model._layers[1]._mlp._experts, kept)
        shared = model._layers[1]._mlp._shared._down
        assert isinstance(shared, Fp8Linear) == (kind == "fp8")
        assert error(logits(model, "bfloat16"), exact) < max(0.02, 1.3 * error(plain, exact))
    whole = loaded(source, Backends(), torch.float32)
    assert not isinstance(whole._layers[1]._mlp._experts, kept)


def test_what_cannot_be_compiled_is_not_chosen_and_refused_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "why_not", lambda: None)
    bf16 = torch.bfloat16
    assert settle("auto", "auto", CPU, dtype=bf16) == Backends("native", "auto")
    assert settle("auto", "auto", CPU, dtype=torch.float32) == Backends("reference", "auto")
    with pytest.raises(ConfigError, match="moe-backend=native: it computes bfloat16 on the CPU"):
        settle("auto", "native", CPU, dtype=torch.float32)
    monkeypatch.setattr(build, "why_not", lambda: "there is no C++ compiler: install g++")
    packs = onednn.supported(torch.empty(0, dtype=bf16))
    by_library = Backends("onednn" if packs else "wide", "auto")
    assert settle("auto", "auto", CPU, dtype=bf16) == by_library
    with pytest.raises(ConfigError, match="attention-backend=native: there is no C"):
        settle("native", "auto", CPU, dtype=bf16)


@needs_compiled_code
def test_experts_of_odd_widths_go_by_another_backend_or_are_refused() -> None:
    weights = torch.zeros(2, 64, 48).bfloat16(), torch.zeros(2, 48, 32).bfloat16()
    _, by = Backends().experts("experts", *weights)
    library = "onednn" if onednn.supported(weights[0]) else "reference"
    assert by.startswith(f"{library}, since there is no native code for them: experts of widths 48")
    with pytest.raises(ConfigError, match="moe-backend=native: experts of widths 48 and 32"):
        NATIVE.experts("experts", *weights)


@needs_compiled_code
def test_the_log_says_by_what_experts_are_computed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mooncake.model.loading")
    source = source_of(truth("yarn", **WIDTHS))
    loaded(source, Backends(), torch.bfloat16)
    loaded(source, Backends(), torch.float32)
    compiled, plain = (record.getMessage() for record in caplog.records)
    assert compiled.startswith("experts are computed by native: code compiled for ")
    assert plain.startswith("experts are computed by reference, since there is no native code")


def test_onednn_is_refused_for_what_it_cannot_compute() -> None:
    with pytest.raises(ConfigError, match=r"moe-backend=onednn: .* not torch.float32 here"):
        Backends(moe="onednn").experts("experts", torch.zeros(1, 128, 64), torch.zeros(1, 64, 64))
