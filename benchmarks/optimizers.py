"""MuonClip beside AdamW on equal tokens: `python -m benchmarks optimizers`.

Trains k2-demo's shape for a few minutes with each optimizer at each of some rates, on the same
batches, and prints the loss at the end. The plot has the best rate of each. A run lies in
`build/optimizers` and goes on where it stopped. Muon without QK-Clip is MuonClip as long as no
attention logit passes the limit: the table says whether one did.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.servers import BUILD, load, machine
from mooncake.sim.results.plots import Line, lines_plot, picture
from mooncake.train.config import TrainConfig
from mooncake.train.run import LOG_NAME, Run

TASKS = {
    "sum": 1.0, "difference": 0.8, "chain": 1.0, "order": 1.0, "tally": 0.8, "copy": 1.5,
    "look_up": 0.8, "object": 1.8, "memory": 1.1, "question": 1.6, "call": 5.0, "calls": 1.2,
    "refusal": 2.6, "result": 0.8, "error": 0.3, "turns": 1.2,
}  # fmt: skip
RATES = {"muonclip": (0.004, 0.008), "adamw": (0.002, 0.004)}
LAST = 5
"""So many logged steps at the end are the loss of a run: one step's is noise."""

Lines = Sequence[Mapping[str, Any]]


def trained(optimizer: str, rate: float, steps: int) -> Lines:
    """Return the log of a run."""
    out = BUILD / "optimizers" / f"{optimizer}-{rate:g}"
    config = TrainConfig(
        out=str(out), tasks=TASKS, optimizer=optimizer, rate=rate, steps=steps, warmup_steps=15,
        decay_steps=40, step_tokens=4096, batch_tokens=4096, max_tokens=1024, mtp_steps=0,
        score_steps=10**9, score_samples=1, log_steps=5, save_steps=50,
    )  # fmt: skip
    Run(config).go(lambda _: None)
    return [json.loads(line) for line in (out / LOG_NAME).read_text().splitlines()]


def end_of(lines: Lines) -> float:
    """Return the mean loss of the last logged steps."""
    losses = [float(line["loss"]) for line in lines[-LAST:]]
    return sum(losses) / LAST


def drawing(runs: Mapping[str, Lines]) -> str:
    """Return an SVG of the losses by tokens."""
    first = next(iter(runs.values()))
    drawn = [Line(name=name, values=[x["loss"] for x in lines]) for name, lines in runs.items()]
    plot = lines_plot([x["tokens"] for x in first], drawn, "tokens", "loss")
    return picture(plot, list(runs), x=200, y=24)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizers", description=__doc__)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--svg", type=Path, help="draw the losses there")
    args = parser.parse_args(argv)
    best: dict[str, Lines] = {}
    print("| optimizer | rate | tokens | loss | MaxLogit |\n|---|---|---|---|---|")
    for optimizer, rates in RATES.items():
        runs = {f"{optimizer}, rate {r:g}": trained(optimizer, r, args.steps) for r in rates}
        for rate, lines in zip(rates, runs.values(), strict=True):
            largest = max(line["max_logit"] for line in lines)
            tokens = lines[-1]["tokens"]
            print(f"| {optimizer} | {rate:g} | {tokens:,} | {end_of(lines):.2f} | {largest:.0f} |")
        name = min(runs, key=lambda name: end_of(runs[name]))
        best[name] = runs[name]
    if args.svg is not None:
        args.svg.write_text(drawing(best))
    print(f"\n{machine()}; load {load()}")
    return 0
