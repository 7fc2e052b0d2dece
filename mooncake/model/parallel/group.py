"""The port by which ranks exchange tensors, and the group of one rank.

Every rank of a group calls the same operations in the same order with tensors of the same shapes.
The result of `sum` must be bit-equal on all ranks: added by one tree over them, in float32, rounded
once. Otherwise replicated KV and routing would drift apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass
class Traffic:
    """What one rank contributed to its group: the number of calls, and the bytes of its tensors."""

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
        """Return every rank's part for this one: [ranks, ...] in their order. `x[i]` is this rank's
        part for rank i.
        """

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x` to rank `to`, which receives from this rank alone. Returns once `x` may be
        overwritten. A few tensors may be on their way.
        """

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Write the next tensor from `source` into `out`; it has the same shape and dtype. Waits as
        long as that rank gives signs of progress.
        """

    def go_on(self) -> None:
        """Signal progress, so that ranks that wait for this one keep waiting."""

    def meet(self) -> None:
        """Return once all ranks have called this."""

    def part(self, size: int) -> Group:
        """Return this rank's group of `size` ranks. All ranks are cut in order into such groups,
        and all call this alike. When `size` is all ranks, this group itself is returned.
        """

    def fail(self) -> None:
        """Make every rank that waits, or comes later, raise `GroupError`. Any thread may
        call this.
        """


class GroupError(Exception):
    """Another rank failed, or did not come in time, so the instance must end."""


class Solo:
    """A group of one rank: nothing is exchanged."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.traffic = Traffic()

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        """Raise an error, because there is no other rank."""
        del x
        raise GroupError(f"one rank alone has no rank {to}")

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Raise an error, because there is no other rank."""
        del out
        raise GroupError(f"one rank alone has no rank {source}")

    def go_on(self) -> None:
        """Do nothing, because nobody waits."""

    def meet(self) -> None:
        """Return at once."""

    def part(self, size: int) -> Solo:
        assert size == 1, "one rank is not cut"
        return self

    def fail(self) -> None:
        """Do nothing, because no other rank waits."""


def ordered_sum(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' parts, [ranks, ...]: neighbours first, then neighbouring sums,
    in float32, rounded once to their dtype.

    This is the plain form of the sum that every group returns. All pairs of neighbours are added
    by one operation, because a GPU launches each.
    """
    left = parts.float()
    while len(left) > 1:
        pairs = left[:-1:2] + left[1::2]
        left = torch.cat((pairs, left[-1:])) if len(left) % 2 else pairs
    return left[0].to(parts.dtype)
