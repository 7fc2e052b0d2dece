"""Processes that draw the samples of coming steps while this one computes.

Each has a pipe of its own and is asked for every N-th step, for two steps ahead at most. A process
ends when its pipe closes, so none outlives this one, however this one ends.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from mooncake.base import Unavailable
from mooncake.train.drawing import Drawing, Drawn

Wanted = tuple[int, Mapping[str, float], int]
"""A step, the weights of its tasks, and the most tokens of a conversation."""
Arguments = tuple[Path, int, int, int]
"""The arguments of `Drawing`."""
_AHEAD = 2
"""How many steps a process is asked for before the first of them is taken."""


def drawn_ahead(
    arguments: Arguments, wanted: Iterator[Wanted], number: int
) -> Generator[list[Drawn], None, None]:
    """Yield what each wanted step reads, in their order, drawn by `number` processes.

    Raises:
        Unavailable: a process ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and device
    connections: list[Connection] = []
    processes = []
    try:
        for place in range(number):
            own, theirs = context.Pipe()
            connections.append(own)
            process = context.Process(
                target=_serve, args=(theirs, arguments), name=f"mooncake-draw-{place}", daemon=True
            )
            process.start()
            processes.append(process)
            theirs.close()
        asked = _asked(connections, wanted)
        coming = [next(asked, None) for _ in range(_AHEAD * number)]
        while (source := coming.pop(0)) is not None:
            drawn: list[Drawn] = source.recv()
            coming.append(next(asked, None))
            yield drawn
    except (EOFError, OSError) as error:
        raise Unavailable(
            "a process that draws samples ended; run the same command again"
        ) from error
    finally:
        for connection in connections:
            connection.close()
        for process in processes:
            process.kill()
            process.join()


def _asked(connections: list[Connection], wanted: Iterator[Wanted]) -> Iterator[Connection]:
    """Ask for each wanted step, and yield the pipe through which it will come."""
    for place, one in enumerate(wanted):
        connection = connections[place % len(connections)]
        connection.send(one)
        yield connection


def _serve(connection: Connection, arguments: Arguments) -> None:
    # A signal to the whole group is for the process that trains, which closes the pipes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    drawing = Drawing(*arguments)
    with suppress(EOFError, OSError):
        while True:
            connection.send(drawing.of_step(*connection.recv()))
