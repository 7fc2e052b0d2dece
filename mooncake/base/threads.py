"""Threads of two kinds: those that their process cannot do without, and those with a stack for deep
recursion in C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

STACK_BYTES = 64 * 2**20
"""The size of a deep thread's stack. Only what a thread uses takes memory. Where processes have no
limit on their stack, other new threads get only 2 MiB, and an overflow ends the process.
"""

_STACK_SIZE = threading.Lock()
"""A caller holds this while it changes the stack size for new threads: the whole process has one.
"""


class VitalThread(threading.Thread):
    """A daemon thread whose failure is its process's failure, because others would wait for it for
    ever. Where `launch` owns the process, an exception that leaves the thread ends the process, so
    that peers notice and another process takes its place. A program that only imports this package
    goes on; Python prints the exception.
    """

    def __init__(self, target: Callable[..., object], name: str, *args: Any) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)


def start_deep_thread(work: Callable[[], object], name: str) -> threading.Thread:
    """Start and return a daemon thread that runs `work` with a stack of `STACK_BYTES`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _STACK_SIZE:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


def run_deep(work: Callable[[], T]) -> T:
    """Run `work` in a thread with a deep stack and return its value, or raise its error."""
    values: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            values.append(work())
        except BaseException as error:  # also a panic of a library
            errors.append(error)

    start_deep_thread(run, "deep").join()
    if errors:
        raise errors[0]
    return values[0]
