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
from mooncake_kernels.onednn.experts import PackedExperts
generator = torch.Generator().manual_seed(0)
def random(*shape):
    return torch.randn(*shape, generator=generator).bfloat16()
weight, experts = onednn.pack(random(96, 64)), PackedExperts(random(4, 64, 64), random(4, 64, 32))
def dense(rows):
    onednn.linear(random(rows, 64), weight, None)
    onednn.linear_add(random(rows, 64), weight, None, random(rows, 96))
def routed(chosen):
    experts(random(len(chosen), 64), chosen, torch.ones(chosen.shape))
for rows in onednn.rungs(700):
    dense(rows)
for rows in onednn.rungs(onednn.MOST_ROWS_OF_PIECE):
    routed(torch.zeros(rows, 1, dtype=torch.int64))
print("warm", flush=True)
for rows in [*range(1, 40), 77, 130, 300, 511, 633, 700]:
    dense(rows)
    routed(torch.randint(4, (rows, 2), generator=generator))
"""


def test_no_primitive_is_built_after_every_size_was_seen_once() -> None:
    """By oneDNN's own log: without the ladder this load builds more than a hundred."""
    done = subprocess.run(
        [sys.executable, "-c", MIXED_LOAD],
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    before, _, after = done.stdout.partition("warm\n")
    assert before.count("create:cache_miss") > 20
    assert "create:cache_hit" in after
    assert "create:cache_miss" not in after
