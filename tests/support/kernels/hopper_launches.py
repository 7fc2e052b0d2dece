"""Launches every kernel with Kimi-K2's shapes for the compiler alone; prints what came out as JSON.

Run as a program, in a process where Triton is not interpreting: nothing is computed, tensors are
small stand-ins wherever the kernel's code depends on widths only. Names of launches, as arguments,
compile these alone; `--write` keeps what came out in `sm90.json`; `--changed` takes from there what
is kept of kernels that have not changed since, and compiles the others and a few of each kind.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from mooncake_kernels.dispatch import kernel
from mooncake_kernels.reference.mla_prefill import ExpandedKeys, RaggedBatch
from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.reference.router import Routing
from mooncake_kernels.reference.sampling import DrawSettings, Penalties
from mooncake_kernels.triton import experts as experts_module
from mooncake_kernels.tuning import DEFAULT_DECODE, DecodeTile, default_experts_config

from tests.support.kernels import hopper_table
from tests.support.kernels.hopper_compiler import Compiled, compiling

HIDDEN, INNER, EXPERTS, TOP_K = 7168, 256, 384, 8
FEW_TOKENS = 16
"""So few tokens that the products of so many experts are few, and divided by steps."""
STACKED = 2
"""Experts that are really made: how many there are is no part of the code."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WARPGROUPS = DecodeTile(warpgroups=True)
COMPILED = ("decode, 8 heads, warpgroups", "experts_fp8, 16 tokens", "layer ops", "router")
"""Launches that are compiled in any case: the kept numbers are those of the compiler at hand."""
Row = dict[str, Any]
"""What is kept of one kernel."""


