"""Routed experts in three weight formats against their definitions, both ways round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.experts_quantized import widen_int4
from mooncake_kernels.reference.fp8 import widen_blocks
from mooncake_kernels.triton import experts as experts_module
from mooncake_kernels.triton.int4 import pack_int4
from mooncake_kernels.tuning import ExpertsConfig, ProductTile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.kernels.gates import DEVICE, assert_product

TILE = ProductTile(block_w=32, block_k=32, group_t=2, programs=1, warps=4, stages=2)
WHOLE_WARPS = replace(TILE, block_w=64)
"""INT4 codes lie as the registers of four warps hold them, 64 rows."""
SWAPPED = ExpertsConfig(16, True, TILE, TILE)
STRAIGHT = ExpertsConfig(16, False, TILE, replace(TILE, block_w=64))
BOTH = pytest.mark.parametrize("config", [SWAPPED, STRAIGHT], ids=["swapped", "straight"])


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def routing(tokens: int, k: int, num: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = random(tokens, num, seed=seed)
    weights = torch.softmax(random(tokens, k, seed=seed + 1), dim=-1)
    return scores.topk(k, dim=-1).indices, weights


def plain(num: int, inner: int, hidden: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = random(num, 2 * inner, hidden, seed=seed) * hidden**-0.5
    return gate_up, random(num, hidden, inner, seed=seed + 1) * inner**-0.5


def fp8(values: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = -(-values.shape[-2] // 128), -(-values.shape[-1] // 128)
    factors = random(*values.shape[:-2], rows, columns, seed=seed).abs() * 0.01 + 0.002
    return (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), factors


def int4(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    *lead, columns = shape
    words = torch.randint(-(2**31), 2**31, (*lead, columns // 8), generator=generator)
    scales = torch.rand(*lead, -(-columns // 32), generator=generator) * 0.05 + 0.01
    return words.to(torch.int32).to(DEVICE), scales.to(DEVICE, dtype)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain(config: ExpertsConfig, dtype: torch.dtype) -> None:
    gate_up, down = (part.to(dtype) for part in plain(5, 40, 72, seed=1))
    x = random(9, 72, seed=3).to(dtype)
    experts, weights = routing(9, 2, 5, seed=4)
    fast = kernel("experts", "triton")(gate_up, down)
    fast.config = config
    wanted = kernel("experts")(gate_up.float(), down.float())(x.float(), experts, weights)
    got = fast(x, experts, weights)
    assert got.dtype == dtype
    assert_product(got, wanted, gate=1e-5 if dtype == torch.bfloat16 else 1e-10)


@BOTH
@pytest.mark.parametrize("inner", [136, 144], ids=["by pointers", "by boxes"])
def test_fp8_blocks(config: ExpertsConfig, inner: int) -> None:
    """Boxes of many rows, where columns are whole 16 bytes; tiles that end inside a box."""
    hidden = 160
    gate_up, down = plain(3, inner, hidden, seed=5)
    weights_fp8 = (*fp8(gate_up.view(3, 2, inner, hidden), 6), *fp8(down, 7))
    x = random(4, hidden, seed=8).to(torch.bfloat16)
    experts, weights = routing(4, 2, 3, seed=9)
    fast = kernel("experts_fp8", "triton")(*weights_fp8)
    fast.config = config
    assert fast._by_boxes(config) == (inner == 144 and not config.swap)
    wanted = kernel("experts_fp8")(*weights_fp8)(x, experts, weights)
    assert_product(fast(x, experts, weights), wanted, gate=1e-4)


@pytest.mark.parametrize("programs", [1, 5, 7, 60])
def test_products_shared_out_by_steps(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of steps that end inside products, on their borders, and before any work is left."""
    monkeypatch.setattr(experts_module, "num_programs", lambda device: programs)
    monkeypatch.setattr(experts_module, "_FEW_PRODUCTS", 1000)
    launched = []
    ranges = experts_module.grouped.gate_up_ranges_kernel

    class Seen:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.append(grid)
            return ranges[grid]

    monkeypatch.setattr(experts_module.grouped, "gate_up_ranges_kernel", Seen())
    gate_up, down = plain(4, 40, 200, seed=41)
    x = random(6, 200, seed=42)
    experts, weights = routing(6, 2, 4, seed=43)
    wanted = kernel("experts")(gate_up, down)(x, experts, weights)
    fast = kernel("experts", "triton")(gate_up, down)
    fast.config = SWAPPED
    got = fast(x, experts, weights)
    assert launched == [(programs,)]
    assert_product(got, wanted, 1e-10)
    assert torch.equal(got, fast(x, experts, weights)), "parts are added in one order"
    fast.fix_tiles(1)
    assert_product(fast(x, experts, weights), wanted, 1e-10)
    assert len(launched) == 2, "where bits may not depend on the batch no product is cut"


