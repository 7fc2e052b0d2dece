"""Ragged causal attention against its definition, and the expanded form in chunks."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.reference.paged import paged_span

from tests.support.kernels.gates import DEVICE, assert_attention, assert_log_sums


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(
    rows: list[int],
    keys: list[int],
    seen: list[int],
    *,
    widths: tuple[int, int, int] = (32, 16, 32),
    heads: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    generator = torch.Generator().manual_seed(len(rows) + sum(keys))
    nope, rope, value = widths

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def padded(count: int, *shape: int) -> torch.Tensor:
        """NaN lies right behind the last key: reading past the end would show."""
        return torch.cat((random(count, *shape), torch.full((70, *shape), float("nan"))))

    total = sum(keys)
    q = (random(sum(rows), heads, nope + rope) * (nope + rope) ** -0.5).to(DEVICE, dtype)
    parts = padded(total, heads, nope), padded(total, rope), padded(total, heads, value)
    given = ExpandedKeys(*(part.to(DEVICE, dtype)[:total] for part in parts))
    starts = ints([0, *rows]).cumsum(0).int(), ints([0, *keys]).cumsum(0).int()
    batch = RaggedBatch(*starts, ints(seen), max(rows))
    out, lse = kernel("mla_prefill", "triton")(q, given, batch)
    wanted, wanted_lse = kernel("mla_prefill")(q.float(), given, batch)
    assert out.dtype == dtype
    assert_attention(out, wanted)
    assert_log_sums(lse, wanted_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prompts_of_odd_lengths(dtype: torch.dtype) -> None:
    check([5, 37, 1], [5, 37, 1], [1, 1, 1], dtype=dtype)


def test_new_tokens_behind_a_prefix() -> None:
    check([20, 3], [90, 68], [71, 66])


def test_chunks_of_a_prefix_are_seen_whole_or_not_at_all() -> None:
    check([3, 3, 18], [64, 7, 20], [500, -9, -4])


def test_sequences_without_rows_or_keys() -> None:
    check([0, 4, 2, 3], [6, 4, 0, 3], [1, 1, 1, 1])


def test_more_rows_than_one_tile() -> None:
    check([140], [140], [1], heads=1)


def test_widths_that_are_no_powers_of_two() -> None:
    check([9], [30], [22], widths=(24, 8, 40), heads=3)


def test_kimi_k2_widths() -> None:
    check([33], [70], [38], widths=(128, 64, 128))


def test_axes_that_are_not_contiguous_are_refused() -> None:
    x = torch.zeros(4, 2, 16, device=DEVICE)
    keys = ExpandedKeys(x[..., ::2], x[:, 0, ::2], x)
    batch = RaggedBatch(ints([0, 4]), ints([0, 4]), ints([1]), 4)
    with pytest.raises(ValueError, match="contiguous"):
        kernel("mla_prefill", "triton")(x, keys, batch)


@pytest.mark.parametrize("chunk_tokens", [1000, 32, 16])
def test_the_expanded_form_in_chunks(chunk_tokens: int) -> None:
    """Chunks cut prefixes and new tokens alike; spans are put together where they fit."""
    shape, rank, heads = torch.Size((12, 16, 24)), 16, 2
    generator = torch.Generator().manual_seed(chunk_tokens)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(DEVICE)

    kv = random(*shape)
    spans = [
        paged_span(0, 6, 41, [3, 1, 7], shape),
        paged_span(6, 9, 9, [0], shape),
        paged_span(15, 2, 5, [11], shape),
    ]
    q = random(17, heads, 12 + 8) * 0.2
    key_up, value_up = random(heads, rank, 12) * 0.3, random(heads, 10, rank) * 0.3
    wanted = kernel("mla_expanded")(q, kv, spans, key_up, value_up)
    got = kernel("mla_expanded", "triton")(q, kv, spans, key_up, value_up, chunk_tokens)
    assert_attention(got, wanted)
