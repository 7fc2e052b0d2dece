"""Attention of one Kimi-K2 layer: MLA decode over paged latents, prefill over expanded keys."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from mooncake_kernels.checks import BF16_GATE, difference
from mooncake_kernels.dispatch import TRITON, kernel
from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.tuning import DecodeTile
from torch.nn import functional

from benchmarks.gpu.work import Bench, Case, Work

RANK, ROPE, NOPE, VALUE, HEADS, PAGE = 512, 64, 128, 128, 64, 64
LEAST_STEP = 16
"""Tokens that a product can be made of."""
SCALE = (NOPE + ROPE) ** -0.5
WARPGROUPS = DecodeTile(warpgroups=True)


def decode(bench: Bench, *, heads: int, batch: int, context: int, fp8: bool = False) -> Work:
    """Return a decode step's attention; the scale is in the queries, as the model has it."""
    tiny = bench.tiny
    rank, rope, page = (32, 16, 16) if tiny else (RANK, ROPE, PAGE)
    heads, batch, context = (4, 3, 50) if tiny else (heads, batch, context)
    make = bench.maker()
    kv, paged = make.paged([context] * batch, 1, rank + rope, page)
    if fp8:
        kv = kv.to(torch.float8_e4m3fn)
    q = make.normal(batch, heads, rank + rope, scale=SCALE)
    decode_op = kernel("mla_decode", TRITON)

    def off() -> float:
        few = min(batch, 2)  # the reference widens whole contexts
        some = replace(
            paged, row_start=paged.row_start[: few + 1], lengths=paged.lengths[:few],
            page_table=paged.page_table[:few].contiguous(),
        )  # fmt: skip
        wanted = kernel("mla_decode")(q[:few], kv, some, rank)
        got = decode_op(q, kv, paged, rank)
        return difference([part[:few] for part in got], list(wanted))

    width = rank + rope
    return Work(
        run=lambda: decode_op(q, kv, paged, rank),
        num_bytes=batch * context * width * kv.element_size() + batch * heads * (width + rank) * 2,
        flops=2 * batch * context * heads * (width + rank),
        difference=off,
        gate=BF16_GATE,
        peers={} if fp8 else _decode_peers(q, kv, paged, rank),
        variants={
            f"{step} tokens a step, {stages} stages": partial(
                decode_op, q, kv, paged, rank, tile=DecodeTile(stages, step)
            )
            for step, stages in ((page, 2), (page // 2, 2), (page // 2, 3), (page // 2, 4))
            if step >= LEAST_STEP
        }
        | ({} if tiny else {"warpgroups": partial(decode_op, q, kv, paged, rank, tile=WARPGROUPS)}),
    )


def _decode_peers(
    q: torch.Tensor, kv: torch.Tensor, paged: PagedBatch, rank: int
) -> dict[str, Callable[[], Any]]:
    """Return public kernels for the same batch; imports happen when they are called first."""
    made: dict[str, Any] = {}

    def flash_mla() -> Any:
        if "flash_mla" not in made:
            module = importlib.import_module("flash_mla")
            plan = module.get_mla_metadata(paged.lengths, q.shape[1], 1)
            made["flash_mla"] = partial(
                module.flash_mla_with_kvcache, q[:, None], kv[:, :, None], paged.page_table,
                paged.lengths, rank, *plan, softmax_scale=1.0, causal=True,
            )  # fmt: skip
        return made["flash_mla"]()

    def flashinfer() -> Any:
        if "flashinfer" not in made:
            module = importlib.import_module("flashinfer.mla")
            workspace = torch.empty(2**27, dtype=torch.uint8, device=q.device)
            wrapper = module.BatchMLAPagedAttentionWrapper(workspace, backend="auto")
            pages = -(-paged.lengths // kv.shape[1])
            ends = functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
            wrapper.plan(
                paged.row_start, ends, paged.page_table.flatten(), paged.lengths, q.shape[1],
                rank, q.shape[2] - rank, kv.shape[1], False, 1.0, q.dtype, kv.dtype,
            )  # fmt: skip
            parts = q[..., :rank].contiguous(), q[..., rank:].contiguous()
            cache = kv[..., :rank].contiguous(), kv[..., rank:].contiguous()
            made["flashinfer"] = partial(wrapper.run, *parts, *cache)
        return made["flashinfer"]()

    return {"FlashMLA": flash_mla, "FlashInfer": flashinfer}


def prefill(bench: Bench, *, tokens: int) -> Work:
    """Return causal attention of one fresh prompt, 192-wide keys and 128-wide values."""
    tokens, heads = bench.size(tokens, 40), bench.size(HEADS, 2)
    make = bench.maker()
    keys = ExpandedKeys(
        make.normal(tokens, heads, NOPE), make.normal(tokens, ROPE),
        make.normal(tokens, heads, VALUE),
    )  # fmt: skip
    q = make.normal(tokens, heads, NOPE + ROPE, scale=SCALE)
    ends = torch.tensor([0, tokens], dtype=torch.int32, device=bench.device)
    batch = RaggedBatch(ends, ends, torch.ones_like(ends[1:]), tokens)
    prefill_op = kernel("mla_prefill", TRITON)

    def off() -> float:
        first = ExpandedKeys(keys.nope[:, :1], keys.rope, keys.values[:, :1])
        wanted = kernel("mla_prefill")(q[:, :1], first, batch)
        return difference([part[:, :1] for part in prefill_op(q, keys, batch)], list(wanted))

    def cudnn() -> Any:
        attention = torch.nn.attention
        if not made:  # not timed with it
            whole = torch.cat((keys.nope, keys.rope[:, None].expand(-1, heads, -1)), dim=-1)
            made.extend(x.transpose(0, 1)[None].contiguous() for x in (q, whole, keys.values))
        q4, k4, v4 = made
        with attention.sdpa_kernel([attention.SDPBackend.CUDNN_ATTENTION]):
            return functional.scaled_dot_product_attention(q4, k4, v4, is_causal=True, scale=1.0)

    made: list[torch.Tensor] = []
    pairs = tokens * (tokens + 1) // 2
    return Work(
        run=lambda: prefill_op(q, keys, batch),
        num_bytes=2 * tokens * (heads * (2 * (NOPE + VALUE) + ROPE) + ROPE),
        flops=2 * pairs * heads * (NOPE + ROPE + VALUE),
        difference=off,
        gate=BF16_GATE,
        peers={"cuDNN (torch)": cudnn},
    )


CASES = (
    Case("mla-decode-b128", "MLA decode bf16, 64 heads, b128 s4096", "us", 240, 180,
         partial(decode, heads=HEADS, batch=128, context=4096)),
    Case("mla-decode-b32", "MLA decode bf16, 64 heads, b32 s8192", "us", 125, 95,
         partial(decode, heads=HEADS, batch=32, context=8192)),
    Case("mla-decode-b1", "MLA decode bf16, 64 heads, b1 s131072", "us", 70, 50,
         partial(decode, heads=HEADS, batch=1, context=131072)),
    Case("mla-decode-8-heads", "MLA decode bf16, 8 heads, b128 s4096", "us", 185, 160,
         partial(decode, heads=8, batch=128, context=4096)),
    Case("mla-decode-fp8", "MLA decode, FP8 KV, 64 heads, b128 s4096", "us", 240, 180,
         partial(decode, heads=HEADS, batch=128, context=4096, fp8=True)),
    Case("prefill-8k", "prefill attention 192/128, causal, 8k, 64 heads", "TFLOP/s", 400, 520,
         partial(prefill, tokens=8192)),
)  # fmt: skip
