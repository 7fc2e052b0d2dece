"""How near a kernel must come to its reference: the gates that public kernel projects use."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def difference(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return 1 - 2<x, y> / (<x, x> + <y, y>) in float64: 0 for equal tensors (DeepGEMM's)."""
    x, y = got.double().flatten(), wanted.double().flatten()
    norms = float((x * x).sum() + (y * y).sum())
    return 1.0 - 2.0 * float((x * y).sum()) / norms if norms else 0.0


def assert_attention(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """FlashMLA's gate for dense decode: each element near, and the whole of one direction.

    Compiled kernels round probabilities to 16 bits before the second product, and the interpreter
    does not. So on a GPU elements may be further off (0.0078 was seen on an H200); the whole not.
    """
    near = 1 / 64 if DEVICE.type == "cuda" and got.dtype != torch.float32 else 8e-4
    assert torch.isfinite(got).all()
    x, y = got.double(), wanted.double()
    off = (x - y).abs()
    far = (off > near) & (off > (2.01 / 128) * y.abs())
    assert int(far.sum()) == 0, f"{int(far.sum())} elements off, worst {float(off.max()):.3g}"
    assert difference(got, wanted) < 5e-6


def assert_log_sums(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """FlashMLA's gate for the log-sum-exp; rows that see nothing must be -inf in both."""
    empty = torch.isneginf(wanted)
    assert torch.equal(torch.isneginf(got), empty)
    off = (got - wanted)[~empty].abs()
    assert bool(((off < 1e-6) | (off < 8.01 / 65536 * wanted[~empty].abs())).all())


def assert_product(
    got: torch.Tensor, wanted: torch.Tensor, gate: float, element: float = 0.035
) -> None:
    """The gate of matrix products and experts: DeepGEMM's difference and vLLM's element gate."""
    assert torch.isfinite(got).all()
    assert difference(got, wanted) < gate
    torch.testing.assert_close(got.float(), wanted.float(), atol=element, rtol=element)
