"""Identifiers. Their randomness is passed in, never taken from the system here."""

from __future__ import annotations

import random
from typing import Protocol


class IdSource(Protocol):
    """The source of fresh identifiers: the system in production, a seed in the simulator."""

    def hex(self, num_bytes: int) -> str:
        """Return `num_bytes` random bytes as lower-case hex."""

    def integer(self, num_bits: int) -> int:
        """Return a random integer in [0, 2**num_bits)."""


class SeededIds:
    """An `IdSource` that repeats: `SeededIds(7)` always returns the same identifiers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def hex(self, num_bytes: int) -> str:
        return self._random.randbytes(num_bytes).hex()

    def integer(self, num_bits: int) -> int:
        return self._random.getrandbits(num_bits)


class SystemIds:
    """An `IdSource` from the operating system's randomness, which other tenants cannot guess."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()

    def hex(self, num_bytes: int) -> str:
        return self._random.getrandbits(8 * num_bytes).to_bytes(num_bytes, "big").hex()

    def integer(self, num_bits: int) -> int:
        return self._random.getrandbits(num_bits)
