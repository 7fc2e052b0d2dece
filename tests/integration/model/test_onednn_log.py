"""What oneDNN builds while it works, by its own log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from mooncake_kernels.onednn import linear as onednn

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
for size in sorted({mla.keys_rung(keys) for keys in range(1, 1201)}):
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


def test_no_primitive_is_built_after_every_size_was_seen_once() -> None:
    """By oneDNN's own log: without ladders this load builds hundreds."""
    done = subprocess.run(
        [sys.executable, "-c", MIXED_LOAD],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    before, _, after = done.stdout.partition("warm\n")
    assert before.count("create:cache_miss") > 20
    assert "create:cache_hit" in after
    assert "create:cache_miss" not in after
