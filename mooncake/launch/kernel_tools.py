"""`mooncake tune` and `mooncake serve --check`: the kernels' own tools in the terminal."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from mooncake.base import ConfigError

FORMATS = ("plain", "fp8", "int4")


def check() -> int:
    """Compare every fast op with its reference here, print a table; 0 if none differs."""
    from mooncake_kernels.checks import check_kernels
    from mooncake_kernels.timing import local_device

    device, place = local_device()
    table = Table(title=f"kernels on {place}", title_justify="left")
    for heading in ("op", "backend", "difference", "gate", ""):
        table.add_column(heading, justify="right" if heading in ("difference", "gate") else "left")
    wrong = 0
    for row in check_kernels(device):
        ran = row.difference is not None
        broken = ran or not row.note.startswith(("needs a", "not installed"))
        wrong += broken and not row.passed
        verdict = "ok" if row.passed else row.note or "DIFFERS"
        found = f"{row.difference:.1e}" if row.difference is not None else "-"
        table.add_row(row.op, row.backend, found, f"{row.gate:.0e}", verdict)
    Console().print(table)
    return 1 if wrong else 0


def tune(split: str, formats: Sequence[str]) -> int:
    """Measure the experts of Kimi-K2 split as `split` on this GPU and write its table.

    Raises:
        ConfigError: no such split or format, or there is no GPU.
    """
    from mooncake_kernels.timing import local_device
    from mooncake_kernels.tune import BATCHES, KIMI_K2_RANKS, rank_shape, tune_experts
    from mooncake_kernels.tuning import TABLES, Target, save_table

    if split not in KIMI_K2_RANKS:
        raise ConfigError(f"split: {split!r} is not one of {', '.join(KIMI_K2_RANKS)}")
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise ConfigError(f"format: {unknown[0]!r} is not one of {', '.join(FORMATS)}")
    device, place = local_device()
    if device.type != "cuda":
        raise ConfigError("tune measures kernels on a CUDA GPU, and there is none here")
    import triton

    target = Target(place, triton.__version__)
    console = Console(stderr=True)
    for name in formats:
        shape = rank_shape(name, split)
        with _bar(console) as bar:
            task = bar.add_task(shape.key, total=len(BATCHES))
            found = tune_experts(shape, progress=functools.partial(_show, bar, task))
        save_table(TABLES / target.file_name, target, {shape.key: found})
        console.print(f"{shape.key}: {len(found)} batches in {TABLES / target.file_name}")
    return 0


def _show(bar: Progress, task: TaskID, done: int, whole: int) -> None:
    bar.update(task, completed=done, total=whole)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
