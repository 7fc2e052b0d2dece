"""Products of bfloat16 in float32: no further from the truth than those that round in between."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels import wide
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.native import build
from mooncake_kernels.reference.paged import paged_span

CPU = torch.device("cpu")
HEADS, RANK, NOPE, ROPE, VALUE = 4, 32, 12, 8, 10


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_nearer(found: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    assert found.dtype == plain.dtype == torch.bfloat16
    assert (found.double() - exact).norm() <= 1.01 * (plain.double() - exact).norm()
    assert (found.double() - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("rows", [1, 9])
def test_products(rows: int) -> None:
    x, weight, bias = random(rows, 40, seed=1), random(24, 40, seed=2), random(24, seed=3)
    plain = kernel("linear")(x, weight, bias)
    exact = x.double() @ weight.double().T + bias.double()
    assert_nearer(wide.linear(x, weight, bias), plain, exact)
    heads, of_heads = random(rows, HEADS, 40, seed=4), random(HEADS, 24, 40, seed=5)
    op, given = "linear_heads", (heads, of_heads)
    exact = kernel(op)(*(part.double() for part in given))
    assert_nearer(kernel(op, "wide")(*given), kernel(op)(*given), exact)


def test_attention_in_both_forms() -> None:
    kv = random(20, 16, RANK + ROPE, seed=1)
    spans = [
        paged_span(0, 1, 33, [7, 2, 9], kv.shape),
        paged_span(1, 70, 100, [1, 3, 5, 11, 12, 13, 14], kv.shape),
    ]
    q = random(71, HEADS, RANK + ROPE, seed=2)
    exact = kernel("mla_absorbed")(q.double(), kv, spans, RANK)
    plain = kernel("mla_absorbed")(q, kv, spans, RANK)
    assert_nearer(kernel("mla_absorbed", "wide")(q, kv, spans, RANK), plain, exact)

    q = random(71, HEADS, NOPE + ROPE, seed=3)
    up = random(HEADS, RANK, NOPE, seed=4), random(HEADS, VALUE, RANK, seed=5)
    exact = kernel("mla_expanded")(q.double(), kv, spans, *(part.double() for part in up))
    plain = kernel("mla_expanded")(q, kv, spans, *up)
    assert_nearer(kernel("mla_expanded", "wide")(q, kv, spans, *up), plain, exact)


def test_only_where_there_are_no_instructions_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c"}))
    assert wide.is_faster(torch.bfloat16, CPU)
    assert not wide.is_faster(torch.float32, CPU)
    assert not wide.is_faster(torch.bfloat16, torch.device("meta"))
    monkeypatch.setattr(build, "cpu_flags", lambda: build.AVX512.needed)
    assert not wide.is_faster(torch.bfloat16, CPU)
