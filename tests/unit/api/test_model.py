"""A checkpoint directory becomes a served model, or an error that names the file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mooncake.api.model import load_served_model
from mooncake.base import CheckpointError, ConfigError
from tests.unit.api.text.test_tokenizer import BASE, write_tiktoken

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "vocab_size": BASE + 256,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "eos_token_id": BASE + 1,
}  # fmt: skip
TOKENS = {
    "added_tokens_decoder": {
        str(BASE + 1): {"content": "[EOS]"},
        str(BASE + 2): {"content": "<|im_end|>"},
    },
    "eos_token": "<|im_end|>",
}


def write(path: Path, generation: object = None) -> Path:
    write_tiktoken(path, TOKENS)
    (path / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_defaults_and_every_end_of_text_are_read(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": None, "eos_token_id": BASE + 2, "do_sample": False}
    model = load_served_model(write(tmp_path, generation))
    assert (model.defaults.temperature, model.defaults.top_k) == (0.6, 0)
    assert model.eos_token_ids == (BASE + 2, BASE + 1)
    assert model.names == (tmp_path.name,)
    assert model.max_model_len == 512


def test_checkpoint_without_generation_config(tmp_path: Path) -> None:
    model = load_served_model(write(tmp_path), names=("a", "b"), max_model_len=100)
    assert model.eos_token_ids == (BASE + 1, BASE + 2)
    assert (model.name, model.max_model_len) == ("a", 100)


def test_models_are_as_old_as_their_configuration(tmp_path: Path) -> None:
    os.utime(write(tmp_path) / "config.json", (1, 1_700_000_000.5))
    assert load_served_model(tmp_path).created_s == 1_700_000_000


def test_several_ends_of_text_and_ids_out_of_range(tmp_path: Path) -> None:
    model = load_served_model(write(tmp_path, {"eos_token_id": [3, 10**6, 3]}))
    assert model.eos_token_ids == (3, BASE + 1, BASE + 2)


def test_a_directory_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_served_model(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("top_p", 0), ("top_k", -2), ("min_p", 1.5),
        ("repetition_penalty", 0), ("eos_token_id", "<|im_end|>"), ("eos_token_id", [[1]]),
        ("num_beams", 4), ("no_repeat_ngram_size", 1), ("suppress_tokens", [7]),
        ("do_sample", "no"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_served_is_named(tmp_path: Path, key: str, value: object) -> None:
    write(tmp_path, {key: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*{key}"):
        load_served_model(tmp_path)


def test_settings_that_change_nothing_are_served(tmp_path: Path) -> None:
    write(tmp_path, {"num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "min_length": None})
    assert load_served_model(tmp_path).defaults.temperature == 1.0


@pytest.mark.parametrize(
    ("generation", "warned"),
    [
        ({"do_sample": False}, "sampled at 1;"),
        ({"do_sample": False, "temperature": 0.6}, "sampled at 0.6;"),
        ({"do_sample": False, "temperature": 0.0}, ""),
        ({"do_sample": True, "temperature": 0.6}, ""),
        ({"temperature": 0.6}, ""),
    ],
)
def test_greedy_decoding_that_is_not_served_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation: dict[str, object], warned: str
) -> None:
    temperature = generation.get("temperature", 1.0)
    assert load_served_model(write(tmp_path, generation)).defaults.temperature == temperature
    assert [warned in each.getMessage() for each in caplog.records] == [True] * bool(warned)


@pytest.mark.parametrize("length", [0, 513])
def test_length_beyond_the_model_is_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError, match="1 to 512"):
        load_served_model(write(tmp_path), max_model_len=length)
