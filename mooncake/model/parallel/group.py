"""The port by which ranks exchange tensors, and the group of one.

Every rank of a group calls the same operations in the same order with tensors of the same shapes.
Contract: what `sum` returns is bit-equal on all ranks (added by one tree over them, in float32,
rounded once), else replicated KV and routing would drift apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from mooncake_kernels.native.fixed import added


@dataclass
class Traffic:
    """What one rank gave to its group: calls, and bytes of the tensors it contributed."""

    num_calls: int = 0
    num_bytes: int = 0

    def count(self, x: torch.Tensor) -> None:
        """Count one call that contributes `x`."""
        self.num_calls += 1
        self.num_bytes += x.numel() * x.element_size()


class Group(Protocol):
    """The ranks that share one model, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def traffic(self) -> Traffic: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, in its shape and dtype; `x` may be overwritten."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` side by side along the last dimension, in the ranks' order."""

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return what every rank has for this one: [ranks, ...] in their order, where `x[i]` is
        what this rank has for rank i.
        """

    def send(self, x: torch.Tensor, to: int) -> None:
        """Have rank `to`, which receives from this one alone, receive `x`; return once `x` may be
        overwritten. A few that are on their way are not waited for.
        """

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Write what `source` sends next, of the shape and dtype of `out`, into it. Waits as long
        as that rank goes on.
        """

    def go_on(self) -> None:
        """Say that this rank has come further: who waits for what it sends waits on."""

    def meet(self) -> None:
        """Return once all ranks have come here."""

    def part(self, size: int) -> Group:
        """Return this rank's group of `size` ranks, of those into which all are cut in order: all
        ranks call this alike. Of all ranks it is this group itself.
        """

    def fail(self) -> None:
        """Have every rank that waits, or comes later, raise `GroupError`; from any thread."""


class GroupError(Exception):
    """Another rank failed, or did not come in time: the instance has to end."""


class Solo:
    """A group of one rank: nothing is exchanged."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`."""
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Raise: there is no other rank."""
        del x
        raise GroupError(f"one rank alone has no rank {to}")

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Raise: there is no other rank."""
        del out
        raise GroupError(f"one rank alone has no rank {source}")

    def go_on(self) -> None:
        """Do nothing: nobody waits."""

    def meet(self) -> None:
        """Return."""

    def part(self, size: int) -> Solo:
        """Return this group."""
        assert size == 1, "one rank is not cut"
        return self

    def fail(self) -> None:
        """Do nothing: there is no other rank to wait for."""


def ordered_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' parts: neighbours first, then neighbouring sums, in float32,
    rounded once to their dtype.

    The plain form of what every group returns.
    """
    return added([part.float() for part in parts]).to(parts[0].dtype)
