"""A group whose ranks are threads of one process: for tests, and several ranks on one device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import torch

from mooncake.model.parallel.group import Group, GroupError, Solo, Traffic, ordered_sum
from tests.support.waiting import LONG_S

MEET_S = LONG_S
"""How long a rank waits for the others: they compute the same layer."""


class _Meeting:
    """Where the threads of a group lay down their tensors."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)
        self.inboxes: list[queue.SimpleQueue[torch.Tensor | None]] = [
            queue.SimpleQueue() for _ in range(size)
        ]
        """The inbox of each rank; None in it: another rank has failed."""
        self._cut: dict[tuple[int, int], _Meeting] = {}
        self._cutting = threading.Lock()

    def cut(self, size: int, number: int) -> _Meeting:
        """Return the meeting of the `number`-th part of `size` ranks."""
        with self._cutting:
            made = self._cut.setdefault((size, number), _Meeting(size))
        if self.barrier.broken:
            made.abort()
        return made

    def abort(self) -> None:
        """Have everyone who waits here, or in a part of it, raise."""
        with self._cutting:
            parts = list(self._cut.values())
        self.barrier.abort()
        for inbox in self.inboxes:
            inbox.put(None)
        for meeting in parts:
            meeting.abort()


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
        return self._with_all(x, lambda parts: ordered_sum(torch.stack(list(parts))))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' `x` side by side. GroupError: another rank failed."""
        return self._with_all(x, lambda parts: torch.cat(list(parts), dim=-1))

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts for this one. GroupError: another rank failed."""
        return self._with_all(x, lambda parts: torch.stack([part[self.rank] for part in parts]))

    def send(self, x: torch.Tensor, to: int) -> None:
        """Lay a copy of `x` down for rank `to`."""
        self.traffic.count(x)
        self._meeting.inboxes[to].put(x.clone())

    def receive(self, out: torch.Tensor, source: int) -> None:
        """Write what comes next into `out`. GroupError: another rank failed."""
        x = self._meeting.inboxes[self.rank].get()
        if x is None:
            raise GroupError(f"rank {source} of this model failed")
        out.copy_(x)

    def go_on(self) -> None:
        """Do nothing: a thread is waited for without a limit."""

    def meet(self) -> None:
        """Wait for all ranks. GroupError: another rank failed."""
        self._wait()

    def part(self, size: int) -> Group:
        """Return this rank's group of `size` ranks."""
        if size == self.size:
            return self
        if size == 1:
            return Solo()
        return ThreadGroup(self.rank % size, self._meeting.cut(size, self.rank // size))

    def fail(self) -> None:
        """Have every rank that waits, or comes later, raise: this one has failed."""
        self._meeting.abort()

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
