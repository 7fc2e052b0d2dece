"""Both forms of MLA against plain softmax attention, page tables of every kind, and the choice."""

from __future__ import annotations

import math

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference import mla
from mooncake_kernels.reference.paged import PagedSpan, paged_span

from mooncake.model.layers.mla import absorbed_is_cheaper
from tests.support.model.specs import small_spec

HEADS, RANK, NOPE, ROPE, VALUE = 3, 24, 10, 6, 8
BLOCK, NUM_PAGES = 4, 40


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def shape() -> torch.Size:
    return torch.Size((NUM_PAGES, BLOCK, RANK + ROPE))


def plain(q, cached, key_up, value_up, num_rows: int) -> torch.Tensor:
    """Attention by its definition in float64: keys and values of each head, a mask, a softmax."""
    q, cached, key_up, value_up = (part.double() for part in (q, cached, key_up, value_up))
    latent, shared = cached[:, :RANK], cached[:, RANK:]
    keys = torch.cat(
        (
            torch.einsum("tr,hrn->htn", latent, key_up),
            shared.expand(HEADS, -1, -1),
        ),
        dim=-1,
    )
    values = torch.einsum("tr,hvr->htv", latent, value_up)
    scores = torch.einsum("rhd,htd->hrt", q, keys)
    context = cached.shape[0]
    row = torch.arange(num_rows)[:, None] + context - num_rows
    scores = scores.masked_fill(torch.arange(context)[None] > row, -math.inf)
    return torch.einsum("hrt,htv->rhv", scores.softmax(dim=-1), values)


def absorbed(q, kv, spans: list[PagedSpan], key_up, value_up) -> torch.Tensor:
    latent_q = torch.einsum("rhn,hkn->rhk", q[..., :NOPE], key_up)
    whole = torch.cat((latent_q, q[..., NOPE:]), dim=-1)
    latent = kernel("mla_absorbed")(whole, kv, spans, RANK)
    return torch.einsum("rhk,hvk->rhv", latent, value_up)


TABLES = {
    "in order": list(range(30)),
    "backwards": list(range(29, -1, -1)),
    "runs and crumbs": [10, 11, 12, 13, 14, 2, 7, 30, 31, 32, 33, 0, 20, 21, 22, 23],
}


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("rows", [(1,), (5,), (1, 1, 1), (17, 1, 40)])
def test_both_forms_equal_the_definition(table: str, rows, generator, monkeypatch) -> None:
    monkeypatch.setattr(mla, "_SCORES_PER_CHUNK", 500)  # several chunks of queries
    monkeypatch.setattr(mla, "_MAX_CHUNK_ROWS", 7)
    kv = torch.full(shape(), math.nan)
    q = torch.randn(sum(rows), HEADS, NOPE + ROPE, generator=generator)
    key_up = torch.randn(HEADS, RANK, NOPE, generator=generator) / RANK**0.5
    value_up = torch.randn(HEADS, VALUE, RANK, generator=generator)
    spans, expected, first = [], [], 0
    free = [page for page in range(NUM_PAGES) if page not in TABLES[table][:16]]
    tables = {0: TABLES[table], 1: free[:3], 2: free[3:13]}
    contexts = {0: 63, 1: 11, 2: 40}
    for number, num_rows in enumerate(rows):
        pages, context = tables[number], contexts[number]
        cached = torch.randn(context, RANK + ROPE, generator=generator)
        flat = torch.tensor(pages)[torch.arange(context) // BLOCK] * BLOCK
        kv.view(-1, RANK + ROPE)[flat + torch.arange(context) % BLOCK] = cached
        spans.append(paged_span(first, num_rows, context, pages, shape()))
        rows_of_q = q[first : first + num_rows]
        expected.append(plain(rows_of_q, cached, key_up, value_up, num_rows))
        first += num_rows
    wanted = torch.cat(expected).float()
    found = absorbed(q, kv, spans, key_up, value_up)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    found = kernel("mla_expanded")(q, kv, spans, key_up, value_up)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_kv_of_another_dtype_is_converted(generator) -> None:
    kv = torch.randn(shape(), generator=generator).bfloat16()
    q = torch.randn(2, HEADS, NOPE + ROPE, generator=generator)
    key_up = torch.randn(HEADS, RANK, NOPE, generator=generator) / RANK**0.5
    value_up = torch.randn(HEADS, VALUE, RANK, generator=generator)
    spans = [paged_span(0, 2, 9, [3, 1, 2], shape())]
    exact = kernel("mla_expanded")(q, kv.float(), spans, key_up, value_up)
    assert torch.equal(kernel("mla_expanded")(q, kv, spans, key_up, value_up), exact)
    torch.testing.assert_close(absorbed(q, kv, spans, key_up, value_up), exact)


@pytest.mark.parametrize("pages", [list(range(8)), [5, 6, 7, 8, 1, 3, 20, 21, 22, 23]])
def test_a_span_reads_exactly_its_context_in_order(pages: list[int]) -> None:
    kv = torch.arange(NUM_PAGES * BLOCK).view(NUM_PAGES, BLOCK, 1)
    for context in range(1, len(pages) * BLOCK + 1):
        span = paged_span(0, 1, context, pages, kv.shape)
        read = torch.cat(span.keys(kv)).flatten().tolist()
        expected = [page * BLOCK + offset for page in pages for offset in range(BLOCK)]
        assert read == expected[:context]


def test_neighbouring_pages_are_read_without_a_copy() -> None:
    kv = torch.zeros(shape())
    parts = paged_span(0, 1, 4 * BLOCK - 1, [5, 6, 7, 8], shape()).keys(kv)
    assert len(parts) == 1
    assert parts[0].data_ptr() == kv[5].data_ptr()


@pytest.mark.parametrize(
    ("context", "pages"), [(5, [1]), (4, [NUM_PAGES]), (4, [-1]), (1, []), (9, [1, 2])]
)
def test_bad_page_tables_are_refused(context: int, pages: list[int]) -> None:
    with pytest.raises(ValueError, match="page"):
        paged_span(0, 1, context, pages, shape())


def test_pages_past_the_context_are_not_looked_at() -> None:
    assert paged_span(0, 1, 4, [3, 10_000], shape()).pages.tolist() == [3]


def test_the_choice_of_form() -> None:
    rule = absorbed_is_cheaper(
        small_spec(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    )
    assert rule(1, 1)
    assert rule(1, 100_000)
    assert rule(8, 100_000)
    assert rule(64, 2048)
    assert not rule(2048, 2048)
    assert not rule(512, 100_000)
    # Over a long prefix the forms cost the same at 2 * 512 * 256 / (2176 - 640) = 171 new tokens.
    assert rule(165, 1_000_000)
    assert not rule(180, 1_000_000)
