"""`mooncake model init` and `convert`: write checkpoints with a progress bar. The work is
`model.checkpoint`'s.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mooncake.base import format_bytes
from mooncake.cli.command import Command
from mooncake.launch.config.options import count, setting, text

OUT = "output"
NEW = "a directory that is not there yet"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    """Settings of `mooncake model init`."""

    preset: str = setting("", text, OUT, "NAME", "k2-nano, k2-tiny or k2-small", required=True)
    seed: int = setting(0, count(0), OUT, "N", "of the weights")
    out: str = setting("", text, OUT, "DIR", NEW, required=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convert:
    """Settings of `mooncake model convert`."""

    # fmt: off
    model: str = setting("", text, OUT, "DIR", "a checkpoint that is not quantized",
        positional=True, required=True)
    to: str = setting("", text, OUT, "FORMAT",
        "fp8 (blocks of 128 x 128, as K2-Instruct) or int4 (groups of 32, as K2-Thinking)",
        required=True)
    out: str = setting("", text, OUT, "DIR", NEW, required=True)
    # fmt: on


def init(wanted: Init) -> int:
    """Write the checkpoint.

    Raises:
        ConfigError: no such preset, or `out` holds something already.
    """
    from mooncake.model.checkpoint.presets import init_checkpoint

    return _write(
        f"writing {wanted.preset}",
        wanted.out,
        lambda show: init_checkpoint(wanted.preset, wanted.seed, Path(wanted.out), progress=show),
    )


def convert(wanted: Convert) -> int:
    """Write a quantized copy of a checkpoint.

    Raises:
        ConfigError: an unknown format, a source that is quantized, or `out` holds something.
        CheckpointError: the source cannot be read.
    """
    from mooncake.model.checkpoint.convert import convert_checkpoint

    return _write(
        f"converting to {wanted.to}",
        wanted.out,
        lambda show: convert_checkpoint(
            Path(wanted.model), Path(wanted.out), wanted.to, progress=show
        ),
    )


def _write(what: str, out: str, write: Callable[[Callable[[int, int], None]], Path]) -> int:
    """Show a bar while `write` works, then what was written."""
    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole)

        path = write(show)
    written = sum(file.stat().st_size for file in path.iterdir())
    console.print(
        f"wrote {path} ({format_bytes(written)}); serve it: mooncake serve {out}", soft_wrap=True
    )
    return 0


def progress_bar(console: Console) -> Progress:
    """Return a bar for bytes that vanishes when it is done; none where output is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


COMMANDS = (
    Command(
        words="model init", summary="write a checkpoint with random weights", settings=Init,
        run=init,
        examples="mooncake model init --preset k2-small --seed 0 --out checkpoints/k2-small",
    ),
    Command(
        words="model convert", summary="write a quantized copy", settings=Convert, run=convert,
        examples="mooncake model convert checkpoints/k2-small --to fp8 --out checkpoints/k2-fp8\n"
        "mooncake model convert checkpoints/k2-small --to int4 --out checkpoints/k2-int4",
    ),
)  # fmt: skip