def test_fp8_is_near_the_widened_weights() -> None:
    """The definition itself: quantized activations cost little against plain bf16 products."""
    gate_up, down = plain(3, 64, 256, seed=10)
    first, second = fp8(gate_up.view(3, 2, 64, 256), 11), fp8(down, 12)
    x = random(6, 256, seed=13)
    experts, weights = routing(6, 2, 3, seed=14)
    quantized = kernel("experts_fp8")(*first, *second)(x, experts, weights)
    wide = kernel("experts")(widen_blocks(*first).flatten(1, 2), widen_blocks(*second))
    assert_product(quantized, wide(x, experts, weights), gate=2e-3, element=0.2)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int4_groups(config: ExpertsConfig, dtype: torch.dtype) -> None:
    inner, hidden = 64, 160
    stored = (*int4((4, 2, inner, hidden), 15, dtype), *int4((4, hidden, inner), 16, dtype))
    x = (random(7, hidden, seed=17) * 0.1).to(dtype)
    experts, weights = routing(7, 3, 4, seed=18)
    fast = kernel("experts_int4", "triton")(*stored)
    fast.config = replace(config, gate_up=WHOLE_WARPS, down=replace(WHOLE_WARPS, block_w=128))
    wide = [
        part.float() for part in (widen_int4(*stored[:2]).flatten(1, 2), widen_int4(*stored[2:]))
    ]
    wanted = kernel("experts")(*wide)(x.float(), experts, weights)
    gate = 1e-5 if dtype == torch.bfloat16 else 1e-10
    assert_product(fast(x, experts, weights), wanted, gate)
    reference = kernel("experts_int4")(*stored)(x, experts, weights)
    assert_product(reference, wanted, 2 * gate)  # rounds each expert's output and its weight


@pytest.mark.parametrize("name", ["experts", "experts_fp8", "experts_int4"])
def test_experts_change_places_by_their_slots(name: str) -> None:
    """What lies in two slots is exchanged: rows of the one are computed by the other's number."""
    inner, hidden = 64, 128
    gate_up, down = plain(3, inner, hidden, seed=51)
    stored = {
        "experts": (gate_up, down),
        "experts_fp8": (*fp8(gate_up.view(3, 2, inner, hidden), 52), *fp8(down, 53)),
        "experts_int4": (
            *int4((3, 2, inner, hidden), 54, torch.float32),
            *int4((3, hidden, inner), 55, torch.float32),
        ),
    }[name]
    fast = kernel(name, "triton")(*stored)
    x = random(5, hidden, seed=56)
    experts, weights = routing(5, 2, 3, seed=57)
    wanted = fast(x, experts, weights)
    places = [fast.slot(number) for number in (0, 2)]
    kept = [[part.clone() for part in parts] for parts in places]
    for parts, others in zip(places, reversed(kept), strict=True):
        for part, other in zip(parts, others, strict=True):
            part.copy_(other)
    assert not torch.equal(fast(x, experts, weights), wanted)
    assert_product(fast(x, 2 - experts, weights), wanted, 1e-10)


