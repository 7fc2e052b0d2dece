"""Tells which workers hold which stretch of one chain. All its keys are looked up at once.

`PrefixIndex.prefix_match` makes one for each placement; it is valid only until the next block
event. Masks here hold live workers only, with all tiers of a worker in one bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from mooncake.base import BlockKey

LOOK_FIRST = 128
"""Keys looked up before the rest. For most new prompts no worker has even these."""


class Masks(Protocol):
    """Looks up keys for a prefix match."""

    def live_runs(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Return (stop, workers) for runs of keys that the same workers hold; 0: no worker."""


@dataclass(frozen=True, slots=True)
class Region:
    """A run of blocks that each have a holder, cut where the holders change."""

    origin: int
    stops: tuple[int, ...]
    """Where each stretch ends (and the next begins)."""
    masks: tuple[int, ...]
    """The holders of each stretch."""

    @property
    def end(self) -> int:
        """The first block that no worker holds, or the end of the chain."""
        return self.stops[-1] if self.stops else self.origin

    def start(self, stretch: int) -> int:
        """Return the first block of a stretch."""
        return self.stops[stretch - 1] if stretch else self.origin


class PrefixMatch:
    """The holders of a chain, which are looked up as far as they are needed."""

    def __init__(self, masks: Masks, keys: Sequence[BlockKey]) -> None:
        self._source = masks
        self._keys = keys
        self._stops: list[int] = []
        self._masks: list[int] = []
        """The holders of the keys up to each stop, as far as they were looked up."""
        self._regions: list[Region] = []

    def region(self, first: int) -> Region:
        """Return the region with block `first`; an empty one if no worker holds it."""
        for region in self._regions:
            if region.origin <= first < region.end or first == region.origin:
                return region
        if any(region.end == first for region in self._regions):
            region = Region(first, (), ())  # no worker holds a region's end
        else:
            region = self._walk(first)
        self._regions.append(region)
        return region

    def runs(self, first: int, among: int) -> Iterator[tuple[int, int]]:
        """Yield (stop, workers) for the workers of the mask `among` that hold the blocks
        [first, stop) and not the next; the longest run first.
        """
        region = self.region(first)
        if not region.stops:
            return
        stretch = bisect_right(region.stops, first)
        running, ended = region.masks[stretch] & among, []
        for number in range(stretch + 1, len(region.stops)):
            if not running:
                break
            held = running & region.masks[number]
            if held != running:
                ended.append((region.stops[number - 1], running ^ held))
                running = held
        if running:
            yield region.end, running
        yield from reversed(ended)

    def run_of(self, first: int, bits: int) -> int:
        """Return where the run ends that begins at `first` and that the workers in `bits` hold
        together.
        """
        region = self.region(first)
        stop = first
        if region.stops:
            for number in range(bisect_right(region.stops, first), len(region.stops)):
                if not region.masks[number] & bits:
                    break
                stop = region.stops[number]
        return stop

    def looked_up(self) -> tuple[tuple[int, int], ...]:
        """Return (stop, workers) of all keys that were looked up so far, as `holders` does."""
        return tuple(zip(self._stops, self._masks, strict=True))

    def holders(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield (stop, workers) for runs of keys that the same workers hold, up to the key with the
        number `count`; 0 for blocks that no worker holds.
        """
        self._look_up(count)
        for stop, mask in zip(self._stops, self._masks, strict=True):
            yield stop, mask
            if stop >= count:
                return

    def _walk(self, first: int) -> Region:
        stops: list[int] = []
        masks: list[int] = []
        self._look_up(first + 1)
        number = bisect_right(self._stops, first)
        while number < len(self._stops) and (mask := self._masks[number]):
            stop = self._stops[number]
            if masks and masks[-1] == mask:
                stops[-1] = stop
            else:
                stops.append(stop)
                masks.append(mask)
            self._look_up(stop + 1)
            number += 1
        return Region(first, tuple(stops), tuple(masks))

    def _look_up(self, count: int) -> None:
        """Look up the holders of the leading `count` keys, and of some more."""
        known = self._stops[-1] if self._stops else 0
        if known >= min(count, len(self._keys)):
            return
        stop = LOOK_FIRST if count <= LOOK_FIRST else len(self._keys)
        for end, mask in self._source.live_runs(self._keys[known:stop]):
            self._stops.append(known + end)
            self._masks.append(mask)
