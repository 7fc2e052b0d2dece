"""Checkpoints of every form that the architecture has, as transformers reads the same directory:
settings, shapes, stored dtypes and layouts of files. What is refused instead has its tests beside
the code that refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mooncake.base import CheckpointError
from mooncake.model.checkpoint.files.checkpoint_files import INDEX_NAME, WHOLE_NAME
from mooncake.model.checkpoint.quant import quantize_fp8_block, quantize_int4_packed
from mooncake.model.checkpoint.quant_format import Fp8Block, is_quantized, parse_quantization
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.kimi_k2 import KimiK2
from mooncake.model.loading import load_model
from tests.support.model.tiny_models import (
    CONFIGS,
    CPU,
    forward,
    kv_for,
    random_tokens,
    slot,
    truth,
)

NUM_PROMPT, NUM_OUTPUT = 280, 8
HEAD = "lm_head.weight"
YARN = CONFIGS["yarn"]["rope_parameters"]
OLDER_YARN = {key: value for key, value in YARN.items() if key not in ("rope_type", "rope_theta")}
OLDER_YARN |= {"type": "yarn"}

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

MODELS: dict[str, Config] = {
    "K2.5's yarn": {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn with mscale only": {"rope_parameters": {**YARN, "mscale_all_dim": 0.0}},
    "yarn with mscale_all_dim only": {"rope_parameters": {**YARN, "mscale": 0.0}},
    "yarn that shortens": {"rope_parameters": {**YARN, "factor": 0.5}},
    "yarn on halves": {"rope_parameters": YARN, "rope_interleave": False},
    "biases beside compressed queries": {"attention_bias": True},
    "three groups": {"n_routed_experts": 9, "n_group": 3, "topk_group": 2},
    "weights as they are": {"norm_topk_prob": False, "routed_scaling_factor": 1.0},
    "a single expert a token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "three shared experts": {"n_shared_experts": 3},
    "no shared expert": {"n_shared_experts": 0},
    "no dense layer": {"first_k_dense_replace": 0},
    "only dense layers": {"first_k_dense_replace": 3},
    "more dense layers than layers": {"first_k_dense_replace": 5},
    "one layer": {"num_hidden_layers": 1, "first_k_dense_replace": 0},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "three heads, seven experts": {
        "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 7,
    },
    "heads of other widths": {
        "qk_nope_head_dim": 32, "v_head_dim": 48, "qk_rope_head_dim": 8, "kv_lora_rank": 40,
    },
    "a large epsilon": {"rms_norm_eps": 0.1},
    "an odd vocabulary": {"vocab_size": 133},
}  # fmt: skip
"""What is special about a model -> changes to its settings."""


def renamed(edit: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    """Return what replaces the tensors of a directory by those that `edit` returns."""

    def apply(home: Path) -> None:
        save_file(edit(load_file(home / WHOLE_NAME)), home / WHOLE_NAME, {"format": "pt"})

    return apply


def configured(taken: tuple[str, ...] = (), **given: Any) -> Callable[[Path], None]:
    """Return what takes keys out of a directory's `config.json` and gives it others."""

    def apply(home: Path) -> None:
        config = json.loads((home / "config.json").read_text())
        config = {key: value for key, value in config.items() if key not in taken}
        (home / "config.json").write_text(json.dumps(config | given))

    return apply


def shard(home: Path) -> None:
    """Write the tensors into two files with an index."""
    tensors = load_file(home / WHOLE_NAME)
    (home / WHOLE_NAME).unlink()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        held = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(held, home / file, {"format": "pt"})
    (home / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def wrap(home: Path) -> None:
    """Make a Kimi-K2.5 of it: the text model beside a vision tower."""
    text = json.loads((home / "config.json").read_text()) | {"model_type": "kimi_k2"}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 16}  # fmt: skip
    config = {
        "model_type": "kimi_k25", "text_config": text, "vision_config": vision,
        "projection_hidden_size": 16, "tie_word_embeddings": False,
    }  # fmt: skip
    (home / "config.json").write_text(json.dumps(config))
    renamed(
        lambda tensors: (
            {f"language_model.{name}": tensor for name, tensor in tensors.items()}
            | {"vision_tower.stub.weight": torch.ones(2)}
        )
    )(home)


