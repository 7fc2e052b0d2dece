"""Ops of fixed order against the references; their bits depend on nothing but their row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mooncake_kernels.dispatch import FIXED, kernel
from mooncake_kernels.native import fixed
from mooncake_kernels.reference.experts import gated
from mooncake_kernels.reference.paged import paged_span
from mooncake_kernels.reference.router import Routing

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    for number in (1, 3):
        torch.set_num_threads(number)
        yield number
    torch.set_num_threads(before)


def gate(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


@DTYPES
@pytest.mark.parametrize(("rows", "width", "outs"), [(1, 5, 3), (70, 130, 65), (0, 8, 8)])
def test_a_product(rows: int, width: int, outs: int, dtype: torch.dtype) -> None:
    x = random(rows, 2 * width, seed=1, dtype=dtype)[:, width:]
    weight, bias = random(outs, width, seed=2, dtype=dtype), random(outs, seed=3, dtype=dtype)
    for args in ((x, weight), (x, weight, bias)):
        wide = [part.double() for part in args]
        found = kernel("linear", FIXED)(*args)
        assert found.dtype == dtype
        scale = gate(dtype) * width**0.5
        torch.testing.assert_close(found.double(), kernel("linear")(*wide), atol=scale, rtol=scale)
    for _ in threads():
        whole = fixed.product(x, weight)[0]
        for row in range(rows):
            assert torch.equal(fixed.product(x[row : row + 1], weight)[0], whole[row : row + 1])
        assert torch.equal(fixed.product(x, weight[1:])[0], whole[:, 1:])


@DTYPES
def test_sums_of_slabs_are_those_of_any_number_of_ranks(dtype: torch.dtype) -> None:
    x, weight = random(9, 16 * 6, seed=1, dtype=dtype), random(20, 16 * 6, seed=2, dtype=dtype)
    whole = fixed.added(fixed.product(x, weight, 16))
    for num_ranks in (1, 2, 4, 8, 16):
        cut = [side.chunk(num_ranks, dim=1) for side in (x, weight)]
        parts = [
            fixed.added(fixed.product(*mine, 16 // num_ranks)) for mine in zip(*cut, strict=True)
        ]
        assert torch.equal(fixed.added(parts), whole)
    torch.testing.assert_close(whole, (x.double() @ weight.double().T).float(), atol=1e-4, rtol=0)


def test_any_number_of_parts_is_added() -> None:
    for count in range(1, 9):
        parts = [torch.tensor([2.0**number]) for number in range(count)]
        assert fixed.added(parts).tolist() == [2.0**count - 1]


@DTYPES
def test_heads(dtype: torch.dtype) -> None:
    q, weight = (
        random(9, 3, 40, seed=1, dtype=dtype)[..., :24],
        random(3, 17, 24, seed=2, dtype=dtype),
    )
    op = kernel("linear_heads", FIXED)
    found = op(q, weight)
    wanted = kernel("linear_heads")(q.double(), weight.double())
    scale = 5 * gate(dtype)
    torch.testing.assert_close(found.double(), wanted, atol=scale, rtol=scale)
    assert torch.equal(op(q[4:5, 1:2], weight[1:2]), found[4:5, 1:2])


@DTYPES
def test_a_gate(dtype: torch.dtype) -> None:
    gate_up = 4 * random(5, 2 * 21, seed=1, dtype=dtype)
    found = fixed.gated(gate_up)
    torch.testing.assert_close(found, gated(gate_up), atol=gate(dtype), rtol=gate(dtype))
    gate_half, up = gate_up.chunk(2, dim=1)
    part = torch.cat((gate_half[2:3, 5:9], up[2:3, 5:9]), dim=1)
    assert torch.equal(fixed.gated(part), found[2:3, 5:9])


@pytest.mark.parametrize("groups", [1, 4])
def test_a_choice(groups: int) -> None:
    routing = Routing(top_k=3, num_groups=groups, top_groups=2, normalize=True, scale=2.5)
    logits, bias = random(13, 20, seed=1), random(20, seed=2)
    experts, weights = kernel("choose", FIXED)(logits, bias, routing)
    wanted, wanted_weights = kernel("choose")(logits, bias, routing)
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, wanted_weights)
    alone = kernel("choose", FIXED)(logits[6:7], bias, routing)
    assert torch.equal(alone[0], experts[6:7])
    assert torch.equal(alone[1], weights[6:7])


@DTYPES
def test_experts(dtype: torch.dtype) -> None:
    num, inner, hidden, tokens = 6, 32, 40, 23
    gate_up = random(num, 2 * inner, hidden, seed=1, dtype=dtype) * hidden**-0.5
    down = random(num, hidden, inner, seed=2, dtype=dtype) * inner**-0.5
    x = random(tokens, hidden, seed=3, dtype=dtype)
    experts = random(tokens, num, seed=4).topk(2, dim=-1).indices
    weights = torch.softmax(random(tokens, 2, seed=5), dim=-1)
    layer = kernel("experts", FIXED)(gate_up, down)
    found = layer(x, experts, weights)
    assert found.dtype == dtype
    wanted = kernel("experts")(gate_up.float(), down.float())(x.float(), experts, weights)
    torch.testing.assert_close(found.float(), wanted, atol=gate(dtype), rtol=gate(dtype))
    choices = layer.choices(x, experts, weights, slabs=16)
    torch.testing.assert_close(choices.sum(1), wanted, atol=gate(dtype), rtol=gate(dtype))
    row = slice(7, 8)
    alone = layer.choices(x[row], experts[row], weights[row], slabs=16)
    assert torch.equal(alone, choices[row])
    halves = [
        layer_of_half.choices(x, experts, weights, slabs=8)
        for layer_of_half in (
            kernel("experts", FIXED)(
                gate_up.view(num, 2, inner, hidden)[:, :, half]
                .reshape(num, -1, hidden)
                .contiguous(),
                down[:, :, half].contiguous(),
            )
            for half in (slice(0, inner // 2), slice(inner // 2, inner))
        )
    ]
    assert torch.equal(halves[0] + halves[1], choices)
    # Some experts in one place, the others in another: adding what both make changes no bit.
    places = [
        kernel("experts", FIXED)(gate_up[mine], down[mine]).choices(
            x, torch.where((mine[0] <= experts) & (experts <= mine[-1]), experts - mine[0], -1),
            weights, slabs=16,
        )
        for mine in (list(range(4)), list(range(4, num)))
    ]  # fmt: skip
    assert torch.equal((places[0] + places[1]).view(torch.int32), choices.view(torch.int32))


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads", [1, 8, 11])
def test_attention(heads: int, pages: torch.dtype) -> None:
    rank, rope, page = 40, 16, 16
    kv = random(12, page, rank + rope, seed=1).to(pages)
    spans = [
        paged_span(0, 1, 37, [3, 9, 2], kv.shape),
        paged_span(1, 20, 33, [7, 0, 11], kv.shape),
        paged_span(21, 1, 1, [5], kv.shape),
    ]
    q = random(22, heads, rank + rope, seed=2) * (rank + rope) ** -0.5
    op = kernel("mla_absorbed", FIXED)
    found = op(q, kv, spans, rank)
    wanted = kernel("mla_absorbed")(q, kv, spans, rank)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    # A row alone, a head alone, and the last rows of a prompt that was cut.
    assert torch.equal(op(q[:1], kv, spans[:1], rank), found[:1])
    assert torch.equal(op(q[:, -1:], kv, spans, rank), found[:, -1:])
    later = paged_span(0, 6, 33, [7, 0, 11], kv.shape)
    assert torch.equal(op(q[15:21], kv, [later], rank), found[15:21])
