"""What lies between the large products of a layer: norms, rotation, cache write, merge, linear."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel

from tests.support.kernels.gates import DEVICE, assert_attention, assert_log_sums, assert_product

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def rotation(rows: int, half: int, seed: int) -> torch.Tensor:
    angles = random(rows, half, seed=seed) * 3
    return torch.polar(torch.ones_like(angles), angles)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == wanted.dtype
    step = 2**-7 if wanted.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.float(), wanted.float(), rtol=step, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("shape", [(3, 64), (2, 3, 40), (1, 7168), (0, 16)])
def test_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, seed=1).to(dtype), random(shape[-1], seed=2).to(dtype)
    close(kernel("rms_norm", "triton")(x, weight, 1e-6), kernel("rms_norm")(x, weight, 1e-6))


def test_norm_of_a_slice_of_columns() -> None:
    x, weight = random(4, 96, seed=3)[:, 16:80], random(64, seed=4)
    close(kernel("rms_norm", "triton")(x, weight, 1e-5), kernel("rms_norm")(x, weight, 1e-5))


@DTYPES
def test_norm_of_a_sum(dtype: torch.dtype) -> None:
    x, residual = random(5, 72, seed=5).to(dtype), random(5, 72, seed=6).to(dtype)
    weight = random(72, seed=7).to(dtype)
    got, total = kernel("add_rms_norm", "triton")(x, residual, weight, 1e-6)
    wanted, wanted_total = kernel("add_rms_norm")(x, residual, weight, 1e-6)
    assert torch.equal(total, wanted_total)
    close(got, wanted)


@DTYPES
@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation(dtype: torch.dtype, interleaved: bool) -> None:
    x = random(5, 3, 40, seed=10).to(dtype)[..., 16:]  # 12 pairs, a strided view
    turn = rotation(5, 12, seed=11)
    got = kernel("rotate", "triton")(x, turn, interleaved)
    close(got, kernel("rotate")(x, turn, interleaved))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_cache_write(dtype: torch.dtype) -> None:
    rank, rope, rows = 48, 16, 6
    model_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    joined = random(rows, 20 + rank + rope, seed=12).to(model_dtype)
    latent, key = joined[:, 20 : 20 + rank], joined[:, 20 + rank :]
    places = torch.tensor([17, 3, -1, 40, 0, 63], device=DEVICE)
    norm = random(rank, seed=13).to(model_dtype), 1e-6
    scale = 0.01 if dtype == torch.float8_e4m3fn else 1.0
    caches = []
    for backend in ("reference", "triton"):
        kv = torch.full((4, 16, rank + rope), 7.0, device=DEVICE).to(dtype)
        turn = rotation(rows, rope // 2, seed=14)
        kernel("kv_write", backend)(latent, key, turn, places, norm, kv, scale)
        caches.append(kv.float())
    assert int((caches[1].view(64, -1) != 7).any(dim=1).sum()) == 5
    step = {torch.bfloat16: 2**-7, torch.float32: 2e-6}.get(dtype, 2**-3)
    torch.testing.assert_close(caches[1], caches[0], rtol=step, atol=1e-6)


@DTYPES
@pytest.mark.parametrize(("heads", "half"), [(3, 8), (64, 6), (1, 32)])
def test_queries_of_absorbed_attention(dtype: torch.dtype, heads: int, half: int) -> None:
    """Strided queries, written by parts into one tensor; `fixed` by the product of one order."""
    rows, nope, rank = 5, 20, 24
    q = random(rows, heads * (nope + 2 * half) + 7, seed=30).to(dtype)
    q = q[:, 7:].unflatten(1, (heads, nope + 2 * half))
    key_up = (random(heads, rank, nope, seed=31) * nope**-0.5).to(dtype)
    turn = rotation(rows, half, seed=32)
    wanted = kernel("absorb_queries")(q.float(), turn, key_up.float(), 0.13)
    for given in ({}, {"fixed": True}):
        got = kernel("absorb_queries", "triton")(q, turn, key_up, 0.13, **given)
        assert got.is_contiguous()
        assert got.dtype == dtype
        step = 2**-7 if dtype == torch.bfloat16 else 4e-6
        torch.testing.assert_close(got.float(), wanted, rtol=step, atol=step / 16)


def test_no_queries() -> None:
    none = random(0, 2, 12, seed=33)
    got = kernel("absorb_queries", "triton")(
        none, rotation(0, 2, 34), random(2, 5, 8, seed=35), 1.0
    )
    assert tuple(got.shape) == (0, 2, 9)


@DTYPES
@pytest.mark.parametrize("query_width", [40, 100])
def test_norm_of_the_query_beside_the_cache_write(dtype: torch.dtype, query_width: int) -> None:
    rank, rope, rows = 48, 16, 6
    joined = random(rows, query_width + rank + rope, seed=36).to(dtype)
    query, latent, key = joined.split((query_width, rank, rope), dim=1)
    norms = (random(query_width, seed=37).to(dtype), 1e-5), (random(rank, seed=38).to(dtype), 1e-6)
    places = torch.tensor([17, 3, -1, 40, 0, 63], device=DEVICE)
    turn = rotation(rows, rope // 2, seed=39)
    found = []
    for backend in ("reference", "triton"):
        kv = torch.full((4, 16, rank + rope), 7.0, device=DEVICE, dtype=dtype)
        op = kernel("query_and_kv", backend)
        found.append((op(query, norms[0], latent, key, turn, places, norms[1], kv), kv))
    assert found[1][0].is_contiguous()
    close(found[1][0], found[0][0])
    close(found[1][1], found[0][1])


@DTYPES
@pytest.mark.parametrize("shape", [(3, 40), (1, 5000), (0, 8)])
def test_gate(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate_up = (random(shape[0], 2 * shape[1], seed=40) * 3).to(dtype)
    got = kernel("gated", "triton")(gate_up)
    assert got.dtype == dtype
    step = 2**-7 if dtype == torch.bfloat16 else 4e-6
    wanted = kernel("gated")(gate_up)
    torch.testing.assert_close(got.float(), wanted.float(), rtol=step, atol=1e-6)


def test_merge_of_disjoint_keys() -> None:
    outs, lses = random(4, 5, 2, 24, seed=15), random(4, 5, 2, seed=16) * 8
    lses[1, 0] = float("-inf")
    outs[1, 0] = float("nan")
    lses[:, 3] = float("-inf")
    got, lse = kernel("merge_attention", "triton")(outs, lses)
    wanted, wanted_lse = kernel("merge_attention")(outs, lses)
    assert_attention(got, wanted)
    assert_log_sums(lse, wanted_lse)


def test_merge_is_attention_over_all_keys() -> None:
    q, keys, values = random(2, 8, seed=17), random(30, 8, seed=18), random(30, 8, seed=19)
    scores = q @ keys.t()
    parts = [slice(0, 7), slice(7, 9), slice(9, 30)]
    outs = torch.stack([torch.softmax(scores[:, p], -1) @ values[p] for p in parts])
    lses = torch.stack([scores[:, p].logsumexp(-1) for p in parts])
    got, lse = kernel("merge_attention", "triton")(outs[:, :, None], lses[:, :, None])
    assert_attention(got[:, 0], torch.softmax(scores, -1) @ values)
    assert_log_sums(lse[:, 0], scores.logsumexp(-1))


@DTYPES
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(3, 70, 300), (40, 70, 128), (70, 130, 128), (1, 16, 40), (0, 8, 128)],
)
def test_fp8_linear(rows: int, columns: int, width: int, dtype: torch.dtype) -> None:
    """Few rows are quantized by the product, many (or all, by fixed tiles) before it."""
    x = random(rows, width, seed=20).to(dtype)
    weight = (random(columns, width, seed=21) * 50).to(torch.float8_e4m3fn)
    grid = -(-columns // 128), -(-width // 128)
    factors = random(*grid, seed=22).abs() * 1e-3 + 1e-4
    wanted, gate = kernel("linear_fp8")(x, weight, factors), 1e-5
    found = kernel("linear_fp8", "triton")(x, weight, factors)
    assert found.dtype == dtype
    if not rows:
        return
    assert_product(found, wanted, gate=gate)
    fixed = kernel("linear_fp8", "triton")(x, weight, factors, fixed_tiles=True)
    assert_product(fixed, wanted, gate=gate)
    to = random(rows, columns, seed=23).to(dtype)
    total = kernel("linear_fp8")(x, weight, factors, to)
    added = kernel("linear_fp8", "triton")(x, weight, factors, to)
    assert added.data_ptr() == to.data_ptr()
    assert_product(added, total, gate=gate)


def test_fp8_linear_refuses_factors_of_another_shape() -> None:
    x, weight = random(2, 256, seed=23), torch.zeros(8, 256, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="factors"):
        kernel("linear_fp8", "triton")(x, weight, torch.ones(1, 1))


def test_cache_write_touches_nothing_else() -> None:
    """Rows without a place, even of NaN, leave every byte of the pages as it was."""
    rank, rope = 32, 16
    joined = torch.full((3, rank + rope), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    kv = random(4, 16, rank + rope, seed=24).to(torch.bfloat16)
    before = kv.clone()
    places = torch.full((3,), -1, device=DEVICE)
    norm = random(rank, seed=25).to(torch.bfloat16), 1e-6
    turn = rotation(3, rope // 2, seed=26)
    kernel("kv_write", "triton")(joined[:, :rank], joined[:, rank:], turn, places, norm, kv)
    assert torch.equal(kv, before)
