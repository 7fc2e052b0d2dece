"""Readers that wait for blocks on their way up from SSD: a run is answered when all of it that can
be had lies in DRAM, or when its time is up.

Pure; owned by the node. What has come up is held for its reader until the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.tiering import Tiering

Settled = Callable[[float], None]
"""(now): called once, while what came up is still held."""


class _Wait:
    __slots__ = ("deadline_s", "held", "missing", "run", "settled")

    def __init__(
        self,
        run: list[BlockKey],
        missing: dict[BlockKey, None],
        deadline_s: float,
        settled: Settled,
    ) -> None:
        self.run = run
        self.missing = missing
        self.held = [key for key in run if key not in missing]
        self.deadline_s = deadline_s
        self.settled = settled


class Promotions:
    """All runs that are waited for, by a name that the caller chooses."""

    def __init__(
        self,
        dram: DramTier,
        tiering: Tiering,
        timeout_s: float,
        evicted: Callable[[list[BlockKey]], None],
    ) -> None:
        self._dram = dram
        self._tiering = tiering
        self._timeout_s = timeout_s
        self._evicted = evicted
        self._waits: dict[Hashable, _Wait] = {}
        self._waiting_for: dict[BlockKey, dict[Hashable, None]] = {}

    def __contains__(self, name: Hashable) -> bool:
        return name in self._waits

    def begin(
        self,
        name: Hashable,
        keys: Sequence[BlockKey],
        now: float,
        settled: Settled,
        *,
        gently: bool = False,
    ) -> bool:
        """Bring up what a run lacks, as far as it goes from its first block on; `gently`: see
        `Tiering.load`.

        False: there is nothing to wait for, and `settled` is not called.
        """
        run: list[BlockKey] = []
        missing: dict[BlockKey, None] = {}
        wanted: list[BlockKey] = []
        for key in dict.fromkeys(keys):
            if self._tiering.is_loading(key):
                missing[key] = None
            elif self._tiering.can_load(key):
                wanted.append(key)
            elif not self._dram.has(key):
                break
            run.append(key)
        if not missing and not wanted:
            return False
        here = [key for key in run if self._dram.has(key)]
        self._dram.hold(here)
        coming, evicted = self._tiering.load(wanted, gently=gently)
        self._evicted(evicted)
        if len(coming) < len(wanted):
            run = run[: run.index(wanted[len(coming)])]
        # What was on its way already may lie behind the cut, as may what is here.
        missing.update(dict.fromkeys(coming))
        missing = {key: None for key in run if key in missing}
        kept = [key for key in run if key not in missing]
        self._dram.unpin([key for key in here if key not in set(run)])
        if not missing:
            self._dram.unpin(kept)
            return False
        self._waits[name] = _Wait(run, missing, now + self._timeout_s, settled)
        for key in missing:
            self._waiting_for.setdefault(key, {})[name] = None
        return True

    def cancel(self, name: Hashable) -> None:
        """Nobody wants this run any more; what is on its way comes up all the same."""
        wait = self._waits.pop(name, None)
        if wait is not None:
            self._leave(name, wait.missing)
            self._dram.unpin(wait.held)

    def on_loaded(self, whole: list[BlockKey], lost: list[BlockKey], now: float) -> None:
        """Some blocks came up, others never will: runs end before those."""
        touched: dict[Hashable, None] = {}
        for key in whole:
            for name in self._waiting_for.pop(key, {}):
                wait = self._waits[name]
                del wait.missing[key]
                wait.held.append(key)
                self._dram.hold([key])
                touched[name] = None
        for key in lost:
            for name in self._waiting_for.pop(key, {}):
                wait = self._waits[name]
                del wait.missing[key]
                self._cut(name, wait, wait.run.index(key))
                touched[name] = None
        for name in touched:
            if not self._waits[name].missing:
                self._settle(name, now)

    def tick(self, now: float) -> float | None:
        """Answer those whose time is up with what has come; return the next deadline."""
        for name in [n for n, wait in self._waits.items() if wait.deadline_s <= now]:
            self._settle(name, now)
        return min((wait.deadline_s for wait in self._waits.values()), default=None)

    def _cut(self, name: Hashable, wait: _Wait, length: int) -> None:
        gone = set(wait.run[length:])
        wait.run = wait.run[:length]
        behind = {key: None for key in wait.missing if key in gone}
        self._leave(name, behind)
        wait.missing = {key: None for key in wait.missing if key not in gone}
        self._dram.unpin([key for key in wait.held if key in gone])
        wait.held = [key for key in wait.held if key not in gone]

    def _leave(self, name: Hashable, keys: dict[BlockKey, None]) -> None:
        for key in keys:
            names = self._waiting_for[key]
            del names[name]
            if not names:
                del self._waiting_for[key]

    def _settle(self, name: Hashable, now: float) -> None:
        wait = self._waits.pop(name)
        self._leave(name, wait.missing)
        wait.settled(now)
        # Unpinned head first: of one run the tail is the first to go.
        held = set(wait.held)
        self._dram.unpin([key for key in wait.run if key in held])

    def held(self) -> Counter[BlockKey]:
        """Return what is held in DRAM for readers that wait (for checks)."""
        return Counter(key for wait in self._waits.values() for key in wait.held)

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody waits for what does not come."""
        for name, wait in self._waits.items():
            assert wait.missing, "nothing is missing and no answer was given"
            assert sorted([*wait.held, *wait.missing]) == sorted(wait.run)
            for key in wait.missing:
                assert self._tiering.is_loading(key), "waits for what is not on its way"
                assert name in self._waiting_for[key]
        for key, names in self._waiting_for.items():
            assert names
            assert all(key in self._waits[name].missing for name in names)
