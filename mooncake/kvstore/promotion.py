"""Readers that wait for blocks on their way up from SSD. A run comes up in pieces, head first: one
is answered when it lies in DRAM, or when its time is up; for the next its reader asks again.

Pure; owned by the node. What has come up is held for its reader until the answer. A piece is half
of what may be on its way, so that the next one is read while the reader takes the first; who finds
the disks busy waits for its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from mooncake.base import BlockKey
from mooncake.kvstore.dram import DramTier
from mooncake.kvstore.tiering import Tiering

PIECES = 2
"""So many pieces are what may be on its way up."""

Settled = Callable[[float, bool], None]
"""(now, whether more of the run can be had by asking again): called once, while what came up is
still held.
"""


class _Wait:
    __slots__ = ("deadline_s", "gently", "held", "missing", "more", "rest", "run", "settled")

    def __init__(self, run: list[BlockKey], rest: Sequence[BlockKey], gently: bool) -> None:
        self.run = run
        self.rest = rest
        """What was asked for behind the run."""
        self.gently = gently
        self.missing: dict[BlockKey, None] = {}
        """Of the run, what is on its way or waits for its turn."""
        self.held: list[BlockKey] = []
        self.more = False
        self.deadline_s = 0.0
        self.settled: Settled = _ignored


def _ignored(_now: float, _more: bool) -> None:
    """Nobody waits."""


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
        self.max_piece = max(1, tiering.max_loading // PIECES)
        """Blocks that come up for one answer."""
        self._waits: dict[Hashable, _Wait] = {}
        self._waiting_for: dict[BlockKey, dict[Hashable, None]] = {}
        self._line: dict[Hashable, None] = {}
        """Those that miss what is not on its way yet, in the order they came."""

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
    ) -> bool | None:
        """Bring up what the first piece of a run lacks, as far as it goes from its first block on;
        `gently`: see `Tiering.load`; such a run gives way to readers.

        Returns None when it is waited for. Otherwise `settled` is not called, and the answer is
        whether more than what lies in DRAM can be had by asking again.
        """
        keys = list(dict.fromkeys(keys))
        run, below = self._piece(keys)
        if not below:
            return False
        wait = _Wait(run, keys[len(run) :], gently)
        wait.more = bool(self._piece(wait.rest)[0])
        wait.held = [key for key in run if key not in below]
        wait.missing = dict.fromkeys(below)
        self._dram.hold(wait.held)
        self._waits[name] = wait
        for key in below:
            self._waiting_for.setdefault(key, {})[name] = None
        self._load(name, wait)
        if not wait.missing:
            self._forget(name, wait)
            return wait.more
        wait.settled, wait.deadline_s = settled, now + self._timeout_s
        return None

    def cancel(self, name: Hashable, now: float) -> None:
        """Nobody wants this run any more; what is on its way comes up all the same."""
        wait = self._waits.get(name)
        if wait is not None:
            self._forget(name, wait)
            self._settle_whole(self._next_in_line(), now)

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
            for name in list(self._waiting_for.get(key, {})):
                wait = self._waits[name]
                self._cut(name, wait, wait.run.index(key))
                wait.more = False
                touched[name] = None
        self._settle_whole(touched, now)
        self._settle_whole(self._next_in_line(), now)

    def tick(self, now: float) -> float | None:
        """Answer those whose time is up with what has come; return the next deadline."""
        for name in [n for n, wait in self._waits.items() if wait.deadline_s <= now]:
            self._waits[name].more = False
            self._settle(name, now)
        self._settle_whole(self._next_in_line(), now)
        return min((wait.deadline_s for wait in self._waits.values()), default=None)

    # ------------------------------------------------------------------ pieces

    def _piece(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], dict[BlockKey, None]]:
        """Return (what can be had of a run in one piece, what of it does not lie in DRAM)."""
        run: list[BlockKey] = []
        below: dict[BlockKey, None] = {}
        for key in keys:
            if self._tiering.is_loading(key) or self._tiering.can_load(key):
                if len(below) == self.max_piece:
                    break
                below[key] = None
            elif not self._dram.has(key):
                break
            run.append(key)
        return run, below

    def _load(self, name: Hashable, wait: _Wait) -> None:
        """Ask for what a run misses and nobody has asked for, as far as the disks have room for
        it now. What DRAM has no room for ends the run: its reader gives back what it has first; one
        that would have nothing waits for what others give back.
        """
        wanted = [key for key in wait.missing if not self._tiering.is_loading(key)]
        loadable = next(
            (n for n, key in enumerate(wanted) if not self._tiering.can_load(key)), len(wanted)
        )
        room = self._room(wait)
        coming, evicted = self._tiering.load(wanted[: min(loadable, room)], gently=wait.gently)
        self._evicted(evicted)
        if len(coming) < min(loadable, room):
            length = wait.run.index(wanted[len(coming)])
            if length or wait.gently:
                self._cut(name, wait, length)
                wait.more = length > 0
            else:
                self._wait_for_memory(name, wait)
                return
        elif len(coming) == loadable < len(wanted):
            self._cut(name, wait, wait.run.index(wanted[loadable]))  # it has gone meanwhile
            wait.more = False
        elif len(coming) < len(wanted):
            self._line[name] = None
            return
        self._line.pop(name, None)

    def _wait_for_memory(self, name: Hashable, wait: _Wait) -> None:
        """There is no room for the first block of a run: give back what it holds behind that, and
        wait for what others hold.
        """
        held = len(wait.held)
        self._cut(name, wait, 1)
        wait.more = True
        if held:
            self._load(name, wait)
        elif self._dram.num_pinned or self._dram.num_writing:
            self._line[name] = None
        else:
            self._cut(name, wait, 0)
            self._line.pop(name, None)

    def _next_in_line(self) -> dict[Hashable, None]:
        """Let those that wait for their turn ask, readers first; return who did."""
        asked: dict[Hashable, None] = {}
        for name in sorted(self._line, key=lambda name: self._waits[name].gently):
            if not self._room(self._waits[name]):
                break
            self._load(name, self._waits[name])
            asked[name] = None
        return asked

    def _room(self, wait: _Wait) -> int:
        """Return how many blocks may be asked for; of one that gives way none while others wait."""
        gives_way = wait.gently and any(not other.gently for other in self._waits.values())
        return 0 if gives_way else self._tiering.num_loadable

    def _go_ahead(self, keys: Sequence[BlockKey]) -> None:
        """Bring up the next piece while the reader takes the one before; nobody holds it."""
        _, below = self._piece(keys)
        _, evicted = self._tiering.load([key for key in below if self._tiering.can_load(key)])
        self._evicted(evicted)

    # ------------------------------------------------------------------ ends

    def _cut(self, name: Hashable, wait: _Wait, length: int) -> None:
        gone = set(wait.run[length:])
        wait.run = wait.run[:length]
        self._leave(name, [key for key in wait.missing if key in gone])
        wait.missing = {key: None for key in wait.missing if key not in gone}
        self._dram.unpin([key for key in wait.held if key in gone])
        wait.held = [key for key in wait.held if key not in gone]
        wait.rest = ()

    def _leave(self, name: Hashable, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            names = self._waiting_for[key]
            del names[name]
            if not names:
                del self._waiting_for[key]

    def _settle_whole(self, names: Iterable[Hashable], now: float) -> None:
        for name in names:
            if name in self._waits and not self._waits[name].missing:
                self._settle(name, now)

    def _settle(self, name: Hashable, now: float) -> None:
        wait = self._waits[name]
        if wait.more and not wait.gently:
            self._go_ahead(wait.rest)
        wait.settled(now, wait.more)
        self._forget(name, wait)

    def _forget(self, name: Hashable, wait: _Wait) -> None:
        del self._waits[name]
        self._line.pop(name, None)
        self._leave(name, list(wait.missing))
        # Unpinned head first: of one run the tail is the first to go.
        held = set(wait.held)
        self._dram.unpin([key for key in wait.run if key in held])

    # ------------------------------------------------------------------ checks

    def held(self) -> Counter[BlockKey]:
        """Return what is held in DRAM for readers that wait (for checks)."""
        return Counter(key for wait in self._waits.values() for key in wait.held)

    def check_integrity(self) -> None:
        """Raise AssertionError when somebody waits for what does not come."""
        for name in self._line:
            wait = self._waits[name]
            assert not (wait.held and self._room(wait)), "waits though it is its turn"
        for name, wait in self._waits.items():
            assert wait.missing, "nothing is missing and no answer was given"
            assert sorted([*wait.held, *wait.missing]) == sorted(wait.run)
            for key in wait.missing:
                on_way = self._tiering.is_loading(key)
                assert on_way or name in self._line, "waits for what is not on its way"
                assert name in self._waiting_for[key]
        for key, names in self._waiting_for.items():
            assert names
            assert all(key in self._waits[name].missing for name in names)
