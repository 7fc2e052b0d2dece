"""Absorbed decode against its definition: lengths, splits, several tokens, unread NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.paged import PagedSpan, paged_span
from mooncake_kernels.reference.paged_batch import PagedBatch, batch_of_spans
from mooncake_kernels.triton import mla, mla_decode
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


@pytest.mark.parametrize(("heads", "tile_rows"), [(4, 16), (20, 32), (40, 64)])
def test_tiles_of_few_and_many_rows(heads: int, tile_rows: int) -> None:
    case = make_case([70, 33, 0], [1, 1, 1], heads=heads, page=64, seed=23)
    check(case)
    assert {key[3] for key in case.batch.plans} == {tile_rows}


def test_widths_that_fill_no_tile() -> None:
    check(make_case([37, 5], [1, 2], rank=24, rope=8, seed=24))


def test_one_long_context_is_cut_into_several_items() -> None:
    check(make_case([150], [1], seed=1))


@pytest.mark.parametrize("split_pages", [1, 3])
def test_contexts_cut_at_a_fixed_size(split_pages: int) -> None:
    check(make_case([70, 16, 33, 0], [1, 1, 1, 1], seed=2), split_pages=split_pages)


def test_strips_taken_in_groups_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_decode, "_COMBINE_PROGRAMS", 16)  # in the interpreter each costs
    case = make_case([70, 33, 0], [1, 20, 1], seed=21)
    decode = kernel("mla_decode", "triton")
    whole = decode(case.q, case.kv, case.batch, case.rank, split_pages=2)
    monkeypatch.setattr(mla_decode, "_SLOT_BYTES", 2 * 3 * 64 * case.rank * 4)
    case.batch.plans.clear()
    pieces = decode(case.q, case.kv, case.batch, case.rank, split_pages=2)
    assert len(case.batch.plans) == 4
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_more_sequences_than_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_decode, "_SEQUENCES_AT_ONCE", 2)
    check(make_case([37, 5, 0, 64, 16, 20], [1, 2, 1, 1, 0, 3], seed=22))
    check(make_case([37, 5, 0, 64, 16, 20], [1, 2, 1, 1, 0, 3], seed=22), split_pages=1)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([4096] * 70, [1] * 70),
        ([500, 8000, 3000, 7777], [1] * 4),
        ([131072] + [4000] * 3, [1, 171, 1, 1]),
    ],
)
def test_programs_share_pages_out_equally(lengths: list[int], rows: list[int]) -> None:
    """Whatever is in the batch: a long context is not walked by one program beside a chunk."""
    page, heads = 64, 64
    batch = PagedBatch(
        torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).to(torch.int32).to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        torch.zeros(len(lengths), 1, dtype=torch.int32, device=DEVICE),
        max(rows),
    )
    first_unit, _ = mla_decode._plan(batch, heads, page, 64, 0, (0, 2**30))
    strips = [count * heads // 64 for count in rows]
    units = [tiles * -(-length // page) for tiles, length in zip(strips, lengths, strict=True)]
    assert first_unit.tolist() == torch.tensor([0, *units]).cumsum(0).tolist()
    # 132 programs take ranges of `each`: what the longest walks is within a page of the mean.
    assert -(-sum(units) // 132) * 132 <= sum(units) + 132


def test_scratch_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 63 decodes a chunk of 171 tokens took 1.5 GB, one of 2,048 with fixed cuts 17 GB."""
    made = []
    empty = torch.empty

    def counted(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(math.prod(shape) * dtype.itemsize)
        return empty(*shape, dtype=dtype, device="meta")

    launches = {"_schedule": 0, "_attend": 0, "_combine": 0}
    for name in launches:
        monkeypatch.setattr(mla_decode, name, Grids(launches, name))
    monkeypatch.setattr(mla_decode.torch, "empty", counted)
    for chunk, split_pages in ((171, 0), (2048, 64)):
        rows = [1] * 63 + [chunk]
        batch = PagedBatch(
            *(empty(shape, dtype=torch.int32, device="meta") for shape in (65, 64, (64, 4096))),
            chunk,
        )  # fmt: skip
        q = empty(sum(rows), 64, 576, dtype=torch.bfloat16, device="meta")
        kv = empty(10, 64, 576, dtype=torch.bfloat16, device="meta")
        made.clear()
        kernel("mla_decode", "triton")(q, kv, batch, 512, split_pages=split_pages)
        answer = sum(rows) * 64 * (512 * 2 + 4)
        assert sum(made) - answer < 300e6
    assert 0 < launches["_attend"] < 10000


class Grids:
    """Stands for a kernel: counts its launches and looks at their grids."""

    def __init__(self, launches: dict[str, int], name: str) -> None:
        self._launches, self._name = launches, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size <= 65535 for size in grid[1:])
        self._launches[self._name] += 1
        return lambda *args, **options: None


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


def test_spans_of_one_row_are_apart_where_their_tiles_are_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And described once for all layers: tables of 64 x 128k tokens are long."""
    shape, tiles = torch.Size((9, 16, 24)), []
    batches = mla.batch_of_spans

    def noted(spans: list[PagedSpan], device: torch.device) -> PagedBatch:
        tiles.append([span.num_rows for span in spans])
        return batches(spans, device)

    monkeypatch.setattr(mla, "batch_of_spans", noted)
    spans = [
        paged_span(0, 1, 30, [3, 1], shape),
        paged_span(1, 1, 16, [2], shape),
        paged_span(2, 5, 19, [8, 0], shape),
    ]
    q = torch.randn(7, 3, 24, generator=torch.Generator().manual_seed(14)).to(DEVICE) * 0.2
    kv = torch.randn(shape, generator=torch.Generator().manual_seed(15)).to(DEVICE)
    for _layer in range(2):
        found = kernel("mla_absorbed", "triton")(q, kv, spans, 16)
        assert_attention(found, kernel("mla_absorbed")(q, kv, spans, 16))
    assert tiles == [[1, 1], [5]]
    with pytest.raises(ValueError, match="one after another"):
        kernel("mla_absorbed", "triton")(q[1:], kv, spans[1:], 16)
