"""A group whose ranks are threads of one process: for tests, and several ranks on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from mooncake.model.parallel.group import GroupError, Traffic, ordered_sum

MEET_S = 60.0
"""How long a rank waits for the others: they compute the same layer."""


class _Meeting:
    """Where the threads of a group lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


class ThreadGroup:
    """One rank of a group of threads."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        """Use `make`."""
        self.rank = rank
        self.size = len(meeting.parts)
        self.traffic = Traffic()
        self._meeting = meeting

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        """Return the ranks of one group of `size`."""
        meeting = _Meeting(size)
        return [cls(rank, meeting) for rank in range(size)]

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`. GroupError: another rank failed."""
        return self._with_all(x, ordered_sum)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` side by side. GroupError: another rank failed."""
        return self._with_all(x, lambda parts: torch.cat(list(parts), dim=-1))

    def meet(self) -> None:
        """Wait for all ranks. GroupError: another rank failed."""
        self._wait()

    def leave(self) -> None:
        """Have every rank that waits, or comes later, raise: this one has failed."""
        self._meeting.barrier.abort()

    def _with_all(
        self, x: torch.Tensor, make: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    ) -> torch.Tensor:
        self.traffic.count(x)
        self._meeting.parts[self.rank] = x
        self._wait()
        made = make(self._meeting.parts)
        self._wait()  # a part may be overwritten by its owner from here on
        return made

    def _wait(self) -> None:
        try:
            self._meeting.barrier.wait(MEET_S)
        except threading.BrokenBarrierError as error:
            raise GroupError("another rank of this model failed or did not answer") from error
