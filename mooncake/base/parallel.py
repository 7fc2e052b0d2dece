"""The shape of an instance: how many ranks share one model, and how. Pure values and rules.

An instance is one replica of the model on one or more ranks, each a process with a device of its
own. `tp` ranks each hold a part of every layer (tensor parallel). Of these, `dcp` share out the
KVCache (decode context parallel): with 1 every rank holds the KV of every block, since the latent
KV of MLA has one head and cannot be cut by heads.
"""

from __future__ import annotations

import re

import msgspec

from mooncake.base.errors import ConfigError

TP_FLAG, DCP_FLAG = "tensor-parallel-size", "decode-context-parallel-size"
_WORDS = re.compile(r"tp([1-9][0-9]*)(?:-dcp([1-9][0-9]*))?")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one instance.

    Raises:
        ConfigError: a number is below 1, or `dcp` does not divide `tp`.
    """

    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for flag, number in ((TP_FLAG, self.tp), (DCP_FLAG, self.dcp)):
            if number < 1:
                raise ConfigError(f"{flag}: must be at least 1, not {number}")
        if self.tp % self.dcp:
            raise ConfigError(
                f"{DCP_FLAG}: {self.dcp} does not divide {TP_FLAG} {self.tp}; each rank holds one "
                f"share of the context: {_listed(divisors(self.tp))} would do"
            )

    @classmethod
    def parse(cls, words: str) -> Shape:
        """Return the shape written as "tp8" or "tp8-dcp8".

        Raises:
            ConfigError: it is not of that form, or not a shape that can be.
        """
        match = _WORDS.fullmatch(words)
        if match is None:
            raise ConfigError(f"shape: {words!r} is not tpN or tpN-dcpN (e.g. tp8 or tp8-dcp8)")
        return cls(tp=int(match.group(1)), dcp=int(match.group(2) or 1))

    def __str__(self) -> str:
        return f"tp{self.tp}" + (f"-dcp{self.dcp}" if self.dcp > 1 else "")


def divisors(number: int) -> list[int]:
    """Return what divides `number`, smallest first."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
