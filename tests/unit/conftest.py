"""Unit tests stay inside their process: no socket, no second process, no Ray cluster.

What a test refuses here belongs into tests/integration. Compilers may run.
"""

from __future__ import annotations

import multiprocessing.process
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import zmq

COMPILERS = {"c++", "cc", "clang", "g++", "gcc", "ld", "nvcc", "ptxas"}


@pytest.fixture(autouse=True)
def _stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raise where a test leaves its process, and fail the test even if a thread hides that."""
    refused: list[str] = []

    def refuse(what: str) -> Any:
        def refusing(*_: object, **__: object) -> NoReturn:
            refused.append(what)
            raise RuntimeError(f"unit tests start no {what}: move this test to tests/integration")

        return refusing

    for name in ("bind", "connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse("connection"))
    for name in ("bind", "connect"):
        monkeypatch.setattr(zmq.Socket, name, refuse("connection"))
    monkeypatch.setattr(os, "fork", refuse("second process"))
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse("second process"))
    if "ray" in sys.modules:  # where it is imported later, its processes are refused
        monkeypatch.setattr(sys.modules["ray"], "init", refuse("Ray cluster"))
    popen = subprocess.Popen.__init__

    def compiling(process: Any, args: Any, *rest: Any, **settings: Any) -> None:
        program = args if isinstance(args, str | bytes | os.PathLike) else args[0]
        if Path(os.fsdecode(program)).name not in COMPILERS:
            refuse("second process")()
        popen(process, args, *rest, **settings)

    monkeypatch.setattr(subprocess.Popen, "__init__", compiling)
    yield
    if refused:
        pytest.fail(f"unit tests start no {refused[0]}: move this test to tests/integration")
