"""Followers with emulated GPUs: each is a process of its own, started as served code does. What
races on one of them is told to the process that had it started.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mooncake.launch.worker.ranks import rank_processes

RANK_S = 600.0
"""How long a rank may give no sign of life and be waited for: it emulates its GPU on a core that it
shares with other ranks and other tests.
"""
SETTINGS = "EMULATED_CUDA"
_kept = ExitStack()


@contextmanager
def followers_emulated(
    *, as_references: bool = False, silent_s: float = RANK_S, **machine: Any
) -> Iterator[None]:
    """Have followers that are started in the block run on GPUs like those of `emulated`; with
    Triton's ops as in `ops.reference_ops`, if wanted. A follower that gives no sign of life for
    `silent_s` ends the instance. AssertionError: tasks of one raced.
    """
    with tempfile.TemporaryDirectory() as told:
        settings = {"as_references": as_references, "machine": machine, "told": told}
        with (
            mock.patch.dict(os.environ, {SETTINGS: json.dumps(settings)}),
            mock.patch.object(rank_processes, "PROGRAM", "tests.support.cuda.follower_program"),
            mock.patch.object(rank_processes, "SILENT_S", silent_s),
            mock.patch.object(rank_processes, "EXCHANGE_S", RANK_S),
        ):
            yield
        races = [each.read_text(encoding="utf-8") for each in Path(told).iterdir()]
        assert not races, "\n\n".join(races)


def begin() -> None:
    """Emulate GPUs in this process until it ends."""
    from tests.support.cuda.install import emulated
    from tests.support.cuda.ops import reference_ops

    settings = json.loads(os.environ[SETTINGS])
    machine = _kept.enter_context(emulated(**settings["machine"])).machine
    races = Path(settings["told"], str(os.getpid()))

    def tell(race: str) -> None:
        if not races.exists():  # the first says enough
            races.write_text(f"a follower: {race}", encoding="utf-8")

    machine.tell_race = tell
    if settings["as_references"]:
        _kept.enter_context(reference_ops())
