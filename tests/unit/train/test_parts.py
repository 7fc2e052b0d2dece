"""The norm against torch's, gradients too."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mooncake.train.parts import Norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = Norm(48, 1e-3)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(7, 48).to(dtype).requires_grad_()
    towards = torch.randn(7, 48).to(torch.bfloat16)
    for made, wanted in (
        (norm(x), torch.float32), (norm(x, torch.bfloat16), torch.bfloat16)
    ):  # fmt: skip
        assert made.dtype == (dtype if wanted == torch.float32 else wanted)
        plain = functional.rms_norm(x.float(), (48,), norm.weight, 1e-3).to(made.dtype)
        torch.testing.assert_close(made, plain)
        ours, theirs = (
            torch.autograd.grad(one, (x, norm.weight), towards.to(made.dtype))
            for one in (made, plain)
        )
        assert [one.dtype for one in ours] == [dtype, torch.float32]
        torch.testing.assert_close(ours, theirs)
