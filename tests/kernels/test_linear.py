"""Products with fixed tiles against the library's: odd shapes, strides, bias, empty batches."""

from __future__ import annotations

import pytest
import torch
from mooncake_kernels.dispatch import kernel

from tests.support.kernels.gates import DEVICE


def normal(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE)


@pytest.mark.parametrize(("rows", "width", "columns"), [(1, 5, 3), (70, 130, 65), (0, 8, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(rows: int, width: int, columns: int, dtype: torch.dtype) -> None:
    joined = normal(rows, 2 * width, seed=rows).to(dtype)
    x = joined[:, width:]
    weight, bias = normal(columns, width, seed=2).to(dtype), normal(columns, seed=3).to(dtype)
    for args in ((x, weight), (x, weight, bias)):
        found, wanted = kernel("linear", "triton")(*args), kernel("linear")(*args)
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        gate = 1e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found, wanted, atol=gate, rtol=gate)


def test_heads_of_a_strided_view() -> None:
    q = normal(9, 3, 40, seed=1)[..., :24]
    weight = normal(3, 17, 24, seed=2)
    wanted = torch.einsum("rhi,hoi->rho", q, weight)
    for fixed in (True, False):
        found = kernel("linear_heads", "triton")(q, weight, fixed=fixed)
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        place = torch.full((9, 3, 21), float("nan"), device=DEVICE)
        kernel("linear_heads", "triton")(q, weight, place[..., 2:19], 0.5, fixed=fixed)
        torch.testing.assert_close(place[..., 2:19], wanted / 2, atol=1e-4, rtol=1e-4)
        assert int(place.isnan().sum()) == 9 * 3 * 4
    torch.testing.assert_close(kernel("linear_heads")(q, weight), wanted, atol=1e-4, rtol=1e-4)
