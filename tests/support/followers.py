"""Followers of engines: which ones run, and how to have those of this process forked, which takes a
fraction of the time that their imports take.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import psutil

from mooncake.launch.host import environment, fork_server


@contextlib.contextmanager
def forked_followers(folder: Path, *modules: str) -> Iterator[None]:
    """Have followers that this process starts in the block forked from a process that has imported
    what they need, and `modules`.
    """
    path = os.pathsep.join(each for each in sys.path if each)
    environ = {**os.environ, **environment.COMPUTE, "PYTHONPATH": path}
    early = ("mooncake.launch.worker.rank_processes", *modules)
    with (
        fork_server.ForkServer(folder / "forks", early, (), environ),
        mock.patch.object(fork_server.Origin, "path", str(folder / "forks")),
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
