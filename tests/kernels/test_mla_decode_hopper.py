"""Hopper's own form of absorbed decode: its source on a stand-in for the language, and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.triton import mla_decode, mla_decode_hopper
from mooncake_kernels.tuning import DecodeTile

from tests.kernels.test_mla_decode import Case, make_case
from tests.support.kernels.gates import DEVICE, assert_attention, assert_log_sums
from tests.support.kernels.gluon_stand_in import Language, StandIn

TILE = DecodeTile(warpgroups=True)
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper GPU as it is; elsewhere its Python."""
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() == (9, 0):
        return
    if DEVICE.type == "cuda":
        pytest.skip("needs a GPU with sm_90: this one has none of its instructions")
    stand_in = StandIn(mla_decode_hopper.attend_warpgroups)
    monkeypatch.setattr(mla_decode_hopper, "attend_warpgroups", stand_in)
    monkeypatch.setattr(mla_decode, "_COMBINE_PROGRAMS", 8)  # in the interpreter each costs


def case_of(lengths: list[int], rows: list[int], heads: int, dtype: torch.dtype) -> Case:
    """Values of the size that the gate is meant for: weights are rounded to 16 bits."""
    case = make_case(
        lengths, rows, heads=heads, rank=512, rope=64, page=64, dtype=dtype, seed=len(lengths)
    )
    case.q, case.kv = 10 * case.q, case.kv / 10
    return case


def check(case: Case, kv_scale: float = 1.0, split_pages: int = 0) -> None:
    decode = kernel("mla_decode", "triton")
    out, lse = decode(
        case.q, case.kv, case.batch, case.rank, kv_scale, split_pages=split_pages, tile=TILE
    )
    wanted_out, wanted_lse = kernel("mla_decode")(
        case.q.float(), case.kv, case.batch, case.rank, kv_scale
    )
    assert out.dtype == case.q.dtype
    assert_attention(out, wanted_out)
    assert_log_sums(lse, wanted_lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [8, 64])
def test_lengths_and_unused_places(heads: int, dtype: torch.dtype) -> None:
    check(case_of([1, 200, 0, 64, 63], [1] * 5, heads, dtype))


def test_a_long_context_is_shared_out_and_merged() -> None:
    check(case_of([700], [1], 64, torch.bfloat16))


def test_several_rows_see_one_token_more_each() -> None:
    check(case_of([70, 5, 130], [3, 5, 1], 16, torch.bfloat16))
    check(case_of([130, 64], [2, 1], 64, torch.bfloat16))


@pytest.mark.parametrize("split_pages", [1, 2])
def test_fixed_cuts(split_pages: int) -> None:
    check(case_of([300, 64, 0], [1, 2, 1], 8, torch.bfloat16), split_pages=split_pages)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_cache_in_fp8_is_widened_on_its_way(heads: int) -> None:
    case = case_of([200, 0, 65], [1, 1, 2], heads, torch.bfloat16)
    case.kv = case.kv.float().to(FP8)
    check(case, kv_scale=0.5)


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, True),
        ({"rows": 256}, True),  # several tokens a sequence
        ({"rows": 32}, False),  # tiles of few rows
        ({"kv_dtype": FP8}, False),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, False),
        ({"page": 128}, False),
        ({"rank": 256}, False),
        ({"split_pages": 64}, False),  # --deterministic keeps one form
    ],
)
def test_where_it_is_served(
    change: dict[str, Any], chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mla_decode, "compiles_for_hopper", lambda: True)
    sizes: dict[str, Any] = {"rows": 64, "dtype": BF16, "kv_dtype": BF16, "page": 64, "rank": 512}
    sizes |= change
    width = sizes["rank"] + 64
    q = torch.empty(1, 64, width, dtype=sizes["dtype"])
    kv = torch.empty(1, sizes["page"], width, dtype=sizes["kv_dtype"])
    rest = q, kv, sizes["rank"], sizes["rows"], sizes.get("split_pages", 0)
    assert mla_decode._warpgroups_are_faster(*rest) is chosen
    monkeypatch.setattr(mla_decode, "compiles_for_hopper", lambda: False)
    assert not mla_decode._warpgroups_are_faster(*rest)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(64, 512, 64\)"):
        check(make_case([20], [1]))
    with pytest.raises(ValueError, match="16-bit queries"):
        check(case_of([20], [1], 4, torch.float32))


def test_the_stand_in_finds_what_a_gpu_would_stumble_over() -> None:
    def language() -> tuple[Language, object, object]:
        made = Language(0, 1)
        a, b = (made.gl.allocate_shared_memory(torch.float32, [4, 4], None) for _ in range(2))
        for each in (a, b):
            each.store(torch.ones(4, 4))
        return made, a, b

    def product(made: Language, a: object, b: object) -> torch.Tensor:
        mma, wait = made.globals["warpgroup_mma"], made.globals["warpgroup_mma_wait"]
        found: torch.Tensor = wait(0, deps=(mma(a, b, torch.zeros(4, 4), is_async=True),))
        return found

    made, a, b = language()
    with pytest.raises(AssertionError, match="not fenced"):
        product(made, a, b)
    made.globals["fence_async_shared"]()
    with pytest.raises(AssertionError, match="other warps write"):
        product(made, a, b)
    made.globals["barrier"]()
    assert (product(made, a, b) == 4).all()
    with pytest.raises(AssertionError, match="overwritten"):
        a.store(torch.ones(4, 4))  # type: ignore[attr-defined]