def zeros(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def decode(
    heads: int,
    rows: int,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
    split_pages: int = 0,
    page: int = 64,
    tile: DecodeTile = DEFAULT_DECODE,
) -> None:
    batch = PagedBatch(ints(9), ints(8), ints(8, 64), rows)
    q, kv = zeros(8 * rows, heads, 576, dtype=dtype), zeros(2, page, 576, dtype=kv_dtype)
    kernel("mla_decode", "triton")(q, kv, batch, 512, 1.0, split_pages=split_pages, tile=tile)


def prefill(rows: int) -> None:
    keys = ExpandedKeys(zeros(rows, 4, 128), zeros(rows, 64), zeros(rows, 4, 128))
    batch = RaggedBatch(ints(3), ints(3), ints(2), rows)
    kernel("mla_prefill", "triton")(zeros(rows, 4, 192), keys, batch)


def experts(
    name: str,
    tokens: int,
    dtype: torch.dtype = BF16,
    inner: int = INNER,
    num_experts: int = EXPERTS,
    shared_out: bool | None = None,
) -> None:
    """shared_out: products by steps; None: where there are few of them."""
    if name == "experts":
        shapes = (STACKED, 2 * inner, HIDDEN), (STACKED, HIDDEN, inner)
        made = zeros(*shapes[0], dtype=dtype), zeros(*shapes[1], dtype=dtype)
    elif name == "experts_fp8":
        made = (
            zeros(STACKED, 2, inner, HIDDEN, dtype=FP8), torch.zeros(STACKED, 2, inner // 128, 56),
            zeros(STACKED, HIDDEN, inner, dtype=FP8), torch.zeros(STACKED, 56, inner // 128),
        )  # fmt: skip
    else:
        made = (
            ints(STACKED, 2, inner, HIDDEN // 8), zeros(STACKED, 2, inner, HIDDEN // 32),
            ints(STACKED, HIDDEN, inner // 8), zeros(STACKED, HIDDEN, inner // 32),
        )  # fmt: skip
    fast = kernel(name, "triton")(*made)
    shape = type(fast.shape)(fast.shape.format, num_experts, inner, HIDDEN)
    fast.config = default_experts_config(shape, tokens * TOP_K)
    fast._whole_products = tokens > FEW_TOKENS if shared_out is None else not shared_out
    chosen = torch.zeros(tokens, TOP_K, dtype=torch.int64)
    fast(zeros(tokens, HIDDEN, dtype=dtype), chosen, chosen.float())


def layer_ops() -> None:
    x, weight = zeros(4, HIDDEN), zeros(HIDDEN)
    kernel("rms_norm", "triton")(x, weight, 1e-6)
    kernel("add_rms_norm", "triton")(x, x, weight, 1e-6)
    turn = torch.zeros(4, 32, dtype=torch.complex64)
    kernel("rotate", "triton")(zeros(4, 64, 192)[..., 128:], turn, True)
    joined = zeros(4, 2112)
    for dtype in (BF16, FP8):
        cache = zeros(2, 64, 576, dtype=dtype)
        places, norm = torch.zeros(4, dtype=torch.int64), (zeros(512), 1e-6)
        args = joined[:, 1536:2048], joined[:, 2048:], turn, places, norm, cache, 0.5
        kernel("kv_write", "triton")(*args)
        kernel("query_and_kv", "triton")(joined[:, :1536], (zeros(1536), 1e-6), *args)
    kernel("absorb_queries", "triton")(zeros(4, 64, 192), turn, zeros(64, 512, 128), 0.1)
    kernel("gated", "triton")(zeros(4, 512))
    kernel("merge_attention", "triton")(zeros(8, 2, 64, 512), torch.zeros(8, 2, 64))


def linear_fp8(rows: int) -> None:
    factors = torch.zeros(17, 56)  # as the loader gives them
    kernel("linear_fp8", "triton")(zeros(rows, HIDDEN), zeros(2112, HIDDEN, dtype=FP8), factors)


def fixed_products() -> None:
    for dtype in (BF16, torch.float32):
        kernel("linear", "triton")(
            zeros(4, HIDDEN, dtype=dtype), zeros(EXPERTS, HIDDEN, dtype=dtype)
        )
    q, key_up = zeros(4, 64, 192)[..., :128], zeros(64, 512, 128)
    kernel("linear_heads", "triton")(q, key_up, fixed=True)


def router() -> None:
    for routing in (Routing(8, 1, 1, True, 2.827), Routing(8, 8, 4, True, 2.5)):
        kernel("choose", "triton")(torch.zeros(4, EXPERTS), torch.zeros(EXPERTS), routing)


def sampling() -> None:
    one = torch.zeros(4)
    settings = DrawSettings(one, ints(4), one.double(), one.double(), one.double())
    kernel("draw", "triton")(torch.zeros(4, 163840), settings)
    seen = torch.zeros(4, 163840, dtype=torch.bool)
    kernel("penalize", "triton")(
        torch.zeros(4, 163840), seen, ints(4, 163840), Penalties(one, one, one)
    )


LAUNCHES: dict[str, Callable[[], None]] = {
    "decode, 64 heads": lambda: decode(64, 1),
    "decode, 64 heads, whole pages": lambda: decode(64, 1, tile=DecodeTile(2, 64)),
    "decode, 64 heads, fp8 cache": lambda: decode(64, 1, kv_dtype=FP8),
    "decode, 32 heads": lambda: decode(32, 1),
    "decode, 8 heads": lambda: decode(8, 1),
    "decode, 8 heads, fp8 cache": lambda: decode(8, 1, kv_dtype=FP8),
    **{
        f"decode, 64 heads{of}, pages of {page}": lambda page=page, kind=kind: decode(  # type: ignore[misc]
            64, 1, kv_dtype=kind, page=page
        )
        for of, kind in (("", BF16), (", fp8 cache", FP8))
        for page in (16, 128)
    },
    "decode, 8 heads, pages of 128": lambda: decode(8, 1, page=128),
    "decode, 64 heads, 4 rows": lambda: decode(64, 4),
    "decode, 64 heads, fixed cuts": lambda: decode(64, 1, split_pages=64),
    "decode, 64 heads, warpgroups, fp8 cache": lambda: decode(64, 1, kv_dtype=FP8, tile=WARPGROUPS),
    "decode, 64 heads, warpgroups, fixed cuts": lambda: decode(
        64, 1, split_pages=64, tile=WARPGROUPS
    ),
    "decode, 8 heads, warpgroups": lambda: decode(8, 1, tile=WARPGROUPS),
    "decode, 8 heads, float32": lambda: decode(8, 1, torch.float32, torch.float32),
    "decode, 64 heads, float32": lambda: decode(64, 2, torch.float32, torch.float32),
    "prefill, 256 rows": lambda: prefill(256),
    "prefill, 16 rows": lambda: prefill(16),
    **{
        f"{name}, {tokens} tokens": lambda name=name, tokens=tokens: experts(name, tokens)  # type: ignore[misc]
        for name in ("experts", "experts_fp8", "experts_int4")
        for tokens in (16, 512, 4096)
    },
    "experts_int4, 64 tokens": lambda: experts("experts_int4", 64),
    "experts_fp8, few experts": lambda: experts(
        "experts_fp8", 64, inner=2048, num_experts=24, shared_out=True
    ),
    **{
        f"{name}, {tokens} tokens, float32": lambda name=name, tokens=tokens: experts(  # type: ignore[misc]
            name, tokens, torch.float32
        )
        for name in ("experts", "experts_int4")
        for tokens in (512, 1024, 4096)
    },
    "layer ops": layer_ops,
    "linear_fp8, 16 rows": lambda: linear_fp8(16),
    "linear_fp8, 256 rows": lambda: linear_fp8(256),
    "fixed products": fixed_products,
    "router": router,
    "sampling": sampling,
}


def resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack) of a thread; a stack means registers were spilled."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _looked_at("cuobjdump", "-res-usage", cubin))
    assert found
    return int(found[1]), int(found[2])


def _looked_at(tool: str, flag: str, cubin: bytes) -> str:
    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([path, flag, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def loops(cubin: bytes) -> tuple[int, int, int]:
    """Return (instructions in all; those of the longest loop that holds no other one; how many of
    these move spilled registers).
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    for line in _looked_at("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            code.append(instruction[1])
    jumps = [
        (labels[target[1]], place)
        for place, text in enumerate(code)
        if (target := re.search(r"BRA.*`\((\.L_x_\d+)\)", text))
    ]
    found = {(first, last) for first, last in jumps if first < last}
    inner = [
        (first, last)
        for first, last in found
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in found)
    ]
    first, last = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    spills = sum(bool(re.search(r"\b(LDL|STL)", text)) for text in code[first : last + 1])
    return len(code), last + 1 - first, spills


def described(launch: str, made: Compiled) -> Row:
    registers, stack = resources(made.cubin)
    instructions, loop, loop_spills = loops(made.cubin)
    return {
        "launch": launch,
        "kernel": made.name,
        "digest": made.digest,
        "shared_bytes": made.shared_bytes,
        "warps": made.num_warps,
        "registers": registers,
        "stack_bytes": stack,
        "instructions": instructions,
        "loop": loop,
        "loop_spills": loop_spills,
        "wgmma": made.uses_wgmma,
    }


def launched(name: str, kept: Mapping[str, Row]) -> list[Row]:
    """Return what comes out of a launch; `kept`, by digest, is not compiled again."""
    with compiling(kept) as compiled:
        LAUNCHES[name]()
    return [
        {**kept[made], "launch": name} if isinstance(made, str) else described(name, made)
        for made in compiled
    ]


def main() -> None:
    # The grid is no part of the code; the number of programs need only be one an H200 would have.
    experts_module.num_programs = lambda device: 132  # type: ignore[assignment]
    flags = {word for word in sys.argv[1:] if word in ("--write", "--changed")}
    wanted = [name for name in sys.argv[1:] if name not in flags] or list(LAUNCHES)
    known: dict[str, Row] = {}
    if "--changed" in flags:
        known = {row["digest"]: row for row in hopper_table.kept()["kernels"]}
    found = [row for name in wanted for row in launched(name, {} if name in COMPILED else known)]
    if "--write" in flags:
        kept = hopper_table.kept()["kernels"]
        rows = found + [row for row in kept if row["launch"] not in wanted]
        order = [name for name in LAUNCHES if any(row["launch"] == name for row in rows)]
        rows.sort(key=lambda row: order.index(row["launch"]))
        hopper_table.write(rows, triton.__version__)
    json.dump({"triton": triton.__version__, "kernels": found}, sys.stdout)


if __name__ == "__main__":
    main()