def with_head(made: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """Return what adds a head that is made of the embedding."""
    return lambda tensors: tensors | {HEAD: made(tensors["model.embed_tokens.weight"])}


def mixed(tensors: Tensors) -> Tensors:
    halves = {"layers.0": torch.float16, "layers.1": torch.bfloat16, "gate": torch.bfloat16}
    return {
        name: tensor.to(next((kind for part, kind in halves.items() if part in name), tensor.dtype))
        for name, tensor in tensors.items()
    }


DIRECTORIES: dict[str, Callable[[Path], None]] = {
    "two files": shard,
    "Kimi-K2.5's wrapper": wrap,
    "several dtypes": renamed(mixed),
    "an MTP layer and saved angles": renamed(
        lambda tensors: tensors
        | {
            "model.layers.3.enorm.weight": torch.ones(64),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        }
    ),
    "fewer layers than are stored": configured(num_hidden_layers=2),
    "older rope settings": configured(
        ("rope_parameters",), rope_scaling=OLDER_YARN, rope_theta=500.0
    ),
    "older and newer rope settings": configured(
        rope_scaling=OLDER_YARN, rope_parameters={**YARN, "mscale": 3.0}, rope_theta=500.0
    ),
    "an original length beside the rope settings": configured(
        ("rope_parameters",), rope_scaling=OLDER_YARN, rope_theta=500.0,
        original_max_position_embeddings=8,
    ),
    "no original length": configured(
        rope_parameters={
            key: value for key, value in YARN.items() if not key.startswith("original")
        }
    ),
    "betas of null": configured(rope_parameters={**YARN, "beta_fast": None, "beta_slow": None}),
    "yarn's settings without its type": configured(
        ("rope_parameters",), rope_scaling={"factor": 4.0, "mscale_all_dim": 1.0}, rope_theta=500.0
    ),
    "a theta of each form": configured(rope_theta=500.0),
    "as few settings as possible": configured(
        ("rope_interleave", "attention_bias", "hidden_act", "tie_word_embeddings", "dtype",
         "num_key_value_heads", "num_nextn_predict_layers"),
    ),
    "settings of other models": configured(mlp_bias=True, num_local_experts=8),
}  # fmt: skip
"""What is special about a directory -> what makes it so."""

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
QUANTIZED: dict[str, Config] = {
    f"fp8, {rows} x {columns}": {**FP8, "weight_block_size": [rows, columns]}
    for rows, columns in ((128, 128), (32, 16), (48, 128))
} | {
    f"int4, groups of {size}": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp.down_proj"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**INT4, "group_size": size}}
        },
    }
    for size in (16, 32, 64, 128)
}  # fmt: skip


def theirs(home: Path) -> Any:
    """Return transformers' model of a directory."""
    import transformers

    kind = transformers.AutoModelForCausalLM
    if json.loads((home / "config.json").read_text())["model_type"] == "kimi_k25":
        kind = transformers.Kimi_K25ForConditionalGeneration
    return kind.from_pretrained(home, dtype=torch.float32).eval()


def ours(home: Path) -> KimiK2:
    return load_model(Checkpoint.open(home), dtype=torch.float32, device=CPU)


