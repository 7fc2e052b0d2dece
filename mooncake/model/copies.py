"""Asynchronous copies between host and device: the port, and the version for a CPU.

`device.cuda.CudaCopies` implements it for a GPU. On the CPU nothing has to be copied.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Arriving(Protocol):
    """A tensor on its way to the host."""

    def wait(self) -> torch.Tensor:
        """Return the tensor once it has arrived. Only this call may block."""


class Mark(Protocol):
    """A point in the order of the device's work."""

    def reached(self) -> None:
        """Block until all work before the mark has ended."""


class Copies(Protocol):
    """Copies small tensors. The host must not change a tensor after passing it."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return a host tensor's copy on the device, in the order of the device's work."""

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Start copying a device tensor to the host, in the order of the device's work."""

    def mark(self) -> Mark | None:
        """Return a mark after all work begun so far; None: that work has ended already."""


class Here:
    """A tensor that has arrived."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def wait(self) -> torch.Tensor:
        """Return the tensor."""
        return self._values


class HostCopies:
    """Copies for a device that is the host."""

    def send(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`."""
        return values

    def fetch(self, values: torch.Tensor) -> Arriving:
        """Return `values` as an arrived tensor."""
        return Here(values)

    def mark(self) -> None:
        """Return None, because work on the host has ended when its call returns."""
