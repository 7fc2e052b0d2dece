"""Converted checkpoints: the published formats, and logits equal to transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mooncake.base import ConfigError
from mooncake.model.checkpoint.files.checkpoint_files import CheckpointFiles, state_digests
from mooncake.model.checkpoint.files.revision import file_digests, stated_digests
from mooncake.model.checkpoint.making.convert import QUANTIZATION_CONFIGS, convert_checkpoint
from mooncake.model.checkpoint.making.presets import init_checkpoint
from mooncake.model.checkpoint.quant_format import Fp8Block, Int4Group
from mooncake.model.checkpoint.tensor_cuts import mtp_shapes, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint
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

FORMATS = sorted(QUANTIZATION_CONFIGS)
WIDER = {"hidden_size": 160, "moe_intermediate_size": 72, "vocab_size": 211}
"""No multiple of a block of 128 or of a group of 32: the last ones are partial."""


@pytest.fixture(scope="module", params=FORMATS)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, the unquantized directory, the converted one, the format's name)."""
    model = truth("yarn", dtype="float32", **WIDER)
    home = tmp_path_factory.mktemp("convert")
    model.save_pretrained(home / "plain")
    state_digests(home / "plain", home / "plain")  # which is not what comes out
    (home / "plain" / "tokenizer.json").write_text("{}")
    seen: list[tuple[int, int]] = []
    out = convert_checkpoint(
        home / "plain", home / "out", request.param,
        progress=lambda done, whole: seen.append((done, whole)), shard_bytes=100_000,
    )  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    return model, home / "plain", out, request.param


def stored(directory: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    found = {}
    for name, file_name in index["weight_map"].items():
        with safe_open(directory / file_name, framework="pt") as file:
            tensor = file.get_tensor(name)
            found[name] = tensor.dtype, tuple(tensor.shape)
    return found


def test_the_layout_is_the_published_one(converted) -> None:
    _, _, out, name = converted
    found = stored(out)
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    attention = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    if name == "fp8":
        assert found[expert] == (torch.float8_e4m3fn, (160, 72))
        assert found[f"{expert}_scale_inv"] == (torch.float32, (2, 1))
        assert found[attention][0] == torch.float8_e4m3fn
        assert isinstance(Checkpoint.open(out).quantization, Fp8Block)
    else:
        assert found[f"{expert}_packed"] == (torch.int32, (160, 9))
        assert found[f"{expert}_scale"] == (torch.bfloat16, (160, 3))
        assert found[f"{expert}_shape"] == (torch.int64, (2,))
        assert found[attention][0] == torch.float32
        assert isinstance(Checkpoint.open(out).quantization, Int4Group)
        assert not any(
            part in stem
            for stem in found
            if stem.endswith("_packed")
            for part in ("shared_experts", "self_attn", "layers.0.")
        )
    for kept in ("lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.gate.weight"):
        assert found[kept][0] == torch.float32
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_text() == "{}"
    assert stated_digests(out) == file_digests(CheckpointFiles.open(out).plain_contents)
    assert (
        CheckpointFiles.open(out).revision()
        == CheckpointFiles.open(out, reads_weights=False).revision()
    )


def test_logits_equal_transformers_on_the_dequantized_weights(converted) -> None:
    model, _, out, _ = converted
    checkpoint = Checkpoint.open(out)
    shapes = tensor_shapes(checkpoint.spec)
    plain = source_of(model)
    with torch.no_grad():  # these tensors are views of transformers' own parameters
        changed = 0
        for name, shape in shapes.items():
            wide = checkpoint.tensor(name, shape).float()
            changed += int(not torch.equal(plain.tensors[name], wide))
            plain.tensors[name].copy_(wide)
    assert changed >= 3 * 8 * 2
    tokens = random_tokens(60, seed=1)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    ours = load_model(checkpoint, dtype=torch.float32, device=CPU)
    found = forward(ours, kv_for(ours.spec), [slot(1, 0, tokens, range(4))], whole=True)[1]
    assert expected.std() > 1, "flat logits would make this comparison empty"
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_preset_converts_and_is_smaller(tmp_path: Path, name: str) -> None:
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain")
    out = convert_checkpoint(plain, tmp_path / "out", name)
    before, after = Checkpoint.open(plain), Checkpoint.open(out)
    assert after.names() == before.names()
    assert after.total_bytes < before.total_bytes
    assert after.revision() != before.revision()
    shapes = tensor_shapes(after.spec)
    for tensor in after.names():
        got, wanted = (c.tensor(tensor, shapes[tensor]).float() for c in (after, before))
        assert float((got - wanted).norm()) <= 0.15 * float(wanted.norm()), tensor


@pytest.mark.parametrize("name", FORMATS)
def test_an_mtp_layer_is_kept(tmp_path: Path, name: str) -> None:
    wide = {"num_nextn_predict_layers": 1, "hidden_size": 128}
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain", overrides=wide)
    out = convert_checkpoint(plain, tmp_path / "out", name)
    before, after = Checkpoint.open(plain), Checkpoint.open(out)
    found, prefix = stored(out), "model.layers.3."
    for tensor, shape in mtp_shapes(before.spec, 0, with_copies=True).items():
        got, wanted = (c.tensor(tensor, shape).float() for c in (after, before))
        assert float((got - wanted).norm()) <= 0.15 * float(wanted.norm()), tensor
    assert found[prefix + "eh_proj.weight"][0] == torch.bfloat16
    for copied in ("embed_tokens", "shared_head.head"):
        assert found[prefix + f"{copied}.weight"][0] == torch.bfloat16
    expert = prefix + "mlp.experts.3.down_proj.weight"
    assert f"{expert}_{'scale_inv' if name == 'fp8' else 'packed'}" in found
    models = [
        load_model(c, dtype=torch.bfloat16, device=CPU, with_mtp=True) for c in (before, after)
    ]
    assert all(model.mtp is not None for model in models)


def test_an_unknown_format_or_a_full_directory_is_refused(tmp_path: Path) -> None:
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain")
    with pytest.raises(ConfigError, match="'int3' is not one of fp8, int4"):
        convert_checkpoint(plain, tmp_path / "out", "int3")
    with pytest.raises(ConfigError, match="not an empty directory"):
        convert_checkpoint(plain, plain, "fp8")


def test_a_quantized_source_is_refused(tmp_path: Path) -> None:
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain")
    once = convert_checkpoint(plain, tmp_path / "once", "fp8")
    with pytest.raises(ConfigError, match="quantized already"):
        convert_checkpoint(once, tmp_path / "twice", "int4")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = init_checkpoint("k2-nano", 0, tmp_path / "plain")
    calls = []

    def fail_at_the_second(*args, **options) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk full")
        save_file(*args, **options)

    monkeypatch.setattr("mooncake.model.checkpoint.making.convert.save_file", fail_at_the_second)
    with pytest.raises(ConfigError, match="disk full"):
        convert_checkpoint(plain, tmp_path / "out", "fp8", shard_bytes=1000)
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
