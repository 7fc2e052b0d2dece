"""Values on their way between host and device that nobody waits for: a port, and none at all.

What copies is `cuda.CudaCopies` on a GPU; on the CPU everything is where it should be already.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Arriving(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Return it once it is there; this alone may block."""


class Mark(Protocol):
    """A point in the order of the device's work."""

    def reached(self) -> None:
        """Return when all work before it has ended."""


class Copies(Protocol):
    """Moves small tensors; what the host hands over it must not change any more."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return a host tensor's copy on the device, in the order of the device's work."""

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Begin to bring a device tensor, as it is now in the order of its work, to the host."""

    def mark(self) -> Mark | None:
        """Return the point behind all work begun so far; None: it has ended already."""


class Here:
    """A tensor that has arrived."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        """Return it."""
        return self._values


class HostCopies:
    """Copies for a device that is the host."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Return `values`, arrived."""
        return Here(values)

    def mark(self) -> None:
        """Return None: work on the host has ended when its call returns."""
