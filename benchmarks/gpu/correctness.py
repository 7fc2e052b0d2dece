"""What must hold before any time is believed: every op against its reference, the same bits twice,
the same bits whatever else is in the batch, and the kernels' own tests compiled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mooncake_kernels.checks import CASES as OPS
from mooncake_kernels.checks import check_kernels
from mooncake_kernels.dispatch import TRITON, backends, kernel
from mooncake_kernels.reference.paged_batch import PagedBatch
from mooncake_kernels.synthetic import KIMI_K2_TP8, TINY

from benchmarks.gpu.work import Bench
from mooncake.base import SamplingParams
from mooncake.launch.worker.direct import DirectEngine
from mooncake.model.checkpoint.making.presets import init_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/kernels", "tests/unit/model/device/test_pages.py")
TESTS_S = 300.0
"""Longer than that they hang: the lines of the table are worth more."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    right: bool
    said: str


def findings(bench: Bench) -> Iterator[Finding]:
    """Yield what was found, op by op."""
    for row in check_kernels(bench.device):
        if row.backend == TRITON:
            said = row.note or f"differs by {row.difference:.1e}, gate {row.gate:.0e}"
            yield Finding(f"{row.op} as its reference", row.passed, said)
    shape = TINY if bench.tiny else KIMI_K2_TP8
    for op, case in OPS.items():
        if TRITON not in backends(op):
            continue
        made = case(shape, bench.device)
        first, again = (made.run(kernel(op, TRITON)) for _ in range(2))
        same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(
            (x.contiguous() for x in first), (y.contiguous() for y in again), strict=True
        ))  # fmt: skip
        yield Finding(f"{op} twice", same, "equal bits" if same else "other bits")
    yield _alone(bench)


def _alone(bench: Bench) -> Finding:
    """A sequence's attention with cuts fixed, alone and beside a longer one."""
    page, rank, rope, heads = (16, 32, 16, 4) if bench.tiny else (64, 512, 64, 64)
    make = bench.maker()
    kv, batch = make.paged([3 * page + 5, 2 * page, 9 * page + 1], 1, rank + rope, page)
    q = make.normal(3, heads, rank + rope, scale=(rank + rope) ** -0.5)
    decode: Any = kernel("mla_decode", TRITON)
    together, _ = decode(q, kv, batch, rank, split_pages=4)
    one = PagedBatch(batch.row_start[:2], batch.lengths[:1], batch.page_table[:1].contiguous(), 1)
    alone, _ = decode(q[:1], kv, one, rank, split_pages=4)
    same = torch.equal(alone, together[:1])
    return Finding("mla_decode alone and in a batch", same, "equal bits" if same else "other bits")


def engine(bench: Bench, directory: Path) -> Iterator[Finding]:
    """Yield whether the engine's tokens on this device are the CPU's, in float32, captured or not,
    and with `deterministic` whatever runs beside.
    """
    path = init_checkpoint(
        "k2-nano" if bench.tiny else "k2-tiny", 0, directory, dtype="float32",
        overrides={"num_hidden_layers": 2} if bench.tiny else {},
    )  # fmt: skip
    most = bench.size(24, 2)
    prompts = [list(range(1, length)) for length in ((4, 6) if bench.tiny else (5, 40, 200, 130))]
    sampling = [SamplingParams(temperature=0, max_tokens=most)] * len(prompts)
    fixed = {"max_model_len": 512, "block_size": 16 if bench.tiny else 64, "num_threads": 1}
    here = {"device": bench.device.type, "attention_backend": "triton", "moe_backend": "triton"}

    def tokens(count: int, **settings: object) -> list[list[int]]:
        with DirectEngine.open(str(path), **fixed, **settings) as opened:
            return opened.generate(prompts[:count], sampling[:count])

    wanted = tokens(len(prompts), device="cpu")
    for what, settings in (
        ("captured", {}), ("not captured", {"enforce_eager": True}),
        ("deterministic", {"deterministic": True}),
    ):  # fmt: skip
        found = tokens(len(prompts), **here, **settings)
        alike = sum(a == b for a, b in zip(found, wanted, strict=True))
        said = f"{alike} of {len(wanted)} sequences alike"
        yield Finding(f"tokens as on the CPU, {what}", found == wanted, said)
    alone = tokens(1, **here, deterministic=True)
    yield Finding("tokens alone and in a batch", alone == wanted[:1], "")


def tests() -> Finding:
    """Run the tests of what runs on a GPU in a process of their own, kernels compiled."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS],
        check=False, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TESTS_S,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [done.stderr[-300:]])[-1]
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    return Finding("tests compiled", done.returncode == 0, "; ".join([last, *failed])[:2000])
