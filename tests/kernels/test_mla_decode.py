"""Absorbed decode against its definition: lengths, splits, several tokens, unread NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.paged import paged_span
from mooncake_kernels.reference.paged_batch import PagedBatch, batch_of_spans
from mooncake_kernels.tuning import DecodeTile

from tests.support.kernels.gates import DEVICE, assert_attention, assert_log_sums

GARBAGE_PAGE = 2**30


@dataclass
class Case:
    """Queries, pages that hold NaN wherever no token lies, tables with garbage past their end."""

    q: torch.Tensor
    kv: torch.Tensor
    batch: PagedBatch
    rank: int


def make_case(
    lengths: list[int],
    rows: list[int],
    *,
    heads: int = 4,
    rank: int = 32,
    rope: int = 16,
    page: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    kv = torch.full((len(order), page, rank + rope), float("nan"))
    table = torch.full((len(lengths), max(*needed, 1) + 2), GARBAGE_PAGE, dtype=torch.int32)
    for sequence, length in enumerate(lengths):
        pages = [order.pop() for _ in range(needed[sequence])]
        table[sequence, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for index, place in enumerate(pages):
            count = min(page, length - index * page)
            kv[place, :count] = torch.randn(count, rank + rope, generator=generator)
    q = torch.randn(sum(rows), heads, rank + rope, generator=generator) * (rank + rope) ** -0.5
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    batch = PagedBatch(
        starts.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE),
        max(rows),
    )
    return Case(q.to(DEVICE, dtype), kv.to(DEVICE, dtype), batch, rank)


def check(case: Case, kv_scale: float = 1.0, split_pages: int = 0) -> None:
    out, lse = kernel("mla_decode", "triton")(
        case.q, case.kv, case.batch, case.rank, kv_scale, split_pages=split_pages
    )
    wanted_out, wanted_lse = kernel("mla_decode")(
        case.q.float(), case.kv, case.batch, case.rank, kv_scale
    )
    assert out.dtype == case.q.dtype
    assert_attention(out, wanted_out)
    assert_log_sums(lse, wanted_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_lengths_and_unused_places(dtype: torch.dtype) -> None:
    check(make_case([1, 37, 0, 16, 15], [1, 1, 1, 1, 1], dtype=dtype))


@pytest.mark.parametrize("step", [16, 32])
def test_parts_of_a_page_at_a_time(step: int) -> None:
    case = make_case([70, 33, 0, 64], [1, 3, 1, 2], page=64, seed=20)
    decode = kernel("mla_decode", "triton")
    out, lse = decode(case.q, case.kv, case.batch, case.rank, tile=DecodeTile(2, step))
    wanted_out, wanted_lse = kernel("mla_decode")(case.q.float(), case.kv, case.batch, case.rank)
    assert_attention(out, wanted_out)
    assert_log_sums(lse, wanted_lse)


def test_one_long_context_is_cut_into_several_items() -> None:
    check(make_case([150], [1], seed=1))


@pytest.mark.parametrize("split_pages", [1, 3])
def test_contexts_cut_at_a_fixed_size(split_pages: int) -> None:
    check(make_case([70, 16, 33, 0], [1, 1, 1, 1], seed=2), split_pages=split_pages)


def test_several_tokens_a_sequence_see_only_what_came_before() -> None:
    check(make_case([8, 40, 3], [8, 2, 3], seed=3))


def test_tokens_whose_own_split_lies_wholly_after_them() -> None:
    """With 8 rows and items of one page, the first rows see nothing of the last item."""
    check(make_case([35, 5], [8, 5], seed=4), split_pages=1)


def test_rows_of_no_sequence_and_sequences_of_no_rows() -> None:
    case = make_case([20, 18], [2, 0], seed=5)
    padded = torch.cat((case.q, case.q[:1]))
    case.q = padded
    check(case)
    out, lse = kernel("mla_decode", "triton")(case.q, case.kv, case.batch, case.rank)
    assert float(out[-1].abs().max()) == 0.0
    assert bool(torch.isneginf(lse[-1]).all())


@pytest.mark.parametrize(("heads", "rank", "rope"), [(1, 32, 8), (3, 48, 16), (5, 16, 4)])
def test_shapes_that_are_no_powers_of_two(heads: int, rank: int, rope: int) -> None:
    check(make_case([21, 5], [1, 2], heads=heads, rank=rank, rope=rope, seed=6))


def test_kimi_k2_shape() -> None:
    check(make_case([64, 20], [1, 1], heads=64, rank=512, rope=64, page=64, seed=7))


def test_more_rows_than_a_tile_holds() -> None:
    check(make_case([40], [8], heads=20, seed=8))


def test_fp8_cache_with_its_scale() -> None:
    case = make_case([37, 5, 64], [1, 2, 1], seed=9)
    scale = 0.03
    case.kv = (case.kv.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    check(case, kv_scale=scale)


def test_scores_far_apart_stay_finite() -> None:
    case = make_case([50, 3], [1, 1], dtype=torch.float32, seed=10)
    case.q *= 300
    check(case, split_pages=1)


def test_a_fixed_cut_makes_a_sequence_independent_of_its_neighbours() -> None:
    decode = kernel("mla_decode", "triton")
    case = make_case([70, 33, 16], [1, 1, 1], seed=11)
    together, _ = decode(case.q, case.kv, case.batch, case.rank, split_pages=2)
    alone = PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        case.batch.lengths[1:2].contiguous(),
        case.batch.page_table[1:2].contiguous(),
        1,
    )
    single, _ = decode(case.q[1:2].contiguous(), case.kv, alone, case.rank, split_pages=2)
    assert torch.equal(together[1], single[0])


def test_run_to_run_equal() -> None:
    case = make_case([70, 33], [2, 1], seed=12)
    decode = kernel("mla_decode", "triton")
    first, second = (decode(case.q, case.kv, case.batch, case.rank) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_spans_give_the_same_as_the_absorbed_reference() -> None:
    shape = torch.Size((9, 16, 24))
    generator = torch.Generator().manual_seed(13)
    kv = torch.randn(shape, generator=generator).to(DEVICE)
    spans = [
        paged_span(0, 1, 30, [3, 1], shape),
        paged_span(1, 3, 19, [8, 0], shape),
        paged_span(4, 2, 2, [5], shape),
    ]
    q = torch.randn(6, 3, 24, generator=generator).to(DEVICE) * 0.2
    wanted = kernel("mla_absorbed")(q, kv, spans, 16)
    assert_attention(kernel("mla_absorbed", "triton")(q, kv, spans, 16), wanted)


def test_spans_out_of_order_are_refused() -> None:
    shape = torch.Size((4, 16, 24))
    spans = [paged_span(1, 1, 3, [1], shape), paged_span(0, 1, 3, [2], shape)]
    with pytest.raises(ValueError, match="one after another"):
        batch_of_spans(spans, DEVICE)


def test_pages_the_kernel_cannot_take_are_refused() -> None:
    case = make_case([5], [1], page=16)
    with pytest.raises(ValueError, match="steps of 8 tokens do not cut pages of 16"):
        kernel("mla_decode", "triton")(
            case.q, case.kv, case.batch, case.rank, tile=DecodeTile(2, 8)
        )
    with pytest.raises(ValueError, match="pages of 12 tokens"):
        kernel("mla_decode", "triton")(case.q, case.kv[:, :12], case.batch, case.rank)


@pytest.mark.parametrize("new", [9, 41, 170])
def test_the_absorbed_form_between_verifying_and_prefill(new: int) -> None:
    """More new tokens than are verified, fewer than are worth expanding a long context for."""
    check(make_case([new + 37, new, 3], [new, new, 2], heads=2, rank=16, rope=8, seed=new))
