"""Processes of device tests. They fork from one that has imported what they need."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mooncake.launch.host.processes.fork_server import Origin
from tests.support.followers import forked_by
from tests.support.waiting import LONG_S

FOUND_S = 600.0
"""A process may take this long until its next value: on two cores, beside other tests."""
Work = Callable[..., Iterator[Any]]
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(
    ["tests.device.served", "tests.device.test_group", "torch.distributed.tensor", "torch._dynamo"]
)  # torch imports the last two at a device's first op: here once, and not in each process


class Processes:
    """A process for each of `arguments`, in which the generator `work(*arguments)` runs. After each
    value it waits until it is told to go on. An error is a value, too: its text, the last one.
    """

    def __init__(self, work: Work, arguments: Sequence[tuple[Any, ...]]) -> None:
        pipes = [_forking.Pipe() for _ in arguments]
        self.each = [
            _forking.Process(target=_run, args=(theirs, work, its, Origin.path), daemon=True)
            for its, (_, theirs) in zip(arguments, pipes, strict=True)
        ]
        self._pipes = [ours for ours, _ in pipes]
        for process in self.each:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def found(self) -> list[Any]:
        """Return the next value of each."""
        return [self.found_by(number) for number in range(len(self.each))]

    def found_by(self, number: int) -> Any:
        """Return the next value of one of them."""
        assert self._pipes[number].poll(FOUND_S), f"process {number} hangs"
        return self._pipes[number].recv()

    def go_on(self, *numbers: int) -> None:
        """Tell these to go on; if none are named, all."""
        for number in numbers or range(len(self.each)):
            self._pipes[number].send_bytes(b"go on")

    def end(self) -> None:
        """Tell all to go on, and wait for their ends. AssertionError: one has another value, or
        an error.
        """
        self.go_on()
        for number, pipe in enumerate(self._pipes):
            with contextlib.suppress(EOFError):
                raise AssertionError(f"process {number} does not end: {self.found_by(number)}")
            pipe.close()
        self.join()
        assert {each.exitcode for each in self.each} == {0}

    def join(self) -> None:
        """Wait for the end of all."""
        for process in self.each:
            process.join(LONG_S)


def _run(pipe: Connection, work: Work, arguments: tuple[Any, ...], forks: str | None) -> None:
    # Followers of this process are forked, too, if those of the tests' process are.
    with contextlib.nullcontext() if forks is None else forked_by(Path(forks)):
        try:
            for found in work(*arguments):
                pipe.send(found)
                pipe.recv_bytes()
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            pipe.recv_bytes()
