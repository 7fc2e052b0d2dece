"""What oneDNN builds while it works, by its own log."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mooncake_kernels.onednn import linear as onednn

from mooncake.model.checkpoint.making.convert import convert_checkpoint
from tests.support.model.tiny_models import truth

pytestmark = pytest.mark.skipif(
    not onednn.supported(torch.zeros(1, 1, dtype=torch.bfloat16)),
    reason="this machine has no bfloat16 for oneDNN",
)


MIXED_LOAD = """
import torch
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.onednn import mla
from mooncake_kernels.onednn.experts import PackedExperts
from mooncake_kernels.reference.paged import paged_span
generator = torch.Generator().manual_seed(0)
def random(*shape):
    return torch.randn(*shape, generator=generator).bfloat16()
weight, experts = onednn.pack(random(96, 64)), PackedExperts(random(4, 64, 64), random(4, 64, 32))
def dense(rows):
    onednn.linear(random(rows, 64), weight, None)
    onednn.linear_add(random(rows, 64), weight, None, random(rows, 96))
def routed(chosen):
    experts(random(len(chosen), 64), chosen, torch.ones(chosen.shape))
key_up, value_up, kv = random(4, 32, 32), random(4, 32, 32), random(40, 32, 48)
def attend(rows, before):
    pages = torch.randperm(40, generator=generator).tolist()
    spans = [paged_span(0, rows, before + rows, pages, kv.shape)]
    mla.mla_expanded(random(rows, 4, 48), kv, spans, key_up, value_up)
    mla.mla_absorbed(random(rows, 4, 48), kv, spans, 32)
def heads(rows):
    mla.linear_heads(random(rows, 4, 48)[..., :32], key_up)
for rows in onednn.rungs(700):
    dense(rows)
    heads(rows)
for size in mla.keys_rungs(1200):
    mla.multiply_once(key_up, value_up, 16, size)
for rows in onednn.rungs(onednn.MOST_ROWS_OF_PIECE):
    routed(torch.zeros(rows, 1, dtype=torch.int64))
print("warm", flush=True)
for rows in [*range(1, 40), 77, 130, 300, 511, 633, 700]:
    dense(rows)
    routed(torch.randint(4, (rows, 2), generator=generator))
    heads(rows)
    attend(rows, 0)
    attend(rows, 37 * rows % 500)
"""


MODEL = """
import math
import sys
from pathlib import Path
import torch
from mooncake_kernels.native import build
from mooncake.base import KvLayout
from mooncake.model.checkpoint.weights import Checkpoint
from mooncake.model.backends import settle
from mooncake.model.kv_tensors import KvTensors
from mooncake.model.loading import load_model
from mooncake.model.warm_up import Limits, warm_up
from mooncake.launch.host import environment
from tests.support.model.tiny_models import CPU, forward, random_tokens, slot
build.keep_in(environment.cache_dir())  # as servers do
source = Checkpoint.open(Path(sys.argv[3]))
spec = source.spec
backends = settle(sys.argv[1], sys.argv[2], CPU, dtype=torch.bfloat16)
model = load_model(source, dtype=torch.bfloat16, device=CPU, backends=backends)
built, known = warm_up(model, Limits(512, 33, 1500), lambda done, whole: None, math.inf)
assert built == known > 30, (built, known)
print("warm", flush=True)
layout = KvLayout.for_model(spec, block_tokens=16, dtype="bfloat16", weights_revision="test")
kv = KvTensors.allocate(layout, 200, CPU)
pages, shown = torch.randperm(200).tolist(), random_tokens(1500, seed=1)
at = 0
for chunk in (512, 77, 413, 9, 300, 5):  # of one prompt
    forward(model, kv, [slot(1, at, shown[at : at + chunk], pages)])
    at += chunk
for prefix, new in ((64, 200), (130, 33), (1000, 150), (48, 3)):
    forward(model, kv, [slot(2, prefix, shown[prefix : prefix + new], pages)])
decoding = [slot(n, 10 * n, [7], pages[2 * n:][:30]) for n in range(3, 35)]
for num in (1, 2, 3, 7, 16, 31, 32):
    forward(model, kv, decoding[:num])
    forward(model, kv, [*decoding[:num], slot(1, 300, shown[:91], pages)])
print("done", flush=True)
"""


WIDTHS = {
    "num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 64,
    "num_attention_heads": 8, "num_key_value_heads": 8, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 32,
}  # fmt: skip


def log_of(script: str, *words: str) -> tuple[str, str]:
    """Return what oneDNN says of its primitives before "warm" is printed, and after."""
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    before, warm, after = done.stdout.partition("warm\n")
    assert warm
    return before, after


def test_no_primitive_is_built_after_every_size_was_seen_once() -> None:
    """By oneDNN's own log: without ladders this load builds hundreds."""
    before, after = log_of(MIXED_LOAD)
    assert before.count("create:cache_miss") > 20
    assert "create:cache_hit" in after
    assert "create:cache_miss" not in after


@pytest.mark.parametrize(
    ("backend", "weights"),
    [("auto", "bf16"), ("auto", "fp8"), ("auto", "int4"), ("onednn", "bf16")],
)
def test_no_primitive_is_built_after_a_model_is_warmed_up(
    backend: str, weights: str, tmp_path: Path
) -> None:
    """Under chunks of odd lengths, long contexts, cached prefixes, batches of decode, and mixes.
    Quantized weights are multiplied by code of our own: one round with them is enough.
    """
    checkpoint = tmp_path / "bf16"
    truth("yarn", **WIDTHS).bfloat16().save_pretrained(checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    if weights != "bf16":
        checkpoint = convert_checkpoint(checkpoint, tmp_path / weights, weights)
    before, after = log_of(MODEL, backend, backend, str(checkpoint))
    assert before.count("create:cache_miss") > 50
    assert "create:cache_hit" in after
    assert [line for line in after.splitlines() if "create:cache_miss" in line] == []
