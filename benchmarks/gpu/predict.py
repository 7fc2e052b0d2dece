"""What lines of the table should take, from the instructions that compile (`sm90.json`), the bytes
they read and how many programs run at once: compares designs without a GPU. No time here is
measured.

Instructions, memory and tensor cores overlap whole; the part of a kernel outside its loop runs once
an item, and the multiprocessor with most items ends last; memory gives all it has, or as much of it
as multiprocessors with work ask for. `ASSUMED` has the numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MULTIPROCESSORS, CLOCK_HZ, ISSUES, BYTES_S, LAUNCH_S = 132, 1.755e9, 4, 4.3e12, 1e-6
FORK_S = 1e-6
EXCHANGE_S, LINK_BYTES_S = 7e-6, 450e9
BF16_FLOPS = 788e12
FP8_FLOPS = 2 * BF16_FLOPS
ASSUMED = {
    "132 multiprocessors at 1.755 GHz": "NVIDIA's data sheet; less under load",
    "4 instructions a cycle, 1 of a warp": "four schedulers; operands are not waited for",
    "4.3 TB/s": "a large copy, as others report for the H200; its data sheet says 4.8",
    "788 TFLOP/s in bfloat16": "a plain product, likewise; its data sheet says 989",
    "1,576 TFLOP/s in FP8": "twice as much, as in the data sheet",
    "1 us a launch": "inside a captured graph; assumed: a kernel's start and end",
    "1 us a fork and join": "of a captured graph's branches; assumed: one more dependency each",
    "7 us an exchange of ranks": "of 32 KB among eight H100 took 7.8 (sglang#2904); less a launch",
    "450 GB/s into a GPU from others": "NVLink of eight, NVIDIA's data sheet; less in practice",
}
"""What goes in, and where it is from. No number was measured here."""
KEPT = Path(__file__).parent / "sm90.json"
HIDDEN, INNER, EXPERTS, TOP_K, LAYERS = 7168, 256, 384, 8, 61
FP8_EXPERTS, FP8_INNER = 24, 2048
"""The experts of one of 16 ranks that share whole experts, and their width."""
COLUMNS, ROWS, DOWN_ROWS = 128, 64, 128
"""Columns of a step and rows of a tile of the weights for few tokens; rows of a tile of down
now."""
SHARED_OUT = 16
"""Tokens up to which programs take equal ranges of gate-up's steps (`triton.experts`)."""
STEP_LAUNCHES = {True: 1834, False: 1227}
"""Launches of a step of 61 layers of INT4 experts on one of eight ranks: before, and now; see
`tests/kernels/test_step_launches.py`."""
BESIDE = 2
"""Launches of a layer now that run beside others: the shared expert's up to its last product."""
INT4_BYTES, FP8_BYTES = 0.5 + 2 / 32, 1 + 4 / 128**2
PAGE_BYTES = 64 * 576 * 2


@dataclass(frozen=True)
class Slice:
    """A step of a rank: of so many rows, over so many sequences of so many tokens; `num_bytes`:
    what it reads, see `rank_slice.step_bytes`.
    """

    rows: int
    sequences: int
    context: int
    num_bytes: float


SLICES = {
    "slice-b1": Slice(1, 1, 4096, 6.318e9),
    "slice-b64-dcp8": Slice(64, 64, 512, 59.65e9),
    "slice-prompt-16": Slice(16, 1, 64, 24.95e9),
}


@dataclass(frozen=True)
class Exchanged:
    """What one of eight ranks does in a step for the others: so many exchanges, launches beside
    them, and bytes that come from other ranks.
    """

    exchanges: int
    launches: int
    num_bytes: int

    @property
    def seconds(self) -> float:
        """How long this takes, nothing of it beside other work."""
        launches = self.exchanges + self.launches
        return self.exchanges * EXCHANGE_S + launches * LAUNCH_S + self.num_bytes / LINK_BYTES_S


EXCHANGED = {
    "slice-b1": Exchanged(124, 610, 12_542_208),
    "slice-b64-dcp8": Exchanged(368, 1_037, 915_511_296),
    "slice-prompt-16": Exchanged(246, 610, 53_760_000),
}
"""Of steps of `SLICES`, counted by `tests/support/kernels/step_launches.py`."""


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
    tensor_s: float = 0.0
    """What its products take on tensor cores."""


@dataclass(frozen=True)
class Prediction:
    """Seconds: of instructions, tensor cores, memory, and of the whole line with its launches."""

    issue_s: float
    tensor_s: float
    memory_s: float
    whole_s: float


