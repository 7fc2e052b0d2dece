"""Simulated instances that hold the routed experts together. They step together and end together.

As in real instances (`model.parallel.exchange`, `model.parallel.peers`), an instance that begins a
step wakes the others, which take part without rows when they have none. All ranks of all instances
meet before a step, to say how many rows each has, and after each part of it. The first instance
that is lost ends all others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mooncake.sim.world.clock import EventHeap

if TYPE_CHECKING:
    from mooncake.sim.world.ranks import RankedRunner

LINK_S = 1e-4
"""Seconds for a message from one process of a machine to another."""


class ExpertGroup:
    """All instances of one group, once all of them have joined."""

    def __init__(self, heap: EventHeap) -> None:
        self._heap = heap
        self._members: list[RankedRunner] = []
        self._here: set[int] = set()
        """The members whose ranks all wait in the present exchange."""
        self._ended = False

    def join(self, instance: RankedRunner) -> int:
        """Add an instance; return its number."""
        self._members.append(instance)
        return len(self._members) - 1

    def wake(self, number: int, step: int) -> None:
        """Tell the others that an instance begins `step`."""
        for other in self._others(number):
            self._heap.after(LINK_S, partial(other.serve, step))

    def rows_of_others(self, number: int) -> list[int]:
        """Return the tokens of each other instance in the step that all have begun."""
        return [other.num_rows for other in self._others(number)]

    def meet(self, number: int) -> None:
        """Record that all ranks of an instance have come to an exchange. When it is the last
        instance, all go on.
        """
        self._here.add(number)
        if len(self._here) == len(self._members):
            self._here.clear()
            for member in self._members:
                member.go_on()

    @property
    def missing(self) -> int:
        """The first instance with a rank that has not come to the present exchange."""
        return min(set(range(len(self._members))) - self._here)

    def leave(self, number: int) -> None:
        """Record that an instance has ended. A moment later the others find its links closed."""
        if self._ended:
            return
        self._ended = True
        for other in self._others(number):
            self._heap.after(LINK_S, partial(other.lose_instance, number))

    def _others(self, number: int) -> list[RankedRunner]:
        return [each for other, each in enumerate(self._members) if other != number]
