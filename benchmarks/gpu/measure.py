"""Measures cases and keeps what came of each in one JSON file: a run can be taken up again."""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import triton
from mooncake_kernels.timing import copy_bandwidth, cuda_seconds, local_device

from benchmarks.gpu.work import Bench, Case, Work

TINY_COPY_BYTES_S = 1e9


def open_bench(tiny: bool) -> Bench:
    """Return this machine's GPU with its copy bandwidth, or the interpreter where `tiny`.

    Raises:
        SystemExit: there is no GPU and tiny shapes were not asked for.
    """
    device, _ = local_device()
    if tiny:
        return Bench(device, _wall_seconds, True, TINY_COPY_BYTES_S)
    if device.type != "cuda":
        raise SystemExit("no CUDA GPU here; --tiny tries every benchmark in Triton's interpreter")
    return Bench(device, cuda_seconds, False, copy_bandwidth())


def _wall_seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measured(case: Case, bench: Bench) -> dict[str, Any]:
    """Return what there is to say about one case: first whether it is right, then how long it took.

    A kernel that is wrong is not timed.
    """
    free(bench)
    work = case.make(bench)
    off = work.difference()
    row: dict[str, Any] = {
        "what": case.what, "unit": case.unit, "must": case.must, "aim": case.aim,
        "difference": off, "gate": work.gate, "note": work.note,
        "copy_tb_s": bench.copy_bytes_s / 1e12, **_software(bench),
    }  # fmt: skip
    if not off <= work.gate:
        return row | {"verdict": "WRONG"}
    seconds = bench.timer(work.run)
    floor = work.num_bytes / bench.copy_bytes_s
    value = case.value(seconds, work.flops)
    row |= {
        "value": value,
        "seconds": seconds,
        "floor_us": floor * 1e6,
        "bytes": work.num_bytes,
        "tb_s": work.num_bytes / seconds / 1e12,
        "tflop_s": work.flops / seconds / 1e12,
        "peers": _timed(case, work, work.peers, bench),
        "variants": _timed(case, work, work.variants, bench),
        "verdict": case.verdict(value),
    }
    return row


def _timed(
    case: Case, work: Work, calls: Mapping[str, Callable[[], Any]], bench: Bench
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:  # whatever one lacks here must not cost our own number
            call()
            found[name] = case.value(bench.timer(call), work.flops)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return found


def _software(bench: Bench) -> dict[str, str]:
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "interpreter"
    return {"device": name, "torch": torch.__version__, "triton": triton.__version__}


def free(bench: Bench) -> None:
    """Give the device what nobody needs any more."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()


SOURCES = tuple(Path(__file__).resolve().parents[2] / part for part in ("kernels", "mooncake"))


def code_digest() -> str:
    """Return a digest of the code that is measured."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The JSON file: name -> row. Written after every case."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = code_digest()
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def has(self, name: str) -> bool:
        """Whether a case was measured and right before, or wrong with this very code."""
        return name in self.rows and not (
            self.bad(name) and self.rows[name].get("code") != self._code
        )

    def bad(self, name: str) -> bool:
        """Whether a case was found wrong."""
        return self.rows.get(name, {}).get("verdict") in ("WRONG", "FAILED")

    def put(self, name: str, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.rows[name] = row | {"code": self._code}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.rows, indent=1) + "\n")


def table(cases: Iterable[Case], rows: dict[str, Any]) -> list[str]:
    """Return the lines of a Markdown table: what was to be reached and what was."""
    lines = ["| what | must | aim | measured | floor | peers |", "|---|---|---|---|---|---|"]
    for case in cases:
        row = rows.get(case.name, {})
        reached, floor, peers = "waits for a GPU", "", ""
        if "value" in row:
            reached = f"{row['value']:.4g} {case.unit} ({row['verdict']})"
            floor = f"{row['floor_us']:.4g} us"
            peers = ", ".join(
                f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
                for name, value in row["peers"].items()
            )
        elif row:
            reached = f"{row['verdict']}: {row.get('note', '')}"
        lines.append(
            f"| {case.what} | {case.must:g} {case.unit} | {case.aim:g} | {reached} | {floor} "
            f"| {peers} |"
        )
    return lines
