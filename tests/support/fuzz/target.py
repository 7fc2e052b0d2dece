"""A target of the fuzz campaign: one parser of bytes that a stranger, a peer or a disk may give.

A target says how to feed the parser, which errors are an answer, and what an input may cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from typing import ClassVar

from mooncake.base.errors import MooncakeError

MAX_ERROR_CHARS = 4096
"""No error repeats more than this of what a stranger sent."""


class Shape(Enum):
    """What an input is made of, so that mutations get past the outermost layer."""

    BYTES = "bytes"
    TEXT = "text"
    JSON = "json"
    MSGPACK = "msgpack"
    FRAMES = "frames"
    """A first byte, then frames: a length (4 bytes, little-endian) and a body of msgpack each."""


class Target:
    """One parser. A subclass is made in the process that fuzzes it; `run` is called for each input.

    `run` returns a word for what came of an input: inputs with new words are kept. It raises one of
    `allowed` to refuse an input; any other error, an assertion too, is a finding.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    """Modules whose lines are traced: an input that takes a new way through them is kept."""
    shape: ClassVar[Shape] = Shape.BYTES
    seeds: ClassVar[tuple[bytes, ...]] = ()
    """Inputs to begin with; none: what is recorded in `tests/fuzz/corpus`."""
    skip: ClassVar[int] = 0
    """Bytes before the JSON or msgpack."""
    word_chars: ClassVar[int] = 60
    """What of an error tells inputs apart; less, where it repeats what was sent."""
    tokens: ClassVar[tuple[bytes, ...]] = ()
    """Words of the format, put into inputs."""
    allowed: ClassVar[tuple[type[Exception], ...]] = ()
    max_bytes: ClassVar[int] = 65_536
    base_cpu_s: ClassVar[float] = 0.5
    cpu_s_per_mb: ClassVar[float] = 2.0
    base_memory: ClassVar[int] = 32 * 2**20
    memory_per_byte: ClassVar[int] = 64

    def run(self, data: bytes) -> str:
        """Feed the parser with `data`."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what it holds."""

    def repair(self, data: bytes) -> bytes:
        """Make checksums and lengths right again, so that a mutation is not refused for them."""
        return data

    @classmethod
    def max_cpu_s(cls, num_bytes: int) -> float:
        """Return the processor time that an input of this size may take."""
        return cls.base_cpu_s + cls.cpu_s_per_mb * num_bytes / 1e6

    @classmethod
    def max_memory(cls, num_bytes: int) -> int:
        """Return by how many bytes the process may grow over an input of this size."""
        return cls.base_memory + cls.memory_per_byte * num_bytes


def refusal_word(error: Exception, num_chars: int = 60) -> str:
    """Return the beginning of an allowed error, without the values in it.

    Raises:
        AssertionError: the error itself is no answer: too long, or not to be written as UTF-8.
    """
    text = error.message if isinstance(error, MooncakeError) else str(error)
    assert len(text) <= MAX_ERROR_CHARS, f"an error of {len(text)} characters"
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise AssertionError(f"an error that is no UTF-8: {text!r:.100}") from problem
    return type(error).__name__ + ": " + re.sub(r"[0-9]+|'[^']*'|\"[^\"]*\"", "_", text)[:num_chars]


def frames_of(data: bytes) -> list[bytes]:
    """Return the bodies of the frames in `data`; what is cut off is left out."""
    found, at = [], 0
    while at + 4 <= len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if length > len(data) - at - 4:
            break
        found.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return found


def framed(bodies: Iterable[bytes]) -> bytes:
    """Return frames of these bodies."""
    return b"".join(len(body).to_bytes(4, "little") + body for body in bodies)


def pieces_of(data: bytes, how: int) -> Iterable[bytes]:
    """Cut `data` as a network might: whole, in halves, or in runs of `how` bytes."""
    if how == 0 or not data:
        return [data]
    size = how if how < 128 else max(1, len(data) // (how - 126))
    size = max(size, len(data) // 4096)
    return [data[at : at + size] for at in range(0, len(data), size)]


Make = Callable[[], Target]
