"""What lines of the table should take, from the instructions that compile (`sm90.json`), the bytes
they read and how many programs run at once: compares designs without a GPU. No time here is
measured.

Assumed: 132 multiprocessors at 1.755 GHz, each starts 4 instructions of a warp a cycle; memory
gives 4.3 TB/s, or as much of it as multiprocessors with work ask for; instructions and memory
overlap whole, products on tensor cores cost no more than their instructions; the part of a kernel
outside its loop runs once an item, and the multiprocessor with most items ends last; a launch
inside a captured graph costs 1 us.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MULTIPROCESSORS, CLOCK_HZ, ISSUES, BYTES_S, LAUNCH_S = 132, 1.755e9, 4, 4.3e12, 1e-6
KEPT = Path(__file__).parent / "sm90.json"
HIDDEN, INNER, EXPERTS, TOP_K = 7168, 256, 384, 8
COLUMNS, ROWS, DOWN_ROWS = 128, 64, 128
"""Of a step, and of a tile, of few tokens' weights; of down's now."""
SHARED_OUT = 16
"""Tokens up to which programs take equal ranges of gate-up's steps (`triton.experts`)."""
STEP_LAUNCHES = {True: 1834, False: 1227}
"""Of a step of 61 layers of INT4 experts on one of eight ranks: before, and now; see
`tests/kernels/test_step_launches.py`."""
SLICE_BYTES = 1.45e-3 * BYTES_S
"""What a step of one sequence reads at 4k: the floor of `slice-b1`."""
INT4_BYTES = 0.5 + 2 / 32
PAGE_BYTES = 64 * 576 * 2


@dataclass(frozen=True)
class Part:
    """A kernel of a line: `items` for programs to do, each of `steps` turns of its loop."""

    launch: str
    kernel: str
    items: int
    steps: float
    num_bytes: float
    even: bool = False
    """Whether items are cut where that gives all multiprocessors as much work."""


@dataclass(frozen=True)
class Prediction:
    """Seconds: of instructions, of memory, and of the whole line with its launches."""

    issue_s: float
    memory_s: float
    whole_s: float


def lines(before: bool) -> dict[str, tuple[Sequence[Part], int]]:
    """Return name of the line -> (its large kernels, launches in all)."""
    made: dict[str, tuple[Sequence[Part], int]] = {}
    for tokens in (1, 16, 64, 128):
        distinct = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
        blocks = round(distinct)
        one = INNER * HIDDEN * INT4_BYTES
        even = tokens <= SHARED_OUT and not before
        code = "experts_int4, 16 tokens" if even or before else "experts_int4, 64 tokens"
        made[f"moe-int4-{tokens}"] = (
            [
                Part(code, "gate_up_ranges_kernel" if even else "gate_up_kernel",
                     blocks * INNER // ROWS, HIDDEN / COLUMNS, 2 * one * distinct, even),
                Part(code, "down_kernel", blocks * HIDDEN // (ROWS if before else DOWN_ROWS),
                     INNER / COLUMNS if before else 1, one * distinct),
            ],
            4,
        )  # fmt: skip
    for name, batch, context in (("b128", 128, 4096), ("b32", 32, 8192), ("b1", 1, 131072)):
        pages = batch * context // 64
        programs = min(pages, MULTIPROCESSORS)
        attend = Part("decode, 64 heads", "_attend", programs, pages / programs, pages * PAGE_BYTES)
        made[f"mla-decode-{name}"] = ([attend], 2)
    return made


def slice_b1(before: bool) -> Prediction:
    """Return a step of one sequence: its bytes and its launches, as if all else hid behind them."""
    memory_s = SLICE_BYTES / BYTES_S
    return Prediction(0.0, memory_s, memory_s + STEP_LAUNCHES[before] * LAUNCH_S)


def predict(
    parts: Sequence[Part], launches: int, kernels: Sequence[Mapping[str, Any]]
) -> Prediction:
    """Return what a line should take. KeyError: a kernel of it was not compiled."""
    found = {(row["launch"], row["kernel"]): row for row in kernels}
    issue_s = memory_s = whole_s = 0.0
    for part in parts:
        code = found[part.launch, part.kernel]
        item = (code["instructions"] - code["loop"] + part.steps * code["loop"]) * code["warps"]
        busy = part.items / MULTIPROCESSORS
        issue = (busy if part.even else math.ceil(busy)) * item / ISSUES / CLOCK_HZ
        memory = part.num_bytes / BYTES_S / (1.0 if part.even else min(1.0, busy))
        issue_s, memory_s = issue_s + issue, memory_s + memory
        whole_s += max(issue, memory)
    return Prediction(issue_s, memory_s, whole_s + launches * LAUNCH_S)


def table() -> list[str]:
    """Return the predictions, for the code before and now, as Markdown."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    shown = ["| line | instructions us | memory us | predicted us, before -> now |",
             "|---|---|---|---|"]  # fmt: skip
    was = lines(before=True)
    for name, line in lines(before=False).items():
        now = predict(*line, kept["kernels"])
        before = predict(*was[name], kept["before"]["kernels"])
        shown.append(_row(name, before, now))
    return [*shown, _row("slice-b1", slice_b1(before=True), slice_b1(before=False))]


def _row(name: str, before: Prediction, now: Prediction) -> str:
    return (
        f"| `{name}` | {before.issue_s * 1e6:.0f} -> {now.issue_s * 1e6:.0f} | "
        f"{math.ceil(now.memory_s * 1e6)} | {before.whole_s * 1e6:.0f} -> "
        f"{now.whole_s * 1e6:.0f} |"
    )


if __name__ == "__main__":
    print("\n".join(table()))
