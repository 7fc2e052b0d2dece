"""Threads that their process cannot do without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class VitalThread(threading.Thread):
    """A daemon thread whose fault is its process's: others wait for what it does, and would wait
    for ever. Where `launch` owns the process, an exception that leaves one ends the process, so
    that peers notice and another process takes its place. A program that only imports this package
    is not ended: Python prints the exception.
    """

    def __init__(self, target: Callable[..., object], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