def test_int4_words_hold_the_codes_of_a_threads_registers() -> None:
    """Where PTX says that a thread of wgmma holds the numbers of a 64 x 16 tile of its first
    operand; rows and columns that are filled up are zeros.
    """
    rows, columns = 70, 160
    words, scales = int4((rows, columns), 19, torch.float32)
    packed, by_step = pack_int4(words, scales)
    assert packed.shape == (2, 2, 256, 4)
    assert by_step.shape == (2, 128, 4)
    wide = torch.zeros(128, 256, device=DEVICE)
    wide[:rows, :columns] = widen_int4(words, scales)
    row, column = torch.arange(128)[:, None], torch.arange(256)[None, :]
    lane = row % 8 * 4 + column % 8 // 2
    thread = row // 64 * 128 + row % 64 // 16 * 32 + lane
    register = row % 16 // 8 + 2 * (column % 16 // 8)
    word = packed.cpu()[column // 128, column % 128 // 64, thread, column % 64 // 16]
    codes = (word >> (4 * register + 16 * (column % 2))) & 15
    factors = by_step.cpu()[column // 128, row, column % 128 // 32]
    assert torch.equal((codes - 8) * factors, wide.cpu())


def test_int4_is_packed_in_place_a_matrix_at_a_time() -> None:
    """A layer of Kimi-K2's has no room for its experts twice."""
    stored = (
        *int4((3, 2, 128, 256), 33, torch.bfloat16),
        *int4((3, 256, 128), 34, torch.bfloat16),
    )
    wanted = kernel("experts_int4", "triton")(*(part.clone() for part in stored))
    with Allocations() as made:
        packed = kernel("experts_int4", "triton")(*stored, in_place=True)
    assert made.largest <= 256 * 128, "codes of one matrix, a byte each"
    for own, other, given in zip(weights(packed), weights(wanted), stored, strict=True):
        assert own.data_ptr() == given.data_ptr()
        assert torch.equal(own, other)


def weights(experts: Any) -> list[torch.Tensor]:
    return [
        part
        for product in (experts._gate_up, experts._down)
        for part in (product.values, product.factors)
    ]


class Allocations(TorchDispatchMode):
    """The largest tensor, in bytes, that was made anew."""

    largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = {each.untyped_storage().data_ptr() for each in tree_leaves(args) if _is(each)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if _is(each) and each.untyped_storage().data_ptr() not in before:
                self.largest = max(self.largest, each.untyped_storage().nbytes())
        return made


def _is(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def test_codes_are_widened_exactly_by_an_or() -> None:
    """What the compiled kernel does in place of a conversion, which the interpreter does not."""
    codes = torch.arange(16, dtype=torch.int16)
    widened = (codes | 0x4300).view(torch.bfloat16) - 136
    assert torch.equal(widened, (codes - 8).to(torch.bfloat16))


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_rule_of_thumb_when_there_is_no_table(tokens: int) -> None:
    gate_up, down = plain(2, 16, 32, seed=20)
    x = random(tokens, 32, seed=21)
    experts, weights = routing(tokens, 1, 2, seed=22)
    wanted = kernel("experts")(gate_up, down)(x, experts, weights)
    assert_product(kernel("experts", "triton")(gate_up, down)(x, experts, weights), wanted, 1e-10)


def test_experts_of_other_ranks_add_nothing() -> None:
    gate_up, down = plain(4, 16, 32, seed=23)
    x = random(5, 32, seed=24)
    experts, weights = routing(5, 2, 4, seed=25)
    wanted = kernel("experts")(gate_up, down)(x, experts, weights)
    halves = []
    for first in (0, 2):
        mine = kernel("experts", "triton")(gate_up[first : first + 2], down[first : first + 2])
        halves.append(mine(x, experts - first, weights))
    assert_product(halves[0] + halves[1], wanted, 1e-10)


def test_no_tokens_and_one_expert_for_all() -> None:
    gate_up, down = plain(3, 16, 32, seed=26)
    fast = kernel("experts", "triton")(gate_up, down)
    none = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert tuple(fast(random(0, 32, seed=1), none, none.float()).shape) == (0, 32)
    x, experts = random(20, 32, seed=27), torch.full((20, 1), 1, device=DEVICE)
    weights = torch.ones(20, 1, device=DEVICE)
    wanted = kernel("experts")(gate_up, down)(x, experts, weights)
    assert_product(fast(x, experts, weights), wanted, 1e-10)


def test_a_token_does_not_depend_on_the_others() -> None:
    gate_up, down = (part.to(torch.bfloat16) for part in plain(3, 16, 32, seed=28))
    fast = kernel("experts", "triton")(gate_up, down)
    fast.config = SWAPPED
    x = random(9, 32, seed=29).to(torch.bfloat16)
    experts, weights = routing(9, 2, 3, seed=30)
    together = fast(x, experts, weights)
    assert torch.equal(together, fast(x, experts, weights))
    assert torch.equal(together[4:5], fast(x[4:5], experts[4:5], weights[4:5]))
