"""The expert layer of Kimi-K2 as one rank has it, its grouped products in prefill, the router."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mooncake_kernels.checks import BF16_GATE, FP8_GATE, difference
from mooncake_kernels.dispatch import TRITON, kernel
from mooncake_kernels.reference.router import Routing
from mooncake_kernels.tune import KIMI_K2_RANKS
from torch.nn import functional

from benchmarks.gpu.work import Bench, Case, Work

HIDDEN, TOP_K, EXPERTS, INNER = 7168, 8, 384, 2048
BYTES_PER_WEIGHT = {"fp8": 1 + 4 / 128**2, "int4": 0.5 + 2 / 32}


def layer(bench: Bench, *, kind: str, split: str, tokens: int) -> Work:
    """Return a decode step's expert layer: sort, both products, weighted sum.

    Under expert parallelism every token of `tokens` is here because one of its experts is.
    """
    count, inner = (3, 32) if bench.tiny else KIMI_K2_RANKS[split]
    hidden, tokens, top_k = (128, 5, 2) if bench.tiny else (HIDDEN, tokens, TOP_K)
    make = bench.maker()
    stored = make.experts(kind, count, inner, hidden)
    op = f"experts_{kind}"
    fast = kernel(op, TRITON)(*stored)
    x, (experts, weights) = make.normal(tokens, hidden), make.routing(tokens, count, top_k)
    distinct = int(experts.unique().numel())

    def off() -> float:
        used = experts.unique()
        place = torch.zeros(count, dtype=torch.int64, device=bench.device)
        place[used] = torch.arange(used.numel(), device=bench.device)
        few = kernel(op)(*(_taken(part, used) for part in stored))
        return difference([fast(x, experts, weights)], [few(x, place[experts], weights)])

    per_expert = 3 * inner * hidden
    return Work(
        run=lambda: fast(x, experts, weights),
        num_bytes=round(distinct * per_expert * BYTES_PER_WEIGHT[kind]) + 4 * tokens * hidden,
        flops=2 * tokens * top_k * per_expert,
        difference=off,
        gate=FP8_GATE if kind == "fp8" else 2 * BF16_GATE,  # rounded twice on the way
        note=f"{distinct} distinct experts",
    )


def _taken(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if part.dtype == torch.float8_e4m3fn:  # not every torch moves e4m3 by index
        return part.view(torch.uint8)[rows].view(part.dtype)
    return part[rows]


def grouped(bench: Bench, *, part: str) -> Work:
    """Return one FP8 product of a prefill: 8 experts with 4096 rows each.

    "gate_up": N 4096, K 7168, with SiLU and the product of both halves; "down": N 7168, K 2048.
    """
    count, rows = bench.size(8, 2), bench.size(4096, 3)
    hidden, inner = bench.size(HIDDEN, 128), bench.size(INNER, 128)
    make = bench.maker()
    stored = make.experts("fp8", count, inner, hidden)
    fast = kernel("experts_fp8", TRITON)(*stored)
    pairs = count * rows
    x = make.normal(pairs, hidden)
    order = torch.randperm(pairs, device=bench.device)
    experts = (order % count)[:, None]
    weights = torch.ones(pairs, 1, device=bench.device)
    gate_up, down = fast.products(x, experts, weights)

    def off() -> float:
        some = min(pairs, 64)
        wanted = kernel("experts_fp8")(*stored)(x[:some], experts[:some], weights[:some])
        return difference([fast(x, experts, weights)[:some]], [wanted])

    first = part == "gate_up"
    n, k = (2 * inner, hidden) if first else (hidden, inner)
    return Work(
        run=gate_up if first else down,
        num_bytes=count * n * k + pairs * (k + 2 * (inner if first else hidden)),
        flops=2 * pairs * n * k,
        difference=off,
        gate=FP8_GATE,
        peers=_grouped_peers(make, count, rows, n, k),
    )


def _grouped_peers(
    make: Any, count: int, rows: int, n: int, k: int
) -> dict[str, Callable[[], Any]]:
    """Return torch's grouped products of these shapes, of random data made when first called."""
    made: dict[object, Any] = {}
    torchs: Any = functional

    def inputs(dtype: torch.dtype) -> Any:
        if dtype not in made:
            a = make.normal(count * rows, k, dtype=dtype)
            b = torch.stack([make.normal(n, k, dtype=dtype) for _ in range(count)])
            ends = torch.arange(1, count + 1, device=a.device, dtype=torch.int32) * rows
            made[dtype] = a, b.transpose(1, 2), ends
        return made[dtype]

    def bf16() -> Any:
        a, b, ends = inputs(torch.bfloat16)
        return functional.grouped_mm(a, b, offs=ends)

    def fp8() -> Any:
        a, b, ends = inputs(torch.float8_e4m3fn)
        if "ones" not in made:  # not timed with it
            made["ones"] = (
                torch.ones(len(a), device=a.device),
                torch.ones(count, n, device=a.device),
            )
        one_a, one_b = made["ones"]
        by_row = torchs.ScalingType.RowWise
        return torchs.scaled_grouped_mm(
            a, b, one_a, by_row, one_b, by_row, offs=ends, output_dtype=torch.bfloat16
        )

    return {"torch bf16": bf16, "torch FP8, a factor a row": fp8}


def router(bench: Bench, *, tokens: int) -> Work:
    """Return the choice of 8 of 384 experts from the router's logits."""
    tokens, count, top_k = bench.size(tokens, 5), bench.size(EXPERTS, 12), bench.size(TOP_K, 2)
    make = bench.maker()
    logits = make.normal(tokens, count, dtype=torch.float32)
    bias = make.normal(count, dtype=torch.float32, scale=0.1)
    routing = Routing(top_k, 1, 1, True, 2.827)
    choose = kernel("choose", TRITON)

    def off() -> float:
        pairs = []
        for made in (choose(logits, bias, routing), kernel("choose")(logits, bias, routing)):
            order = made[0].argsort(dim=1)
            pairs.append([made[0].gather(1, order), made[1].gather(1, order)])
        return difference(*pairs)

    return Work(
        run=lambda: choose(logits, bias, routing),
        num_bytes=tokens * (count * 4 + top_k * 12),
        flops=0,
        difference=off,
        gate=1e-12,
    )


CASES = (
    *(
        Case(f"moe-int4-{tokens}", f"INT4 MoE, TP8 slice, {tokens} tokens", "us", must, aim,
             partial(layer, kind="int4", split="tp8", tokens=tokens))
        for tokens, must, aim in ((1, 16, 12), (16, 130, 100), (64, 310, 255), (128, 390, 320))
    ),
    Case("moe-fp8-64", "FP8 MoE, EP16 slice of 24 experts, 64 tokens", "us", 330, 290,
         partial(layer, kind="fp8", split="ep16", tokens=64)),
    Case("grouped-gate-up", "grouped FP8 prefill 8x4096, N4096 K7168", "TFLOP/s", 700, 1000,
         partial(grouped, part="gate_up")),
    Case("grouped-down", "grouped FP8 prefill 8x4096, N7168 K2048", "TFLOP/s", 600, 900,
         partial(grouped, part="down")),
    Case("router", "router 384 -> 8, 64 tokens", "us", 4, 3, partial(router, tokens=64)),
)  # fmt: skip
