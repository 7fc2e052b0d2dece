"""The booking table: what each placed request uses of its workers until it ends. Also the prefixes
that are being computed now (`InflightPrefixes`): similar requests in a burst find them before the
first block event comes.

Owned by the Conductor. The table holds this gateway's own placements and the bookings that other
gateways report: prefixes in flight, fetches in progress and loads of workers count the same,
whichever gateway placed them. Facts only; no choices here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mooncake.base import BlockKey, KeyChain, WorkerRef
from mooncake.base.messages import Booking, BookingOver
from mooncake.scheduler.placement.forecast import DecodeForecast
from mooncake.scheduler.placement.pools import FetchCosts
from mooncake.scheduler.placement.views import Assignment, InstanceView


class _Stretch:
    """The keys [start, stop) of a chain, shared by all chains through this node."""

    __slots__ = ("children", "counts", "keys", "start", "stop", "total")

    def __init__(self, keys: Sequence[BlockKey], start: int, stop: int) -> None:
        self.keys = keys
        """The keys of one whole chain through this node; up to `stop` all chains are equal."""
        self.start = start
        self.stop = stop
        self.counts: dict[str, int] = {}
        """Worker id -> how many of its chains reach `stop`."""
        self.total = 0
        """The sum of `counts`."""
        self.children: dict[BlockKey, _Stretch] = {}
        """Children by their first key."""

    def common(self, keys: Sequence[BlockKey]) -> int:
        """Return how far `keys`, whose first keys lead into this stretch, agree with it. Keys are
        chained, so equal keys mean that all keys before them are equal too.
        """
        low, high = self.start + 1, min(self.stop, len(keys))
        if self.keys[high - 1] == keys[high - 1]:
            return high
        while low < high:
            middle = (low + high + 1) // 2
            if self.keys[middle - 1] == keys[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def count(self, worker_id: str, number: int) -> None:
        left = self.counts.get(worker_id, 0) + number
        if left:
            self.counts[worker_id] = left
        else:
            del self.counts[worker_id]
        self.total += number

    def split(self, at: int) -> None:
        """Become [start, at), with the rest as the only child."""
        rest = _Stretch(self.keys, at, self.stop)
        rest.counts, rest.total, rest.children = dict(self.counts), self.total, self.children
        self.stop = at
        self.children = {rest.keys[at]: rest}

    def merge_only_child(self) -> None:
        """Undo a split that is not needed any more: all chains go on into the only child."""
        if len(self.children) != 1:
            return
        (child,) = self.children.values()
        if child.total == self.total:
            self.keys, self.stop, self.children = child.keys, child.stop, child.children


class InflightPrefixes:
    """Knows which worker is computing which prefix. A key implies all keys before it.

    It is a tree of stretches that chains have in common: a prompt of thousands of blocks takes a
    few nodes, not thousands of entries.
    """

    def __init__(self) -> None:
        self._roots: dict[BlockKey, _Stretch] = {}

    def __len__(self) -> int:
        """Return how many nodes the tree has; slow (for checks)."""
        count, todo = 0, list(self._roots.values())
        while todo:
            stretch = todo.pop()
            count += 1
            todo.extend(stretch.children.values())
        return count

    @property
    def empty(self) -> bool:
        """True if no prefix is being computed."""
        return not self._roots

    def add(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Record that a worker computes the blocks `keys`, from the first of a prompt. The caller
        must not change `keys` afterwards.
        """
        children, at = self._roots, 0
        while at < len(keys):
            stretch = children.get(keys[at])
            if stretch is None:
                stretch = children[keys[at]] = _Stretch(keys, at, len(keys))
            else:
                end = stretch.common(keys)
                if end < stretch.stop:
                    stretch.split(end)
            stretch.count(worker_id, 1)
            children, at = stretch.children, stretch.stop

    def remove(self, worker_id: str, keys: Sequence[BlockKey]) -> None:
        """Undo one `add`."""
        children, at, path = self._roots, 0, list[_Stretch]()
        while at < len(keys):
            stretch = children[keys[at]]
            stretch.count(worker_id, -1)
            first, at = keys[at], stretch.stop
            if not stretch.total:
                del children[first]
                break
            path.append(stretch)
            children = stretch.children
        for stretch in reversed(path):
            stretch.merge_only_child()

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Return worker id -> number of leading `keys` it is computing, if any."""
        found: dict[str, int] = {}
        children, at = self._roots, 0
        while at < len(keys):
            stretch = children.get(keys[at])
            if stretch is None:
                break
            end = stretch.common(keys)
            for worker_id in stretch.counts:
                found[worker_id] = end
            if end < stretch.stop:
                break
            children, at = stretch.children, end
        return found


BookingUpdate = Booking | BookingOver


@dataclass(slots=True)
class Entry:
    """A booking and its progress."""

    booking: Booking
    owner: str
    """The id of the gateway that placed it, "" for this one."""
    prefilled: bool = False
    is_fetching: bool = True
    """Its sources count as being read."""


class BookingTable:
    """Keeps bookings by name: the request id, after the gateway's id if that is another gateway."""

    def __init__(self, views: Mapping[str, InstanceView], fetch: FetchCosts) -> None:
        self._views = views
        self._fetch = fetch
        self.inflight = InflightPrefixes()
        self.forecast = DecodeForecast()
        self._entries: dict[str, Entry] = {}
        self._of_others: dict[str, dict[str, None]] = {}
        """Gateway id -> names of its bookings."""
        self.updates: list[BookingUpdate] | None = None
        """Changes of own bookings to send to other gateways; None while there are none."""

    @property
    def is_empty(self) -> bool:
        """True if no request of any gateway is booked."""
        return not self._entries

    # ------------------------------------------------------------ own

    def get(self, request_id: str) -> Entry | None:
        """Return an own booking, or None."""
        return self._entries.get(request_id)

    def add(self, booking: Booking, now: float) -> None:
        """Book the placement of an own request."""
        assert booking.request_id not in self._entries, "placed twice"
        self._add(booking.request_id, Entry(booking, ""), now)
        self._publish(booking)

    def on_prefilled(self, request_id: str, now: float) -> None:
        """Record the first token of an own request: prompt and fetches are done."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.prefilled:
            self._publish(BookingOver(request_id=request_id, prefill_only=True))
            self._prefilled(request_id, entry, now)
        self.forecast.on_joined(request_id, now)

    def release(self, request_id: str) -> bool:
        """Remove an own booking whose request or attempt has ended. Return False when there is
        none.
        """
        known = self._release(request_id)
        if known:
            self._publish(BookingOver(request_id=request_id))
        return known

    def own_updates(self) -> Iterator[BookingUpdate]:
        """Yield the own bookings as updates for a gateway that knows none of them."""
        for name, entry in self._entries.items():
            if not entry.owner:
                yield entry.booking
                if entry.prefilled:
                    yield BookingOver(request_id=name, prefill_only=True)

    def own_ids(self) -> list[str]:
        """Return the request ids of the own bookings."""
        return [name for name, entry in self._entries.items() if not entry.owner]

    # ------------------------------------------------------------ of others

    @property
    def owners(self) -> set[str]:
        """The ids of other gateways that have bookings here."""
        return set(self._of_others)

    def num_bookings(self, gateway_id: str) -> int:
        """Return the number of bookings that another gateway has here."""
        return len(self._of_others.get(gateway_id, ()))

    def apply(self, gateway_id: str, update: BookingUpdate, now: float) -> None:
        """Apply another gateway's update; a booking on workers unknown here is ignored."""
        name = _name(gateway_id, update.request_id)
        if isinstance(update, Booking):
            self._release(name)
            if self._view(update.computing) is not None and self._view(update.decode) is not None:
                self._add(name, Entry(update, gateway_id), now)
                self._of_others.setdefault(gateway_id, {})[name] = None
        elif not update.prefill_only:
            self._release(name)
        elif (entry := self._entries.get(name)) is not None:
            self._prefilled(name, entry)
            self.forecast.on_joined(name, now)

    def retain(self, gateway_id: str, request_ids: list[str]) -> None:
        """Remove the bookings of another gateway that are not among `request_ids`: the update that
        ended them may have been lost.
        """
        names = {_name(gateway_id, request_id) for request_id in request_ids}
        for name in list(self._of_others.get(gateway_id, ())):
            if name not in names:
                self._release(name)

    def on_worker_lost(self, worker_id: str) -> None:
        """Remove other gateways' bookings on a lost worker; own ones are
        released by their owner.
        """
        for names in list(self._of_others.values()):
            for name in list(names):
                booking = self._entries[name].booking
                if worker_id in (booking.computing.worker_id, booking.decode.worker_id):
                    self._release(name)

    # ------------------------------------------------------------ both

    def on_fetched(self, request_ids: Iterable[str], worker: WorkerRef) -> None:
        """Record that fetches of requests, own and of other gateways, have ended on a worker that
        computes them. Their prompts may still wait for their turn there.
        """
        for request_id in request_ids:
            for name in (request_id, *(_name(owner, request_id) for owner in self._of_others)):
                entry = self._entries.get(name)
                if entry is not None and entry.booking.computing == worker:
                    self._fetched(entry)

    def _fetched(self, entry: Entry) -> None:
        if entry.is_fetching:
            entry.is_fetching = False
            self._fetch.ended(entry.booking.sources)

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError unless exactly the requests `placed` are booked here, and every
        worker's share belongs to a booking.
        """
        assert set(self.own_ids()) == placed, "bookings and placed requests disagree"
        assert self.forecast.num_requests == len(self._entries), "the forecast has other requests"
        for view in self._views.values():
            for name in view.assigned_ids:
                entry = self._entries.get(name)
                assert entry is not None, "a share without a booking"
                assert view.worker in (entry.booking.computing, entry.booking.decode)
        others = [name for names in self._of_others.values() for name in names]
        assert sorted(others) == sorted(n for n, entry in self._entries.items() if entry.owner)
        if all(entry.prefilled for entry in self._entries.values()):
            assert self.inflight.empty, "prefixes in flight that no worker computes"
            self._fetch.check_idle()

    def _view(self, worker: WorkerRef) -> InstanceView | None:
        view = self._views.get(worker.worker_id)
        return view if view is not None and view.worker == worker else None

    def _publish(self, update: BookingUpdate) -> None:
        if self.updates is not None:
            self.updates.append(update)

    def _add(self, name: str, entry: Entry, now: float) -> None:
        booking = entry.booking
        self._entries[name] = entry
        whole = booking.computing == booking.decode
        computing, decoding = self._view(booking.computing), self._view(booking.decode)
        assert computing is not None, "computed by a worker that is lost"
        assert decoding is not None, "decoded by a worker that is lost"
        computing.assign(
            Assignment(
                request_id=name,
                placed_s=now,
                num_prefill_tokens=booking.num_new_tokens,
                num_reused_tokens=booking.num_tokens - booking.num_new_tokens,
                prefill_s=booking.prefill_s,
                num_context_tokens=booking.num_tokens if whole else 0,
                num_blocks=booking.num_blocks if whole else 0,
            )
        )
        if not whole:
            decoding.assign(
                Assignment(
                    request_id=name,
                    placed_s=now,
                    num_context_tokens=booking.num_tokens,
                    num_blocks=booking.num_blocks,
                )
            )
        self.forecast.add(name, decoding.worker_id, booking.num_tokens, now + booking.ttft_s)
        self.inflight.add(computing.worker_id, KeyChain(booking.keys))
        self._fetch.started(booking.sources)

    def _prefilled(self, name: str, entry: Entry, now: float | None = None) -> None:
        if entry.prefilled:
            return
        entry.prefilled = True
        booking = entry.booking
        self.inflight.remove(booking.computing.worker_id, KeyChain(booking.keys))
        self._fetched(entry)
        view = self._view(booking.computing)
        if view is not None:
            view.prefilled(name, now)
            if booking.computing != booking.decode:
                view.release(name)

    def _release(self, name: str) -> bool:
        entry = self._entries.get(name)
        if entry is None:
            return False
        self._prefilled(name, entry)
        self.forecast.remove(name)
        del self._entries[name]
        if entry.owner:
            names = self._of_others[entry.owner]
            del names[name]
            if not names:
                del self._of_others[entry.owner]
        for worker in {entry.booking.computing: None, entry.booking.decode: None}:
            view = self._view(worker)
            if view is not None:
                view.release(name)
        return True


def _name(gateway_id: str, request_id: str) -> str:
    """Return the name of another gateway's booking; no request id contains the separator."""
    return f"{gateway_id}\x1f{request_id}"
