"""`python -m benchmarks.gpu`: all a GPU has to show, right first, then fast; stopped and taken up
again at will. `python -m benchmarks.gpu NAME…` runs some lines of the table again.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from mooncake_kernels.tune import product_tiles, rank_shape, tune_experts
from mooncake_kernels.tuning import TABLES, ExpertsShape, ProductTile, Target, save_table

from benchmarks.gpu import attention, correctness, estimate, experts, rank_slice
from benchmarks.gpu.measure import Results, free, measured, open_bench, table
from benchmarks.gpu.work import Bench

CHECKS = ("ops", "engine", "tests")
CASES = (*attention.CASES, *experts.CASES, *rank_slice.CASES)
TUNED = (("int4", "tp8", (16, 64, 128, 1)), ("fp8", "ep16", (64,)), ("int4", "tp16", (64,)))
"""(format, split, tokens): what the table's lines and K2 at TP16 look up."""
TINY_TUNED = (("int4", "tiny", (1,)),)
TINY_SHAPE = ExpertsShape("int4", 2, 32, 64)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if anything was wrong."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), metavar="DIR")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, interpreted: tries code")
    parser.add_argument("--tune", action="store_true", help="measure tiles first, write tables")
    parser.add_argument("--seconds", type=float, default=540, metavar="S", help="stop after")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(names)}")
    end = time.monotonic() + arguments.seconds
    bench = open_bench(arguments.tiny)
    results = Results(arguments.out / ("tiny.json" if arguments.tiny else "results.json"))
    if not arguments.names:
        _check(bench, results)
    if arguments.tune:
        _tune(bench, results, arguments.out, end)
    chosen = [case for case in CASES if case.name in arguments.names or not arguments.names]
    for case in chosen:
        if results.has(case.name) and not arguments.names:
            continue
        if time.monotonic() > end:
            print("out of time; the same command goes on")
            break
        try:  # one that does not compile must not cost the others
            row = measured(case, bench)
        except Exception as error:
            row = {"verdict": "FAILED", "note": f"{type(error).__name__}: {error}"[:400]}
        results.put(case.name, row)
        print(f"{case.name}: {row.get('value', row.get('note', ''))} {row['verdict']}", flush=True)
    print("\n".join(table(chosen, results.rows)))
    if not arguments.names:
        print("\n".join(["", *estimate.lines(results.rows)]))
    asked = [*(case.name for case in chosen), *(() if arguments.names else CHECKS)]
    return 1 if any(results.bad(name) for name in asked) else 0


def _check(bench: Bench, results: Results) -> None:
    """Look at everything once; at what was wrong again when the code has changed."""
    for name, looks in zip(
        CHECKS,
        (correctness.findings(bench), _engine_findings(bench), _test_findings(bench)),
        strict=True,
    ):
        if results.has(name):
            if results.bad(name):
                print(f"{name}: WRONG before: {results.rows[name]['note']}", flush=True)
            continue
        found = []
        try:  # what breaks here is a finding too, and the rest still runs
            found = list(looks)
        except Exception as error:
            found.append(correctness.Finding(name, False, f"{type(error).__name__}: {error}"[:800]))
        bad = [finding for finding in found if not finding.right]
        for finding in bad:
            print(f"WRONG: {finding.what}: {finding.said}", flush=True)
        note = "; ".join(f"{finding.what}: {finding.said}" for finding in bad)
        row = {"verdict": "WRONG" if bad else "ok", "note": note or f"{len(found)} looked at"}
        results.put(name, row)
        print(f"{name}: {row['verdict']}, {len(found)} looked at", flush=True)


def _engine_findings(bench: Bench) -> Iterator[correctness.Finding]:
    with tempfile.TemporaryDirectory() as directory:
        yield from correctness.engine(bench, Path(directory) / "checkpoint")


def _test_findings(bench: Bench) -> Iterator[correctness.Finding]:
    """Begins when it is asked: the tests are a process of their own, which needs the memory."""
    if not bench.tiny:
        free(bench)
        yield correctness.tests()


def _tune(bench: Bench, results: Results, out: Path, end: float) -> None:
    """Measure tiles for what the table looks up; the written table is copied to `out`."""
    place = torch.cuda.get_device_name() if bench.device.type == "cuda" else "interpreter"
    target = Target(place, triton.__version__)
    tables = out if bench.tiny else TABLES
    for kind, split, batches in TINY_TUNED if bench.tiny else TUNED:
        shape = TINY_SHAPE if bench.tiny else rank_shape(kind, split)
        for tokens in batches:
            key = f"tuned/{kind}/{split}/{tokens}"
            if results.has(key) or time.monotonic() > end:
                continue
            tiles: dict[str, Any] = {"tiles": _few_tiles} if bench.tiny else {}
            found = tune_experts(shape, [tokens], device=bench.device, timer=bench.timer, **tiles)
            save_table(tables / target.file_name, target, {shape.key: found})
            if tables != out:
                shutil.copy(tables / target.file_name, out)
            results.put(key, {"verdict": "ok", "note": str(found)})
            print(f"{key}: {found}", flush=True)


def _few_tiles(swap: bool, kind: str) -> Iterator[ProductTile]:
    return itertools.islice(product_tiles(swap, kind), 1)


if __name__ == "__main__":
    raise SystemExit(main())
