"""Followers of engines: which ones run, and how to have those of this process forked, which takes a
fraction of the time that their imports take.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from mooncake.launch.host import environment
from mooncake.launch.host.processes import fork_server


@contextlib.contextmanager
def forked_followers(folder: Path, *modules: str) -> Iterator[None]:
    """Have followers that this process starts in the block forked: see `forks` and `forked_by`."""
    with forks(folder, *modules) as path, forked_by(path):
        yield


@contextlib.contextmanager
def forks(folder: Path, *modules: str) -> Iterator[Path]:
    """Yield where a process forks that has imported what followers need, and `modules`."""
    path = os.pathsep.join(each for each in sys.path if each)
    environ = {**environment.QUIET, **environment.COMPUTE, **os.environ, "PYTHONPATH": path}
    early = ("mooncake.launch.worker.ranks.rank_processes", *modules)
    with fork_server.ForkServer(folder / "forks", early, environ):
        yield folder / "forks"


@contextlib.contextmanager
def forked_by(path: Path) -> Iterator[None]:
    """Have followers that this process starts in the block forked there. One that cannot be forked
    is an error: tests would pass all the same, and take three times as long.
    """

    def fork(*arguments: Any, **settings: Any) -> fork_server.Fork:
        forked = fork_server.fork(*arguments, **settings)
        assert forked is not None, "the fork server has refused a follower, or has ended"
        return forked

    with (
        mock.patch.object(fork_server.Origin, "path", str(path)),
        mock.patch.object(fork_server, "CLIENT_S", 600.0),  # its imports may be under way
        mock.patch("mooncake.launch.worker.ranks.rank_processes.fork", fork),
    ):
        yield


def followers(lead: int | None = None) -> list[psutil.Process]:
    """Return the followers below this process: all, or those of one lead and of what is below
    it.
    """
    every = psutil.Process().children(recursive=True)
    below = every if lead is None else psutil.Process(lead).children(recursive=True)
    found = []
    for each in every:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            leads = [word for word in each.cmdline() if word.startswith("lead=")]
            if leads and (each in below or leads == [f"lead={lead}"]):
                found.append(each)
    return found
