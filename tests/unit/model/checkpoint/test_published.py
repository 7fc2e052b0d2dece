"""The loader's names, shapes and formats against Kimi-K2's published files, and the memory plan
against the bytes that a rank would read of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake.base import Shape
from mooncake.model.checkpoint.quant_format import is_quantized
from mooncake.model.checkpoint.tensor_cuts import check_cuts, cut_of, tensor_shapes
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.memory import Kept, weights_bytes
from tests.support.model import published
from tests.support.model.parameters import count_parameters

NUM_RANKS, RANK = 8, 3
SEEN_LAYERS = ("model.layers.0.", "model.layers.1.", "model.layers.60.")


@pytest.fixture(scope="module", params=["INSTRUCT", "THINKING", "K2_5"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = Path(tmp_path_factory.mktemp("published")) / request.param
    published.write_headers(out, getattr(published, request.param))
    return Checkpoint.open(out)


def test_every_tensor_is_known_and_none_is_missing(checkpoint: Checkpoint) -> None:
    checkpoint.check_names(tensor_shapes(checkpoint.spec))
    assert count_parameters(checkpoint.spec).total == pytest.approx(1026.4e9, rel=1e-3)


def test_files_have_the_published_size(checkpoint: Checkpoint) -> None:
    fp8 = checkpoint.path.name == "INSTRUCT"
    assert checkpoint.total_bytes == pytest.approx(1029e9 if fp8 else 594e9, rel=2e-3)


def test_a_rank_reads_as_many_bytes_as_the_plan_says(checkpoint: Checkpoint) -> None:
    """Of three layers, by reading; all layers but the first are alike."""
    spec, stored = checkpoint.spec, checkpoint.quantization
    assert stored is not None
    ranks = Shape(tp=NUM_RANKS)
    check_cuts(spec, stored, ranks)
    read = {}
    for name, shape in tensor_shapes(spec).items():
        layer = name.startswith(SEEN_LAYERS)
        if name.startswith("model.layers.") and not layer:
            continue
        cut = cut_of(spec, name, NUM_RANKS)
        part = cut and cut.part(shape, RANK, NUM_RANKS)
        before = checkpoint.bytes_read
        quantized = checkpoint.quantized(name, shape, part) if len(shape) == 2 else None
        assert (quantized is not None) == is_quantized(stored, name)
        if quantized is None:
            found = checkpoint.tensor(name, shape, part)
            assert part is None or found.shape[part.dim] == part.size
        wide = ".mlp.gate." in name
        read[name] = (checkpoint.bytes_read - before) * (2 if wide and "bias" not in name else 1)
    first, second, last = (
        sum(size for name, size in read.items() if name.startswith(layer)) for layer in SEEN_LAYERS
    )
    assert second == last
    ends = sum(size for name, size in read.items() if not name.startswith("model.layers."))
    whole = ends + first + (spec.num_hidden_layers - 1) * second
    planned = weights_bytes(spec, "bfloat16", shape=ranks, kept=Kept(stored))
    assert planned == pytest.approx(whole, rel=0.03)


def test_inner_norms_keep_the_epsilon_of_the_reference_code() -> None:
    """K2-Thinking's config says 1e-5, which is the outer norms': the model's code gives the inner
    ones no epsilon, and so they have its default.
    """
    pytest.importorskip("transformers")
    import torch
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    from mooncake.model.layers.mla import LATENT_NORM_EPS

    text = {key: value for key, value in published.THINKING.items() if "quant" not in key}
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    with torch.device("meta"):
        layer = DeepseekV3Attention(DeepseekV3Config(**(text | small)), 0)
    assert layer.q_a_layernorm.variance_epsilon == LATENT_NORM_EPS
    assert layer.kv_a_layernorm.variance_epsilon == LATENT_NORM_EPS
