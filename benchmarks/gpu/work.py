"""What a GPU benchmark is: something to run, the bytes and products it cannot do without, and how
far its numbers may lie from the reference. No measuring here (`measure`), no kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mooncake_kernels.synthetic import Maker
from mooncake_kernels.timing import Timer


@dataclass(frozen=True)
class Bench:
    """Where benchmarks run. tiny: shapes for Triton's interpreter, to try every line of them."""

    device: torch.device
    timer: Timer
    tiny: bool
    copy_bytes_s: float
    """Read plus written by a large copy: what floors are made of."""

    def maker(self) -> Maker:
        """Return a source of seeded tensors."""
        return Maker(self.device)

    def size(self, full: int, tiny: int) -> int:
        """Return one of the two."""
        return tiny if self.tiny else full


@dataclass(frozen=True)
class Work:
    """One thing to time, made ready.

    num_bytes: of memory that must be read or written once. flops: of its products. difference: from
    the reference on the same inputs, at most `gate`. peers: public kernels for the same, each a
    call; one that cannot run raises. note: what the shape leaves open.
    """

    run: Callable[[], Any]
    num_bytes: int
    flops: int
    difference: Callable[[], float]
    gate: float
    note: str = ""
    peers: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """Our own kernel cut otherwise, as right as `run`."""


@dataclass(frozen=True)
class Case:
    """A line of the table. unit: "us" and "ms" (less is better) or "TFLOP/s" (more is)."""

    name: str
    what: str
    unit: str
    must: float
    aim: float
    make: Callable[[Bench], Work]

    def value(self, seconds: float, flops: int) -> float:
        """Return the measured time in `unit`."""
        if self.unit == "TFLOP/s":
            return flops / seconds / 1e12
        return seconds * {"us": 1e6, "ms": 1e3}[self.unit]

    def verdict(self, value: float) -> str:
        """Return "aim", "must" or "missed"."""
        more = self.unit == "TFLOP/s"
        for word, wanted in (("aim", self.aim), ("must", self.must)):
            if value >= wanted if more else value <= wanted:
                return word
        return "missed"
