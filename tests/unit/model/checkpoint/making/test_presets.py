"""Preset checkpoints: same bytes for a seed, whole or not at all, and readable by others."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import mooncake
from mooncake.api.text.tokenizer import load_tokenizer
from mooncake.base import ConfigError, ModelSpec
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME
from mooncake.model.checkpoint.making import presets
from mooncake.model.checkpoint.making.presets import (
    PRESETS,
    init_checkpoint,
    preset_config,
    write_preset_files,
)
from mooncake.model.checkpoint.tensor_cuts import mtp_shapes, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return init_checkpoint("k2-nano", 0, tmp_path_factory.mktemp("presets") / "nano")


def digests(directory: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(directory.iterdir())
    }


def num_parameters(config: dict[str, Any]) -> tuple[float, float]:
    """Return (all, active per token)."""
    spec = ModelSpec.from_config(config)
    share = spec.num_experts_per_tok / spec.n_routed_experts
    sizes = {name: math.prod(shape) for name, shape in tensor_shapes(spec).items()}
    active = sum(size * (share if ".experts." in name else 1) for name, size in sizes.items())
    return sum(sizes.values()), active


class TestShapes:
    def test_k2_small_is_the_size_the_benchmarks_quote(self) -> None:
        total, active = num_parameters(preset_config("k2-small"))
        assert total == pytest.approx(722e6, rel=0.001)
        assert active == pytest.approx(237e6, rel=0.003)

    def test_the_others_stay_small(self) -> None:
        assert num_parameters(preset_config("k2-nano"))[0] < 2e6
        assert 20e6 < num_parameters(preset_config("k2-tiny"))[0] < 50e6

    @pytest.mark.parametrize("preset", list(PRESETS))
    def test_every_preset_is_k2_with_a_byte_sized_vocabulary(self, preset: str) -> None:
        config = preset_config(preset)
        spec = ModelSpec.from_config(config)
        # What was trained on short contexts needs no YaRN.
        assert (spec.yarn is not None) == (preset != "k2-demo")
        if spec.yarn is not None:
            assert spec.softmax_scale > 1 / math.sqrt(spec.qk_head_dim)
        assert (spec.n_group, spec.n_shared_experts, spec.routed_scaling_factor) == (1, 1, 2.827)
        assert spec.vocab_size == PRESETS[preset].num_base_tokens + 256
        # The same distances as 163584, 163586 and 163839 of Kimi-K2.
        assert spec.bos_token_id == spec.vocab_size - 256
        assert spec.eos_token_ids == [spec.vocab_size - 254]
        assert config["pad_token_id"] == spec.vocab_size - 1


class TestWriting:
    def test_the_same_seed_gives_the_same_bytes(self, nano: Path, tmp_path: Path) -> None:
        again = init_checkpoint("k2-nano", 0, tmp_path / "again")
        assert digests(again) == digests(nano)
        other = digests(init_checkpoint("k2-nano", 1, tmp_path / "other"))
        assert other["config.json"] == digests(nano)["config.json"]
        assert all(
            other[name] != digest
            for name, digest in digests(nano).items()
            if name.endswith(".safetensors")
        )

    def test_k2_demo_is_written_with_what_the_trained_one_has(self, tmp_path: Path) -> None:
        write_preset_files("k2-demo", tmp_path)
        shipped = Path(mooncake.__file__).parent / "k2-demo"
        assert digests(tmp_path).items() <= digests(shipped).items()
        assert len(digests(tmp_path)) == 5

    def test_k2_demo_reads_an_unknown_word_as_the_same_letters_everywhere(
        self, tmp_path: Path
    ) -> None:
        write_preset_files("k2-demo", tmp_path)
        encoding = load_tokenizer(tmp_path)
        letters = [encoding.encode(letter)[0] for letter in "zorvex"]
        assert encoding.encode("zorvex") == letters
        for text in ('{"to": "zorvex"}', "mail to zorvex.", 'a_zorvex, "zorvex-1"', "[zorvex]"):
            tokens = encoding.encode(text)
            assert encoding.decode(tokens) == text
            starts = [at for at, token in enumerate(tokens) if token == letters[0]]
            assert len(starts) == text.count("zorvex")
            assert all(tokens[at : at + 6] == letters for at in starts)
        assert len(encoding.encode("weather")) == len(encoding.encode('": "')) == 1

    def test_holds_every_file_and_reads_back(self, nano: Path) -> None:
        checkpoint = Checkpoint.open(nano)
        shapes = tensor_shapes(checkpoint.spec)
        checkpoint.check_names(shapes)
        for name, shape in shapes.items():
            tensor = checkpoint.tensor(name, shape)
            wanted = torch.float32 if "e_score" in name else torch.bfloat16
            assert tensor.dtype == wanted
            assert bool(tensor.isfinite().all())
        index = json.loads((nano / INDEX_NAME).read_text())
        assert index["metadata"]["total_size"] == checkpoint.total_bytes
        shards = sorted(set(index["weight_map"].values()))
        assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
        assert {file.name for file in nano.iterdir()} == {
            *shards, INDEX_NAME, "config.json", "generation_config.json", "tiktoken.model",
            "tokenizer_config.json", "chat_template.jinja",
        }  # fmt: skip
        generation = json.loads((nano / "generation_config.json").read_text())
        assert generation["eos_token_id"] == checkpoint.spec.eos_token_ids[0]
        assert nano.stat().st_mode & 0o777 == 0o755

    def test_dtype_and_overrides(self, tmp_path: Path) -> None:
        out = init_checkpoint(
            "k2-nano",
            0,
            tmp_path / "x",
            dtype="float32",
            overrides={"q_lora_rank": None, "n_group": 4, "topk_group": 2, "rope_scaling": None},
        )
        checkpoint = Checkpoint.open(out)
        assert (checkpoint.spec.q_lora_rank, checkpoint.spec.n_group) == (None, 4)
        assert checkpoint.spec.yarn is None
        checkpoint.check_names(tensor_shapes(checkpoint.spec))
        name = "model.layers.0.self_attn.q_proj.weight"
        assert checkpoint.tensor(name, (96, 64)).dtype == torch.float32

    def test_progress_ends_at_the_whole(self, tmp_path: Path) -> None:
        calls: list[tuple[int, int]] = []
        init_checkpoint("k2-nano", 0, tmp_path / "x", progress=lambda *call: calls.append(call))
        done = [bytes_done for bytes_done, _ in calls]
        total = Checkpoint.open(tmp_path / "x").total_bytes
        assert len(calls) > 1
        assert done == sorted(done)
        assert calls[-1] == (total, total)

    def test_an_empty_directory_is_filled_and_a_full_one_refused(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        init_checkpoint("k2-nano", 0, tmp_path / "empty")
        with pytest.raises(ConfigError, match="empty: exists and is not an empty directory"):
            init_checkpoint("k2-nano", 0, tmp_path / "empty")
        (tmp_path / "file").write_text("x")
        with pytest.raises(ConfigError, match="not an empty directory"):
            init_checkpoint("k2-nano", 0, tmp_path / "file")
        assert {path.name for path in tmp_path.iterdir()} == {"empty", "file"}

    def test_a_failure_leaves_nothing_behind(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(presets, "save_file", full)
        with pytest.raises(ConfigError, match="No space"):
            init_checkpoint("k2-nano", 0, tmp_path / "x")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("preset", "dtype", "overrides", "named"),
        [
            ("k2-huge", "bfloat16", {}, "'k2-huge' is not one of k2-nano, k2-tiny, k2-small"),
            ("k2-nano", "int8", {}, "dtype: 'int8'"),
            ("k2-nano", "bfloat16", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ],
    )
    def test_wrong_arguments_are_named(
        self, tmp_path: Path, preset: str, dtype: str, overrides: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            init_checkpoint(preset, 0, tmp_path / "x", dtype=dtype, overrides=overrides)
        assert named in str(caught.value)
        assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def model(nano: Path) -> Any:
    """`nano` as stock transformers loads it, fp32."""
    transformers = pytest.importorskip("transformers")
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        nano, dtype=torch.float32, output_loading_info=True
    )
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    assert not any(loaded.values()), loaded
    return model.eval()


class TestInTransformers:
    """What stock transformers makes of a preset, and that greedy decoding on it means something."""

    def test_weights_and_settings_arrive(self, nano: Path, model: Any) -> None:
        checkpoint = Checkpoint.open(nano)
        state = model.state_dict()
        for name in ("lm_head.weight", "model.layers.2.self_attn.kv_b_proj.weight"):
            stored = checkpoint.tensor(name, tuple(state[name].shape))
            assert torch.equal(state[name], stored.float())
        bias = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert torch.equal(state[bias], checkpoint.tensor(bias, (8,)))
        assert model.model.layers[0].self_attn.scaling == pytest.approx(
            checkpoint.spec.softmax_scale, rel=1e-6
        )
        assert model.config.routed_scaling_factor == checkpoint.spec.routed_scaling_factor

    def test_best_tokens_are_well_apart_and_depend_on_early_context(self, model: Any) -> None:
        generator = torch.Generator().manual_seed(3)
        prompts = torch.randint(0, 512, (8, 120), generator=generator)
        changed = prompts.clone()
        changed[:, :40] = torch.randint(0, 512, (8, 40), generator=generator)
        with torch.inference_mode():
            logits, other = model(prompts).logits, model(changed).logits
        best = logits.topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).flatten()
        assert float(gaps.median()) > 1.0
        assert float((gaps < 1e-3).float().mean()) < 0.005
        differ = (logits.argmax(-1) != other.argmax(-1))[:, 60:].float().mean()
        assert 0.05 < float(differ) < 0.9

    def test_greedy_text_is_varied_and_never_special(self, model: Any) -> None:
        prompts = torch.randint(0, 512, (8, 20), generator=torch.Generator().manual_seed(4))
        with torch.inference_mode():
            output = model.generate(
                prompts, max_new_tokens=48, do_sample=False, eos_token_id=None, pad_token_id=0
            )[:, 20:]
        assert int(output.max()) < 512
        assert min(len(set(row.tolist())) for row in output) > 12
        assert len({tuple(row.tolist()) for row in output}) == 8

    def test_a_checkpoint_saved_by_transformers_reads_back(
        self, model: Any, nano: Path, tmp_path: Path
    ) -> None:
        model.save_pretrained(tmp_path, max_shard_size="300KB")
        checkpoint, ours = Checkpoint.open(tmp_path), Checkpoint.open(nano)
        shapes = tensor_shapes(checkpoint.spec)
        checkpoint.check_names(shapes)
        assert shapes == tensor_shapes(ours.spec)
        assert checkpoint.spec.yarn == ours.spec.yarn
        for name, shape in shapes.items():
            assert torch.equal(checkpoint.tensor(name, shape), ours.tensor(name, shape).float())


def test_an_mtp_layer_repeats_embedding_and_head(tmp_path: Path) -> None:
    layers = {"num_nextn_predict_layers": 2}
    checkpoint = Checkpoint.open(init_checkpoint("k2-nano", 0, tmp_path / "nano", overrides=layers))
    shapes = tensor_shapes(checkpoint.spec)
    checkpoint.check_names(shapes)
    for number in range(2):
        found = mtp_shapes(checkpoint.spec, number, with_copies=True)
        made = {name.split(".", 3)[-1]: checkpoint.tensor(name, found[name]) for name in found}
        for own, of_model in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            name = f"{of_model}.weight"
            assert torch.equal(made[f"{own}.weight"], checkpoint.tensor(name, shapes[name]))
        assert made["eh_proj.weight"].float().diag().mean() > 0.9