def lines(before: bool) -> dict[str, tuple[Sequence[Part], int]]:
    """Return name of the line -> (its large kernels, launches in all); of those before, the lines
    whose kernels have changed.
    """
    made = {f"moe-int4-{tokens}": _int4(tokens, before) for tokens in (1, 16, 64, 128)}
    made["mla-decode-b128"] = _decode(128, 4096, before)
    made["mla-decode-b32"] = _decode(32, 8192, before)
    made["mla-decode-b1"] = _decode(1, 131072, before)
    made["mla-decode-8-heads"] = _decode(128, 4096, before, heads=8)
    made["mla-decode-fp8"] = _decode(128, 4096, before, fp8=True)
    made["mla-decode-dcp8"] = _decode(64, 512, before)
    if not before:
        made["prefill-8k"] = _prefill(8192)
        made["moe-fp8-64"] = _fp8(64)
        made["grouped-gate-up"], made["grouped-down"] = _grouped(8 * 4096)
        made["router"] = [Part("router", "_choose", 64, 0, 64 * (4 * EXPERTS + 12 * TOP_K))], 1
    return made


def _int4(tokens: int, before: bool) -> tuple[Sequence[Part], int]:
    distinct = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    blocks = round(distinct)
    one = INNER * HIDDEN * INT4_BYTES
    even = tokens <= SHARED_OUT and not before
    code = "experts_int4, 16 tokens" if even or before else "experts_int4, 64 tokens"
    gate_up = Part(
        code, "gate_up_ranges_kernel" if even else "gate_up_kernel", blocks * INNER // ROWS,
        HIDDEN / COLUMNS, 2 * one * distinct, even,
    )  # fmt: skip
    down = Part(
        code, "down_kernel", blocks * HIDDEN // (ROWS if before else DOWN_ROWS),
        INNER / COLUMNS if before else 1, one * distinct,
    )  # fmt: skip
    return [gate_up, down], 4


def _decode(
    batch: int, context: int, before: bool, *, heads: int = 64, fp8: bool = False
) -> tuple[Sequence[Part], int]:
    """A turn of the loop is a page."""
    warpgroups = heads == 64 and not fp8 and not before
    pages = batch * context // 64
    programs = min(pages, MULTIPROCESSORS * (1 if heads == 64 else 2))
    flops = 2 * batch * context * max(heads, 16) * (576 + 512)
    attend = Part(
        f"decode, {heads} heads" + (", fp8 cache" if fp8 else ""),
        "attend_warpgroups" if warpgroups else "_attend", programs, pages / programs,
        pages * PAGE_BYTES / (2 if fp8 else 1), tensor_s=flops / BF16_FLOPS,
    )  # fmt: skip
    return [attend], 2


