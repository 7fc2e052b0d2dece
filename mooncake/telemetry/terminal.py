"""What commands show in a terminal: tables, and a progress bar that vanishes when it is done."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table


def plain_table(*columns: str, title: str | None = None, right: Collection[str] = ()) -> Table:
    """Return a table without lines. The columns in `right` hold numbers."""
    table = Table(title=title, box=None, pad_edge=False, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def show_rows(title: str, rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print rows in a table with lines, the header first. All columns but the first hold
    numbers.
    """
    head, *rest = rows
    table = Table(title=title, show_header=any(head))
    for number, cell in enumerate(head):
        table.add_column(cell, justify="right" if number else "left")
    for row in rest:
        table.add_row(*row)
    console.print(table)


@contextmanager
def progress(
    what: str, whole: int | None, console: Console, *, in_bytes: bool = False, hidden: bool = False
) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar if `console` is a terminal. Yields the function that moves it: (how much
    is done, of how much).
    """
    with Progress(
        TextColumn("{task.description}"), BarColumn(),
        DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn(),
        TimeRemainingColumn(), console=console, transient=True,
        disable=hidden or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=whole)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