def compare(model: Any, home: Path) -> None:
    """Compare our model of the directory `home` with transformers' `model`: the logits after each
    token of a prompt, then greedy tokens.
    """
    mine = ours(home)
    prompt = random_tokens(NUM_PROMPT, seed=3, vocab_size=mine.spec.vocab_size)
    kv, pages = kv_for(mine.spec), range(32)
    found = forward(mine, kv, [slot(1, 0, prompt, pages)], whole=True)[1]
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    tokens = [int(found[-1].argmax())]
    while len(tokens) < NUM_OUTPUT:
        place = NUM_PROMPT + len(tokens) - 1
        tokens.append(int(forward(mine, kv, [slot(1, place, tokens[-1:], pages)])[1].argmax()))
    generated = model.generate(
        input_ids=torch.tensor([prompt]),
        attention_mask=torch.ones(1, NUM_PROMPT),
        max_new_tokens=NUM_OUTPUT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert tokens == generated[0, NUM_PROMPT:].tolist()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # no shared expert
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_models(changes: Config, tmp_path: Path) -> None:
    truth("plain", **changes).save_pretrained(tmp_path)
    compare(theirs(tmp_path), tmp_path)


@pytest.mark.parametrize("make", DIRECTORIES.values(), ids=DIRECTORIES)
def test_directories(make: Callable[[Path], None], tmp_path: Path) -> None:
    truth("plain").save_pretrained(tmp_path)
    make(tmp_path)
    compare(theirs(tmp_path), tmp_path)


@pytest.mark.parametrize("make", [renamed(dict), shard], ids=["one file", "two files"])
def test_a_tied_head_that_is_stored_beside_the_embedding(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    truth("tied, halves, two shared").save_pretrained(tmp_path)
    renamed(with_head(lambda table: table.clone()))(tmp_path)
    make(tmp_path)
    compare(theirs(tmp_path), tmp_path)


def test_a_tied_head_with_other_numbers_is_refused(tmp_path: Path) -> None:
    """Some engines would use it, and others not."""
    truth("tied, halves, two shared").save_pretrained(tmp_path)
    changed = torch.zeros(211, 64)
    changed[-1, -1] = 1.0
    for other in (lambda table: table + changed, lambda table: table.half()):
        renamed(with_head(other))(tmp_path)
        with pytest.raises(CheckpointError, match=r"lm_head.*set tie_word_embeddings to false"):
            ours(tmp_path)
    renamed(with_head(lambda table: table + changed))(tmp_path)
    configured(tie_word_embeddings=False)(tmp_path)
    compare(theirs(tmp_path), tmp_path)


@pytest.mark.parametrize("settings", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_weights(settings: Config, tmp_path: Path) -> None:
    """transformers gets the weights that the stored numbers stand for."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    truth("plain", **sizes).save_pretrained(tmp_path / "plain")
    truth("plain", **sizes).save_pretrained(tmp_path / "stored")
    scheme = parse_quantization(settings)
    assert scheme is not None
    stored, meant = {}, load_file(tmp_path / "plain" / WHOLE_NAME)
    for name, weight in list(meant.items()):
        if not is_quantized(scheme, name):
            stored[name] = weight
        elif isinstance(scheme, Fp8Block):
            values, scale = quantize_fp8_block(weight, scheme.block)
            stored |= {name: values, f"{name}_scale_inv": scale}
            meant[name] = values.float() * spread(scale, scheme.block, weight)
        else:
            words, scale, shape = quantize_int4_packed(weight, scheme.group_size)
            stored |= {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": shape}
            codes = (words[:, :, None] >> torch.arange(0, 32, 4)) & 15
            factors = spread(scale.float(), (1, scheme.group_size), weight)
            meant[name] = (codes.flatten(1)[:, : weight.shape[1]] - 8) * factors
    save_file(meant, tmp_path / "plain" / WHOLE_NAME, {"format": "pt"})
    save_file(stored, tmp_path / "stored" / WHOLE_NAME, {"format": "pt"})
    configured(quantization_config=settings)(tmp_path / "stored")
    compare(theirs(tmp_path / "plain"), tmp_path / "stored")


def spread(scale: torch.Tensor, block: tuple[int, int], weight: torch.Tensor) -> torch.Tensor:
    """Return the factor of each number of `weight`, whose blocks have the factors `scale`."""
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: weight.shape[0], : weight.shape[1]].contiguous()
