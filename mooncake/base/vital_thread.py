"""Threads that their process cannot do without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class VitalThread(threading.Thread):
    """A daemon thread whose failure is its process's failure, because others would wait for it for
    ever. Where `launch` owns the process, an exception that leaves the thread ends the process, so
    that peers notice and another process takes its place. A program that only imports this package
    goes on; Python prints the exception.
    """

    def __init__(self, target: Callable[..., object], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
