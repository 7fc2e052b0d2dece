"""`mooncake model init` and `convert`: write checkpoints with a progress bar. The work is
`model.presets`' and `model.convert`'s.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mooncake.base import format_bytes


def init(preset: str, seed: int, out: str) -> int:
    """Write the checkpoint and return the exit code.

    Raises:
        ConfigError: no such preset, or `out` holds something already.
    """
    from mooncake.model.presets import init_checkpoint

    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task(f"writing {preset}", total=None)

        def show(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole)

        path = init_checkpoint(preset, seed, Path(out), progress=show)
    written = sum(file.stat().st_size for file in path.iterdir())
    console.print(
        f"wrote {path} ({format_bytes(written)}); serve it: mooncake serve {out}", soft_wrap=True
    )
    return 0


def convert(source: str, format_name: str, out: str) -> int:
    """Write a quantized copy of the checkpoint `source` and return the exit code.

    Raises:
        ConfigError: an unknown format, a source that is quantized, or `out` holds something.
        CheckpointError: the source cannot be read.
    """
    from mooncake.model.convert import convert_checkpoint

    console = Console(stderr=True)
    with progress_bar(console) as bar:
        task = bar.add_task(f"converting to {format_name}", total=None)

        def show(done: int, whole: int) -> None:
            bar.update(task, completed=done, total=whole)

        path = convert_checkpoint(Path(source), Path(out), format_name, progress=show)
    written = sum(file.stat().st_size for file in path.iterdir())
    console.print(
        f"wrote {path} ({format_bytes(written)}); serve it: mooncake serve {out}", soft_wrap=True
    )
    return 0


def progress_bar(console: Console) -> Progress:
    """Return a bar for bytes that vanishes when it is done; silent where nobody looks on."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
