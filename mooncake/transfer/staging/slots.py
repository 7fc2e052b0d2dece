"""Numbered slots, given to askers in turn, so that none starves. Pure.

A slot is free, held or resting (its former holder may still be writing to it).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

Granted = Callable[[int], None]
"""Called with the slot that the asker holds from now on."""


class FairSlots:
    """Askers take turns, however much each asks for."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._held: set[int] = set()
        self._resting: set[int] = set()
        self._asks: OrderedDict[Hashable, deque[Granted]] = OrderedDict()
        self._serving = False

    @property
    def num_free(self) -> int:
        """Number of slots that nobody holds and that do not rest."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Slots that askers hold."""
        return len(self._held)

    @property
    def num_resting(self) -> int:
        """Number of slots that are out of use for a while."""
        return len(self._resting)

    @property
    def num_asks(self) -> int:
        """Number of asks without an answer."""
        return sum(len(asks) for asks in self._asks.values())

    def ask(self, asker: Hashable, granted: Granted) -> None:
        """Have `granted` called with a slot, at once or when it is the turn of `asker`."""
        self._asks.setdefault(asker, deque()).append(granted)
        self._serve()

    def forget(self, asker: Hashable) -> None:
        """Drop the open asks of `asker`."""
        self._asks.pop(asker, None)

    def release(self, slot: int) -> None:
        """Give back a held slot."""
        self._held.remove(slot)
        self._free.append(slot)
        self._serve()

    def rest(self, slot: int) -> None:
        """Keep a slot that was held out of use until `wake`."""
        self._held.remove(slot)
        self._resting.add(slot)

    def wake(self, slot: int) -> None:
        """Put a resting slot back into use."""
        self._resting.remove(slot)
        self._free.append(slot)
        self._serve()

    def _serve(self) -> None:
        if self._serving:  # a callback gave a slot back: the loop below goes on
            return
        self._serving = True
        try:
            while self._free and self._asks:
                asker, asks = self._asks.popitem(last=False)
                granted = asks.popleft()
                if asks:
                    self._asks[asker] = asks
                slot = self._free.popleft()
                self._held.add(slot)
                granted(slot)
        finally:
            self._serving = False

    def check_integrity(self) -> None:
        """Raise AssertionError unless each slot is exactly one of free, held and resting."""
        places = sorted([*self._free, *self._held, *self._resting])
        assert places == list(range(self.num_slots)), f"slots {places} of {self.num_slots}"
        assert not (self._free and self._asks), "a slot is free although one is asked for"
