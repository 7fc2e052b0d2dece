"""Quantizing activations: bit for bit what torch gives, in the interpreter as well."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.triton.quantize import quantize_pairs

from tests.support.kernels.gates import DEVICE


def steps(values: torch.Tensor) -> torch.Tensor:
    """Return how many representable numbers each e4m3 value lies from zero, of either sign."""
    octets = values.view(torch.uint8).int()
    return torch.where(octets > 127, 128 - octets, octets)


@pytest.mark.parametrize(("rows", "width"), [(3, 128), (2, 640), (4, 200), (1, 7), (0, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_same_values_and_factors(rows: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    x = (torch.randn(rows, width, generator=generator) ** 3).to(DEVICE, dtype)
    values, factors = kernel("quantize_rows", "triton")(x)
    wanted, wanted_factors = kernel("quantize_rows")(x)
    torch.testing.assert_close(factors, wanted_factors, rtol=1e-6, atol=0)
    # One division may end on the other side of a tie: at most one step, in very few places.
    off = (steps(values) - steps(wanted)).abs()
    assert int((off > 1).sum()) == 0
    assert int((off > 0).sum()) <= max(1, values.numel() // 2000)


def test_zeros_small_and_large_numbers() -> None:
    x = torch.zeros(3, 128, device=DEVICE)
    x[1, :5] = torch.tensor([448.0, 1e-4, 2**-9, 2**-10, -(2**-7)])
    x[2] = 3e38
    values, factors = kernel("quantize_rows", "triton")(x)
    wanted, wanted_factors = kernel("quantize_rows")(x)
    assert torch.equal(steps(values), steps(wanted))
    assert torch.equal(factors, wanted_factors)


def test_rows_with_a_stride() -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, :256]
    values, _ = kernel("quantize_rows", "triton")(x)
    wanted, _ = kernel("quantize_rows")(x)
    assert float((values.float() - wanted.float()).abs().max()) == 0
    with pytest.raises(ValueError, match="contiguous"):
        kernel("quantize_rows", "triton")(x.t())


def test_rows_of_pairs_in_their_order_and_factors_by_columns() -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    order = torch.tensor([7, 0, 13, 14, 3, 2], dtype=torch.int32, device=DEVICE)
    values, factors = quantize_pairs(x, order, 3)
    wanted, wanted_factors = kernel("quantize_rows", "triton")(x[(order // 3).long()])
    assert torch.equal(steps(values), steps(wanted))
    assert torch.equal(factors, wanted_factors.t())
    assert factors.is_contiguous()
    same, _ = quantize_pairs(x, None, 1)
    assert torch.equal(steps(same), steps(kernel("quantize_rows", "triton")(x)[0]))
