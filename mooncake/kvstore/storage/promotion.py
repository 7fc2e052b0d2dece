"""Serves readers that wait until blocks have been promoted from SSD to DRAM, and promotes runs
before their readers come. A run is promoted in pieces, head first. Its reader is answered when a
piece is in DRAM or when time is up, and asks again for the next piece.

Pure; owned by the node. Promoted blocks stay pinned for their reader until the answer. A piece is
half of what may be loading at a time, so that the disks load the next piece while the reader takes
the first. A reader that finds the disks busy waits for its turn. Prefetched runs come after all
readers, one after the other, and only take room that is free or held by blocks that are worth less.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mooncake.base import BlockKey
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.base.rights import client_key
from mooncake.kvstore.storage.tiering import Tiering

PIECES = 2
"""Pieces that may be loading at a time."""

Settled = Callable[[float, bool], None]
"""(now, whether more of the run can be had by asking again): called once, while the promoted blocks
are still pinned.
"""


@dataclass(slots=True)
class _Wait:
    """One run that a reader waits for."""

    run: list[BlockKey]
    rest: Sequence[BlockKey]
    """Blocks that were asked for after the run."""
    place: dict[BlockKey, int]
    """Where in the run each of its blocks is."""
    missing: dict[BlockKey, None]
    """Blocks of the run that are being loaded, or wait for their turn. The others are in DRAM, and
    pinned.
    """
    unasked: deque[BlockKey]
    """The missing blocks that wait for their turn, and some that no longer wait."""
    more: bool
    gently: bool
    deadline_s: float
    settled: Settled

    def here(self) -> list[BlockKey]:
        """Return the blocks of the run that are in DRAM, head first."""
        return [key for key in self.run if key not in self.missing]


class Promotions:
    """Brings runs of blocks from disks into DRAM for readers that wait, by names that the caller
    chooses.
    """

    def __init__(
        self,
        tiering: Tiering,
        timeout_s: float,
        evicted: Callable[[list[BlockKey]], None],
    ) -> None:
        self._dram = tiering.dram
        self._tiering = tiering
        self._timeout_s = timeout_s
        self._evicted = evicted
        self.max_piece = max(1, tiering.max_loading // PIECES)
        """Blocks that are promoted for one answer."""
        self._waits: dict[Hashable, _Wait] = {}
        self._waiting_for: dict[BlockKey, dict[Hashable, None]] = {}
        self._queue: dict[Hashable, None] = {}
        """Runs with blocks that are still to be loaded, in the order in which they came."""

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
        """Promote the missing blocks of the first piece of a run. `gently` loads as `Tiering.load`
        does, and only while no reader waits.

        Returns None when blocks have to be loaded: `settled` is called later. Otherwise `settled`
        is not called, and the result says whether asking again can give more than what is in DRAM.
        """
        keys = list(dict.fromkeys(keys))
        run, below = self._piece(keys)
        if not below:
            return False
        rest, place = keys[len(run) :], {key: number for number, key in enumerate(run)}
        more, deadline_s = bool(self._piece(rest)[0]), now + self._timeout_s
        wait = _Wait(run, rest, place, below, deque(below), more, gently, deadline_s, settled)
        self._dram.pin(wait.here())
        self._waits[name] = wait
        for key in below:
            self._waiting_for.setdefault(key, {})[name] = None
        self._load(name, wait, now)
        if not wait.missing:
            self._forget(name, wait)
            return wait.more
        return None

    def cancel(self, name: Hashable, now: float) -> None:
        """Stop waiting for a run. Blocks that are being loaded are still loaded."""
        wait = self._waits.get(name)
        if wait is not None:
            self._forget(name, wait)
            self._settle_whole(self._next_in_queue(now), now)

    def on_loaded(self, whole: list[BlockKey], lost: list[BlockKey], now: float) -> None:
        """Note that some blocks were loaded and others are lost. A run ends before a lost block."""
        touched: dict[Hashable, None] = {}
        for key in whole:
            for name in self._waiting_for.pop(key, {}):
                wait = self._waits[name]
                del wait.missing[key]
                self._dram.pin([key])
                touched[name] = None
        for key in lost:
            for name in list(self._waiting_for.get(key, {})):
                wait = self._waits[name]
                self._cut(name, wait, wait.place[key])
                wait.more = False
                touched[name] = None
        self._settle_whole(touched, now)
        self._settle_whole(self._next_in_queue(now), now)

    def tick(self, now: float) -> float | None:
        """Answer the runs whose time is up with what has come. Return the next deadline."""
        if not self._waits:
            return None
        for name in [n for n, wait in self._waits.items() if wait.deadline_s <= now]:
            self._waits[name].more = False
            self._settle(name, now)
        self._settle_whole(self._next_in_queue(now), now)
        return min((wait.deadline_s for wait in self._waits.values()), default=None)

    # ------------------------------------------------------------------ pieces

    def _piece(self, keys: Sequence[BlockKey]) -> tuple[list[BlockKey], dict[BlockKey, None]]:
        """Return (the first piece of a run, those of its blocks that are not in DRAM)."""
        run: list[BlockKey] = []
        below: dict[BlockKey, None] = {}
        for key in keys:
            if not self._dram.has(key):
                is_below = self._tiering.is_loading(key) or self._tiering.can_load(key)
                if not is_below or len(below) == self.max_piece:
                    break
                below[key] = None
            run.append(key)
        return run, below

    def _load(self, name: Hashable, wait: _Wait, now: float) -> None:
        """Begin to load the missing blocks of a run that are not loading yet, as far as the disks
        keep up. The run ends before a block for which DRAM has no room: its reader first gives back
        what it got. A reader that would get nothing waits for what others give back.
        """
        turn = self._turn(wait, self._wanted(wait))
        coming, evicted = self._tiering.load(turn, now, gently=wait.gently)
        self._evicted(evicted)
        first = self._first(wait)
        if first is None:
            pass
        elif len(coming) < len(turn):
            length = wait.place[first]
            if length or wait.gently:
                self._cut(name, wait, length)
                wait.more = length > 0
            else:
                self._wait_for_memory(name, wait, now)
                return
        elif not self._tiering.can_load(first):
            self._cut(name, wait, wait.place[first])  # it has gone meanwhile
            wait.more = False
        else:
            self._queue[name] = None
            return
        self._queue.pop(name, None)

    def _wait_for_memory(self, name: Hashable, wait: _Wait, now: float) -> None:
        """Unpin all of a run after its first block, for which DRAM has no room, and wait for what
        others have pinned.
        """
        num_pinned = len(wait.run) - len(wait.missing)
        self._cut(name, wait, 1)
        wait.more = True
        if num_pinned:
            self._load(name, wait, now)
        elif self._dram.num_pinned or self._dram.num_writing:
            self._queue[name] = None
        else:
            self._cut(name, wait, 0)
            self._queue.pop(name, None)

    def _next_in_queue(self, now: float) -> dict[Hashable, None]:
        """Give waiting runs their turn, readers first. Return the names of those that had one."""
        asked: dict[Hashable, None] = {}
        for name in sorted(self._queue, key=lambda name: self._waits[name].gently):
            wait = self._waits[name]
            first = self._first(wait)
            if first is None or (self._tiering.can_load(first) and not self._turn(wait, [first])):
                continue  # another run may wait for another tier
            self._load(name, wait, now)
            asked[name] = None
        return asked

    def _wanted(self, wait: _Wait) -> Iterator[BlockKey]:
        """Yield the missing blocks of a run that nothing loads yet."""
        return (key for key in wait.unasked if self._is_wanted(wait, key))

    def _is_wanted(self, wait: _Wait, key: BlockKey) -> bool:
        return key in wait.missing and not self._tiering.is_loading(key)

    def _first(self, wait: _Wait) -> BlockKey | None:
        """Return the first of the wanted blocks. Those before it are never looked at again."""
        while wait.unasked and not self._is_wanted(wait, wait.unasked[0]):
            wait.unasked.popleft()
        return wait.unasked[0] if wait.unasked else None

    def _turn(self, wait: _Wait, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Return the leading ones of these blocks of a run that may be loaded now. A `gently`
        loaded run gets none while readers wait.
        """
        gives_way = wait.gently and any(not other.gently for other in self._waits.values())
        return [] if gives_way else self._tiering.loadable(keys)

    def _go_ahead(self, keys: Sequence[BlockKey], now: float) -> None:
        """Begin to load the next piece while the reader takes the one before. It is not pinned."""
        _, below = self._piece(keys)
        loadable = [key for key in below if self._tiering.can_load(key)]
        _, evicted = self._tiering.load(loadable, now)
        self._evicted(evicted)

    # ------------------------------------------------------------------ ends

    def _cut(self, name: Hashable, wait: _Wait, length: int) -> None:
        gone = wait.run[length:]
        del wait.run[length:]
        missing = [key for key in gone if key in wait.missing]
        self._dram.unpin([key for key in gone if key not in wait.missing])
        self._leave(name, missing)
        for key in missing:
            del wait.missing[key]
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
            self._go_ahead(wait.rest, now)
        wait.settled(now, wait.more)
        self._forget(name, wait)

    def _forget(self, name: Hashable, wait: _Wait) -> None:
        del self._waits[name]
        self._queue.pop(name, None)
        self._leave(name, list(wait.missing))
        # Unpinned head first: of one run the tail is the first to go.
        self._dram.unpin(wait.here())

    # ------------------------------------------------------------------ checks

    def pins(self) -> Counter[BlockKey]:
        """Return the blocks that are pinned in DRAM for readers that wait (for checks)."""
        return Counter(key for wait in self._waits.values() for key in wait.here())

    def check_integrity(self) -> None:
        """Raise AssertionError when a reader waits for what will not come."""
        for name in self._queue:
            wait = self._waits[name]
            assert not (wait.here() and self._turn(wait, self._wanted(wait))), "it is its turn"
        for name, wait in self._waits.items():
            assert wait.missing, "nothing is missing and no answer was given"
            assert wait.missing.keys() <= set(wait.run)
            wanted = [key for key in wait.missing if not self._tiering.is_loading(key)]
            assert sorted(self._wanted(wait)) == sorted(wanted)
            for key in wait.missing:
                on_way = self._tiering.is_loading(key)
                assert on_way or name in self._queue, "waits for what is not on its way"
                assert name in self._waiting_for[key]
        for key, names in self._waiting_for.items():
            assert names
            assert all(key in self._waits[name].missing for name in names)


