"""`mooncake train` trains a small checkpoint on generated tasks. The work is done by `train.run`;
here are its lines and the page of its curves.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake.cli.command import Command
from mooncake.launch.config.train_settings import Train
from mooncake.launch.host import environment
from mooncake.sim.results.plots import Line, lines_plot

PAGE_NAME = "curves.html"
STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:700px;margin:2em auto}"
    "svg text{font:11px system-ui,sans-serif}.axis{stroke:#333}.grid{stroke:#e3e5e8}"
    ".legend span{margin-right:1.2em}.legend i{display:inline-block;width:.8em;height:.8em}"
)


def run(wanted: Train) -> int:
    """Train until all steps are taken; Ctrl-C and SIGTERM save after the step."""
    environment.restart_with(environment.variables())
    config = wanted.run()
    from mooncake.train.run import LOG_NAME, Run

    made = Run(config)
    if made.step:
        print(f"going on after step {made.step} of {config.total_steps}", file=sys.stderr)
    with _stop_signals() as stopped:
        made.go(_show, stopping=stopped.is_set)
    log = Path(config.out, LOG_NAME)
    if log.exists():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        Path(config.out, PAGE_NAME).write_text(page({config.optimizer: lines}))
    if made.step < config.total_steps:
        print(f"stopped after step {made.step}; the same command goes on", file=sys.stderr)
        return 130
    print(f"trained {config.out}; serve it: mooncake serve {config.out}", file=sys.stderr)
    return 0


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Have Ctrl-C and SIGTERM set the event, so that a step is finished first. A second signal ends
    the process with what was saved last.
    """
    stopped = threading.Event()

    def stop(*_: object) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        stopped.set()
        print("stopping after this step; again: at once, unsaved", file=sys.stderr, flush=True)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show(line: Mapping[str, Any]) -> None:
    mtp = "" if line["mtp_loss"] is None else f"  mtp {line['mtp_loss']:.3f}"
    print(
        f"step {line['step']}  {line['tokens']:,} tokens  loss {line['loss']:.3f}{mtp}  "
        f"MaxLogit {line['max_logit']:.1f}  load {line['load']:.1f}  "
        f"{line['tokens_per_s']:,.0f} tokens/s",
        flush=True,
    )
    if scores := line.get("scores"):
        words = (f"{task} {share:.0%}" for task, share in scores.items())
        print(f"  right on held-out samples: {', '.join(words)}", flush=True)


def page(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return a page of the curves of runs that logged the same steps, by their names."""
    first = next(iter(runs.values()))
    steps = min(map(len, runs.values()))
    tokens = [line["tokens"] for line in first[:steps]]

    def curves(key: str) -> str:
        drawn = [
            Line(name=name, values=[line[key] for line in lines[:steps]])
            for name, lines in runs.items()
        ]
        return lines_plot(tokens, drawn, "tokens", key.replace("_", " "))

    scored = [line for line in first if "scores" in line]
    by_task = [
        Line(name=task, values=[100 * line["scores"][task] for line in scored])
        for task in (scored[-1]["scores"] if scored else ())
        if all(task in line["scores"] for line in scored)
    ]
    parts = [curves("loss"), curves("max_logit"), curves("tokens_per_s")]
    parts.append(lines_plot([x["tokens"] for x in scored], by_task, "tokens", "% right, held out"))
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>{''.join(parts)}\n"


COMMANDS = (
    Command(
        words="train", settings=Train, run=run, takes_file=True,
        examples="mooncake train --config configs/train/k2-demo.yaml\n"
        "mooncake train --preset k2-nano --tasks sum=1 --steps 50 --out /tmp/nano",
        notes="Run the same command again to go on after a stop: what follows is, bit for bit, "
        "what would have\nfollowed. Settings may change in between (a longer run, other tasks).",
    ),
)  # fmt: skip
