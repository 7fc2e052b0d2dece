"""Attention in few shapes against the definition: padded keys, pieces that overlap, page tables."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.onednn import linear as onednn
from mooncake_kernels.onednn import mla
from mooncake_kernels.reference.paged import PagedSpan, paged_span

HEADS, RANK, NOPE, ROPE, VALUE = 4, 32, 12, 8, 10
PAGES, BLOCK = 48, 16


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spans_of(rows: list[int], contexts: list[int], kv: torch.Tensor) -> list[PagedSpan]:
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(7)).tolist()
    spans, first = [], 0
    for count, context in zip(rows, contexts, strict=True):
        pages = [order.pop() for _ in range(-(-context // BLOCK))]
        spans.append(paged_span(first, count, context, pages, kv.shape))
        first += count
    return spans


CASES = [
    ([1], [1]),
    ([7], [7]),
    ([9, 1, 3], [200, 64, 65]),
    ([300, 70], [300, 129]),
    ([65, 40], [400, 40]),
]


@pytest.mark.parametrize(("rows", "contexts"), CASES)
def test_both_forms_equal_the_reference(rows: list[int], contexts: list[int]) -> None:
    kv = random(PAGES, BLOCK, RANK + ROPE, seed=1)
    spans = spans_of(rows, contexts, kv)
    q = random(sum(rows), HEADS, RANK + ROPE, seed=2)
    wanted = kernel("mla_absorbed")(q, kv, spans, RANK)
    torch.testing.assert_close(mla.mla_absorbed(q, kv, spans, RANK), wanted, atol=2e-5, rtol=1e-5)

    q = random(sum(rows), HEADS, NOPE + ROPE, seed=3)
    up = random(HEADS, RANK, NOPE, seed=4), random(HEADS, VALUE, RANK, seed=5)
    wanted = kernel("mla_expanded")(q, kv, spans, *up)
    torch.testing.assert_close(mla.mla_expanded(q, kv, spans, *up), wanted, atol=2e-5, rtol=1e-5)


def test_pages_beyond_the_context_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla, "_MOST_SCORES", 1)  # rows one by one
    kv = torch.full((PAGES, BLOCK, RANK + ROPE), float("nan"))
    kv[3], kv[5, :7] = random(BLOCK, RANK + ROPE, seed=1), random(7, RANK + ROPE, seed=2)
    spans = [paged_span(0, 5, BLOCK + 7, [3, 5], kv.shape)]
    q = random(5, HEADS, RANK + ROPE, seed=3)
    wanted = kernel("mla_absorbed")(q, kv, spans, RANK)
    torch.testing.assert_close(mla.mla_absorbed(q, kv, spans, RANK), wanted)


@pytest.mark.parametrize("most", [0, 7, 64, 10**6])
def test_pieces_hold_every_row_and_are_of_few_sizes(most: int) -> None:
    for rows in range(1, 600):
        found = mla.cuts(rows, most)
        held = {row for begin, count in found for row in range(begin, begin + count)}
        assert held == set(range(rows))
        assert {count for _, count in found} <= set(mla.PIECES)
        assert all(count <= max(most, 1) for _, count in found)
        assert sum(count for _, count in found) <= rows + 128
    assert len(mla.cuts(2048 + 232, 10**6)) == 9


def test_the_ladder_of_keys_has_few_rungs_that_waste_little() -> None:
    rungs = {mla.keys_rung(context) for context in range(1, 32769)}
    assert sorted(rungs) == mla.keys_rungs(32768)
    assert len(rungs) == 48
    for context in range(1024, 32769):
        assert mla.keys_rung(context) <= context * (1.25 if context <= 2048 else 1.125)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
def test_products_of_heads_are_padded_to_the_ladder(rows: int) -> None:
    x = random(rows, HEADS, NOPE + ROPE, seed=1)[..., :NOPE]
    weight = random(HEADS, RANK, NOPE, seed=2)
    found = mla.linear_heads(x, weight)
    assert found.shape == (rows, HEADS, RANK)
    torch.testing.assert_close(found, kernel("linear_heads")(x, weight))
    assert mla.linear_heads(x, weight).stride(1) == RANK * onednn.rung(rows)
