"""Starting processes of a fork server, in a test process whose helpers another test has ended."""

from __future__ import annotations

import warnings
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


def start(process: BaseProcess) -> None:
    """Start it. A test that ends all descendants of its process ends multiprocessing's tracker of
    resources, too; the next start warns of that, and starts another one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        resource_tracker.ensure_running()
    process.start()