def _prefill(tokens: int, heads: int = 64) -> tuple[Sequence[Part], int]:
    """Tiles of 128 rows, the longest first; a tile walks the keys up to its own, 64 a step."""
    tiles = tokens // 128
    flops = 2 * (tokens * (tokens + 1) // 2) * heads * (192 + 128)
    num_bytes = 2 * tokens * (heads * (2 * 256 + 64) + 64)
    attend = Part(
        "prefill, 256 rows", "_prefill", heads * tiles, tiles + 1, num_bytes, even=True,
        tensor_s=flops / BF16_FLOPS,
    )  # fmt: skip
    return [attend], 1


def _fp8(tokens: int) -> tuple[Sequence[Part], int]:
    """All experts of one of 16 ranks have tokens; 64 rows of weights a product, 128 columns a
    step.
    """
    one = FP8_EXPERTS * FP8_INNER * HIDDEN
    flops = 2 * tokens * TOP_K * FP8_INNER * HIDDEN
    code = "experts_fp8, few experts"
    return [
        Part(code, "gate_up_ranges_kernel", FP8_EXPERTS * FP8_INNER // ROWS, HIDDEN / COLUMNS,
             2 * one * FP8_BYTES, even=True, tensor_s=2 * flops / FP8_FLOPS),
        Part(code, "down_kernel", FP8_EXPERTS * HIDDEN // ROWS, FP8_INNER / COLUMNS,
             one * FP8_BYTES, tensor_s=flops / FP8_FLOPS),
    ], 6  # fmt: skip


def _grouped(rows: int) -> tuple[tuple[Sequence[Part], int], tuple[Sequence[Part], int]]:
    """Tiles of 128 rows; 64 and 128 rows of weights."""
    code, tiles, inner = "experts_fp8, 4096 tokens", rows // 128, FP8_INNER
    gate_up = Part(
        code, "gate_up_fp8_kernel", tiles * inner // 64, HIDDEN / COLUMNS,
        8 * 2 * inner * HIDDEN + rows * (HIDDEN + 2 * inner),
        tensor_s=2 * rows * 2 * inner * HIDDEN / FP8_FLOPS,
    )  # fmt: skip
    down = Part(
        code, "down_fp8_kernel", tiles * HIDDEN // 128, inner / COLUMNS,
        8 * inner * HIDDEN + rows * (inner + 2 * HIDDEN),
        tensor_s=2 * rows * inner * HIDDEN / FP8_FLOPS,
    )  # fmt: skip
    return ([gate_up], 1), ([down], 1)


def slice_step(of: Slice, kernels: Sequence[Mapping[str, Any]], before: bool) -> Prediction:
    """Return a step of a rank: its experts and attention layer by layer, the rest of its bytes as
    if all else hid behind them, and its launches.
    """
    attention = _decode(of.sequences, of.context, before)[0]
    parts = [(_int4(of.rows, before)[0], LAYERS - 1), (attention, LAYERS)]
    issue_s = tensor_s = whole_s = 0.0
    num_bytes = of.num_bytes
    for of_layer, layers in parts:
        found = predict(of_layer, 0, kernels)
        issue_s, tensor_s = issue_s + layers * found.issue_s, tensor_s + layers * found.tensor_s
        whole_s += layers * found.whole_s
        num_bytes -= layers * sum(part.num_bytes for part in of_layer)
    whole_s += num_bytes / BYTES_S + STEP_LAUNCHES[before] * LAUNCH_S
    if not before:
        whole_s -= (LAYERS - 1) * (BESIDE * LAUNCH_S - FORK_S)
    return Prediction(issue_s, tensor_s, of.num_bytes / BYTES_S, whole_s)


def predict(
    parts: Sequence[Part], launches: int, kernels: Sequence[Mapping[str, Any]]
) -> Prediction:
    """Return what a line should take. KeyError: a kernel of it was not compiled."""
    found = {(row["launch"], row["kernel"]): row for row in reversed(kernels)}
    issue_s = tensor_s = memory_s = whole_s = 0.0
    for part in parts:
        code = found[part.launch, part.kernel]
        each = code["instructions"] - code["loop"] + part.steps * code["loop"]
        cycles = each * max(1.0, code["warps"] / ISSUES)
        busy = part.items / MULTIPROCESSORS
        issue = (busy if part.even else math.ceil(busy)) * cycles / CLOCK_HZ
        memory = part.num_bytes / BYTES_S / (1.0 if part.even else min(1.0, busy))
        issue_s, memory_s, tensor_s = issue_s + issue, memory_s + memory, tensor_s + part.tensor_s
        whole_s += max(issue, memory, part.tensor_s)
    return Prediction(issue_s, tensor_s, memory_s, whole_s + launches * LAUNCH_S)


def table() -> list[str]:
    """Return the predictions, for the code before and now, as Markdown."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    now, before = kept["kernels"], kept["before"]["kernels"]
    shown = [
        "| line | instructions us | tensor cores us | memory us | predicted us, before -> now |",
        "|---|---|---|---|---|",
    ]
    was = lines(before=True)
    for name, line in lines(before=False).items():
        old = predict(*was[name], before) if name in was else None
        shown.append(_row(name, old, predict(*line, now)))
    for name, of in SLICES.items():
        old = slice_step(of, before, before=True) if of.rows == of.sequences else None
        shown.append(_row(name, old, slice_step(of, now, before=False)))
    return shown


def exchange_table() -> list[str]:
    """Return the predictions of steps with what ranks exchange, as Markdown."""
    now = json.loads(KEPT.read_text(encoding="utf-8"))["kernels"]
    shown = [
        "| step | exchanges | launches for them | MB from others | exchanges us | whole step us |",
        "|---|---|---|---|---|---|",
    ]
    for name, of in EXCHANGED.items():
        whole_s = slice_step(SLICES[name], now, before=False).whole_s + of.seconds
        shown.append(
            f"| `{name}` | {of.exchanges} | {of.launches:,} | {of.num_bytes / 1e6:.1f} | "
            f"{of.seconds * 1e6:.0f} | {whole_s * 1e6:.0f} |"
        )
    return shown


def _row(name: str, before: Prediction | None, now: Prediction) -> str:
    def both(old: float | None, new: float) -> str:
        shown = f"{new * 1e6:.0f}"
        return shown if old is None else f"{old * 1e6:.0f} -> {shown}"

    issue, whole = (None, None) if before is None else (before.issue_s, before.whole_s)
    return (
        f"| `{name}` | {both(issue, now.issue_s)} | {math.ceil(now.tensor_s * 1e6)} | "
        f"{math.ceil(now.memory_s * 1e6)} | {both(whole, now.whole_s)} |"
    )


def assumed() -> list[str]:
    """Return what goes in, as Markdown."""
    rows = [f"| {what} | {source} |" for what, source in ASSUMED.items()]
    return ["| assumed | from |", "|---|---|", *rows]


if __name__ == "__main__":
    print("\n".join([*assumed(), "", *table(), "", *exchange_table()]))
