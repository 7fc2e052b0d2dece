"""What lines of the table should take, from the instructions that compile (`sm90.json`), the bytes
they read and how many programs run at once: compares designs without a GPU. No time here is
measured.

Assumed: 132 multiprocessors at 1.755 GHz, each starts 4 instructions of a warp a cycle; memory
gives 4.3 TB/s, or as much of it as multiprocessors with work ask for; instructions and memory
overlap whole, products on tensor cores cost no more than their instructions; the part of a kernel
outside its loop runs once an item; a launch inside a captured graph costs 1 us.
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
COLUMNS, ROWS = 128, 64
"""Of a step, and of a tile, of few tokens' weights."""
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


@dataclass(frozen=True)
class Prediction:
    """Seconds: of instructions, of memory, and of the whole line with its launches."""

    issue_s: float
    memory_s: float
    whole_s: float


def lines() -> dict[str, tuple[Sequence[Part], int]]:
    """Return name of the line -> (its large kernels, launches in all)."""
    made: dict[str, tuple[Sequence[Part], int]] = {}
    for tokens in (16, 64, 128):
        distinct = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
        blocks = round(distinct)
        one = INNER * HIDDEN * INT4_BYTES
        made[f"moe-int4-{tokens}"] = (
            [
                Part("experts_int4, 16 tokens", "gate_up_kernel", blocks * INNER // ROWS,
                     HIDDEN / COLUMNS, 2 * one * distinct),
                Part("experts_int4, 16 tokens", "down_kernel", blocks * HIDDEN // ROWS,
                     INNER / COLUMNS, one * distinct),
            ],
            4,
        )  # fmt: skip
    for name, batch, context in (("b128", 128, 4096), ("b32", 32, 8192), ("b1", 1, 131072)):
        pages = batch * context // 64
        programs = min(pages, MULTIPROCESSORS)
        attend = Part("decode, 64 heads", "_attend", programs, pages / programs, pages * PAGE_BYTES)
        made[f"mla-decode-{name}"] = ([attend], 2)
    return made


def predict(
    parts: Sequence[Part], launches: int, kernels: Sequence[Mapping[str, Any]]
) -> Prediction:
    """Return what a line should take. KeyError: a kernel of it was not compiled."""
    found = {(row["launch"], row["kernel"]): row for row in kernels}
    issue_s = memory_s = whole_s = 0.0
    for part in parts:
        code = found[part.launch, part.kernel]
        item = (code["instructions"] - code["loop"] + part.steps * code["loop"]) * code["warps"]
        rounds = max(part.items / MULTIPROCESSORS, 1.0)
        issue = rounds * item / ISSUES / CLOCK_HZ
        memory = part.num_bytes / BYTES_S / min(1.0, part.items / MULTIPROCESSORS)
        issue_s, memory_s = issue_s + issue, memory_s + memory
        whole_s += max(issue, memory)
    return Prediction(issue_s, memory_s, whole_s + launches * LAUNCH_S)


def table() -> list[str]:
    """Return the predictions, for the code before and now, as Markdown."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    shown = ["| line | instructions us | memory us | predicted us, before -> now |",
             "|---|---|---|---|"]  # fmt: skip
    for name, (parts, launches) in lines().items():
        now = predict(parts, launches, kept["kernels"])
        before = predict(parts, launches, kept["before"]["kernels"])
        shown.append(
            f"| `{name}` | {before.issue_s * 1e6:.0f} -> {now.issue_s * 1e6:.0f} | "
            f"{math.ceil(now.memory_s * 1e6)} | {before.whole_s * 1e6:.0f} -> "
            f"{now.whole_s * 1e6:.0f} |"
        )
    return shown


if __name__ == "__main__":
    print("\n".join(table()))
