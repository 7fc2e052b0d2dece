"""Targets with a fault each, to see that a campaign finds it."""

from __future__ import annotations

import ctypes
import threading

from mooncake.base.errors import InvalidRequest
from tests.support.fuzz.target import Target

MAGIC = b"MAGIC"


class WrongError(Target):
    """Raises an error of its own behind three bytes that each take a branch."""

    name = "planted-error"
    modules = (__name__,)
    seeds = (b"start", b"xyz")
    allowed = (InvalidRequest,)

    def run(self, data: bytes) -> str:
        if not data.startswith(b"s"):
            raise InvalidRequest("no s")
        if data[-1:] != b"z":
            raise InvalidRequest("no z")
        if len(data) % 2:
            return "odd"
        raise KeyError("even")


class LongError(Target):
    """Repeats in its error all that it was sent."""

    name = "planted-long-error"
    seeds = (b"start",)
    allowed = (InvalidRequest,)

    def run(self, data: bytes) -> str:
        raise InvalidRequest(f"wrong: {data!r}")


class Endless(Target):
    """Runs for ever, in C, for a letter."""

    name = "planted-endless"
    seeds = (b"start", b"!!")
    base_cpu_s = 0.05

    def run(self, data: bytes) -> str:
        if data.count(b"!") > 2:
            sum(iter(int, 1))
        return "ended"


class Waits(Target):
    """Waits for ever, and takes no time, for a letter."""

    name = "planted-waits"
    seeds = (b"start", b"!!")

    def run(self, data: bytes) -> str:
        if data.count(b"!") > 2:
            threading.Event().wait()
        return "ended"


class Crash(Target):
    """Ends the process for a letter."""

    name = "planted-crash"
    seeds = (b"start", b"!!")

    def run(self, data: bytes) -> str:
        if data.count(b"!") > 2:
            ctypes.string_at(0)
        return "ended"


class Greedy(Target):
    """Takes more memory than there is for one letter, and too much for another."""

    name = "planted-memory"
    seeds = (b"start", b"!!", b"??")
    max_bytes = 64

    def run(self, data: bytes) -> str:
        if data.count(b"!") > 2:
            bytearray(2**45)
        if data.count(b"?") > 2:
            b"x" * 2**26
        return "taken"


class Square(Target):
    """Takes the square of its input's length, but less than the limit of time."""

    name = "planted-square"
    seeds = (b"start",)
    base_cpu_s = 60.0
    max_bytes = 24_000

    def run(self, data: bytes) -> str:
        for at in range(0, len(data), 8):
            data.rfind(b"\0\1\2", 0, len(data) - at)
            sum(data[at:])
        return "done"


class Slow(Target):
    """Takes more time than its limit for long inputs."""

    name = "planted-slow"
    seeds = (b"start",)
    base_cpu_s = 0.02
    cpu_s_per_mb = 0.5
    max_bytes = 30_000

    def run(self, data: bytes) -> str:
        sum(byte * byte for byte in data * 80)  # about half of what ends a run
        return "done"