MAX_RUNS = 256
"""Runs that may wait; further ones are ignored."""
MAX_CLIENT_RUNS = 16
"""The same limit for all pool clients that share a credential."""

Name = tuple[str, str, str, int]
"""(the key of a pool client, the reader's id, its epoch, ticket)"""


class Prefetcher:
    """Prefetches runs on one node, in the order in which they were asked for."""

    def __init__(self, tiering: Tiering, promotions: Promotions, counters: Counter[str]) -> None:
        self._dram = tiering.dram
        self._promotions = promotions
        self._counters = counters
        self._runs: OrderedDict[Name, list[BlockKey]] = OrderedDict()
        """The rest of each run, after the current piece."""
        self._piece: tuple[str, int] | None = None
        """The name of the current promotion; there is one at a time."""
        self._num_pieces = 0

    def begin(self, message: Prefetch, now: float) -> None:
        """Promote a run as soon as those before it are done; this counts as a use of the run."""
        name = _name(message)
        client = name[0]
        may_wait = not client or sum(each[0] == client for each in self._runs) < MAX_CLIENT_RUNS
        if name not in self._runs and len(self._runs) < MAX_RUNS and may_wait:
            self._runs[name] = list(message.keys)
            self._go_on(now)

    def stop(self, message: StopPrefetch) -> None:
        """Promote no more of a run, because its reader will not come."""
        self._runs.pop(_name(message), None)

    def _go_on(self, now: float) -> None:
        while self._runs and self._piece is None:
            name, keys = next(iter(self._runs.items()))
            length = self._promotions.max_piece
            piece, rest = keys[:length], keys[length:]
            if rest:
                self._runs[name] = rest
            else:
                del self._runs[name]
            below = [key for key in piece if not self._dram.has(key)]
            self._num_pieces += 1
            self._piece = ("prefetch", self._num_pieces)
            settled = self._settled(name, piece, below)
            begun = self._promotions.begin(self._piece, piece, now, settled, gently=True)
            if begun is not None:
                self._piece = None
                self._end_piece(name, piece, below)

    def _settled(self, name: Name, piece: list[BlockKey], below: list[BlockKey]) -> Settled:
        def settled(now: float, _more: bool) -> None:
            self._piece = None
            self._end_piece(name, piece, below)
            self._go_on(now)

        return settled

    def _end_piece(self, name: Name, piece: list[BlockKey], below: list[BlockKey]) -> None:
        self._dram.use(piece)
        self._counters["blocks_prefetched"] += sum(map(self._dram.has, below))
        if not all(map(self._dram.has, piece)):
            self._runs.pop(name, None)  # no room: without this block the rest of the run is useless

    def check_integrity(self) -> None:
        """Raise AssertionError when runs wait for nothing."""
        assert len(self._runs) <= MAX_RUNS
        assert not self._runs or self._piece in self._promotions, "runs wait for nothing"


def _name(message: Prefetch | StopPrefetch) -> Name:
    reader = message.reader
    return client_key(reader), reader.worker_id, reader.epoch, message.ticket
