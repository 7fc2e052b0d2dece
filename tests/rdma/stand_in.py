"""`mooncake` with a model of hashes in place of its own: it needs no torch, whose import takes an
emulated machine a minute. Processes of `mooncake up` are forks, like `up` itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from mooncake.cli import main as cli
from mooncake.launch.cluster import up
from mooncake.launch.host import environment
from mooncake.launch.worker import process
from tests.support.hosts.forks import Fork
from tests.support.serve.local_world import HashModel, read_hashes

SET_PDEATHSIG = 1


def mooncake(*words: str) -> int:
    """Be `mooncake WORDS`, and return its exit code."""
    process.read_weights = lambda path, *_: read_hashes(path)  # type: ignore[assignment]
    process.open_model = lambda path, *_: _opened(path)  # type: ignore[assignment]
    up.subprocess = SimpleNamespace(Popen=_child, DEVNULL=subprocess.DEVNULL)  # type: ignore[attr-defined]
    os.environ.update(environment.QUIET | environment.COMPUTE)
    return cli.run(words)


def _opened(path: str) -> HashModel:
    signature, revision = read_hashes(path)
    return HashModel(revision, signature)


def _child(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> Fork:
    """Start a process of `mooncake up`: `python -c PROGRAM WORDS`."""
    parent, [_, _, _, *words] = os.getpid(), command

    def be() -> int:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(SET_PDEATHSIG, signal.SIGTERM)
        return mooncake(*words) if os.getppid() == parent else 1

    return Fork(be, env)
