"""The books: what every request that was placed takes of its workers until it is over.

Owned by the Conductor. Its own placements and, where there are several gateways, those the others
tell of: prefixes in flight, fetches under way and shares of workers count alike, whoever placed
them. Facts only; no choices here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mooncake.base import KeyChain, WorkerRef
from mooncake.base.messages import Booking, BookingOver
from mooncake.scheduler.fetch_costs import FetchCosts
from mooncake.scheduler.forecast import DecodeForecast
from mooncake.scheduler.inflight_prefixes import InflightPrefixes
from mooncake.scheduler.views import Assignment, InstanceView

BookNews = Booking | BookingOver


@dataclass(slots=True)
class Entry:
    """A booking, and how far its request has come."""

    booking: Booking
    owner: str
    """The gateway that placed it, "" for this one."""
    prefilled: bool = False


class Books:
    """Bookings by name: the request id, with its gateway where that is another."""

    def __init__(self, views: Mapping[str, InstanceView], fetch: FetchCosts) -> None:
        self._views = views
        self._fetch = fetch
        self.inflight = InflightPrefixes()
        self.forecast = DecodeForecast()
        self._entries: dict[str, Entry] = {}
        self._of_others: dict[str, dict[str, None]] = {}
        """Gateway id -> names of its bookings."""
        self.news: list[BookNews] | None = None
        """What has changed of the own bookings, for other gateways; None while there are none."""

    # ------------------------------------------------------------ own

    def get(self, request_id: str) -> Entry | None:
        """Return an own booking."""
        return self._entries.get(request_id)

    def add(self, booking: Booking, now: float) -> None:
        """A request was placed."""
        assert booking.request_id not in self._entries, "placed twice"
        self._add(booking.request_id, Entry(booking, ""), now)
        self._tell(booking)

    def prefilled(self, request_id: str, now: float) -> None:
        """It has its first token: its prompt is computed, its fetches are over."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.prefilled:
            self._tell(BookingOver(request_id=request_id, prefill_only=True))
            self._prefilled(request_id, entry)
        self.forecast.joined(request_id, now)

    def release(self, request_id: str) -> bool:
        """It is over, or this attempt is; False when it was not on the books."""
        known = self._release(request_id)
        if known:
            self._tell(BookingOver(request_id=request_id))
        return known

    def own(self) -> Iterator[BookNews]:
        """Yield the own bookings as a gateway must hear of them that knows none."""
        for name, entry in self._entries.items():
            if not entry.owner:
                yield entry.booking
                if entry.prefilled:
                    yield BookingOver(request_id=name, prefill_only=True)

    def own_ids(self) -> list[str]:
        """Return the requests of the own bookings."""
        return [name for name, entry in self._entries.items() if not entry.owner]

    # ------------------------------------------------------------ of others

    @property
    def owners(self) -> set[str]:
        """The other gateways of which something is on the books."""
        return set(self._of_others)

    def num_of(self, gateway_id: str) -> int:
        """Return how many bookings another gateway has here."""
        return len(self._of_others.get(gateway_id, ()))

    def hear(self, gateway_id: str, news: BookNews, now: float) -> None:
        """Another gateway tells of a booking. One on workers not known here is left out."""
        name = _name(gateway_id, news.request_id)
        if isinstance(news, Booking):
            self._release(name)
            if self._view(news.computing) is not None and self._view(news.decode) is not None:
                self._add(name, Entry(news, gateway_id), now)
                self._of_others.setdefault(gateway_id, {})[name] = None
        elif not news.prefill_only:
            self._release(name)
        elif (entry := self._entries.get(name)) is not None:
            self._prefilled(name, entry)
            self.forecast.joined(name, now)

    def keep(self, gateway_id: str, request_ids: list[str]) -> None:
        """Another gateway has these bookings and no more: word of an end may have been lost."""
        names = {_name(gateway_id, request_id) for request_id in request_ids}
        for name in list(self._of_others.get(gateway_id, ())):
            if name not in names:
                self._release(name)

    def worker_lost(self, worker_id: str) -> None:
        """Bookings of others on a lost worker are over; own ones are released by their owner."""
        for names in list(self._of_others.values()):
            for name in list(names):
                booking = self._entries[name].booking
                if worker_id in (booking.computing.worker_id, booking.decode.worker_id):
                    self._release(name)

    # ------------------------------------------------------------ both

    def check_integrity(self, placed: set[str]) -> None:
        """Raise AssertionError unless exactly the requests `placed` are booked here, and nothing
        is booked that is not in the books.
        """
        assert set(self.own_ids()) == placed, "the Conductor's books and the gateway's disagree"
        assert self.forecast.num_expected == len(self._entries), "somebody else is expected"
        for view in self._views.values():
            for name in view.assigned_ids:
                entry = self._entries.get(name)
                assert entry is not None, "a share without a booking"
                assert view.worker in (entry.booking.computing, entry.booking.decode)
        others = [name for names in self._of_others.values() for name in names]
        assert sorted(others) == sorted(n for n, entry in self._entries.items() if entry.owner)
        if all(entry.prefilled for entry in self._entries.values()):
            assert self.inflight.empty, "prefixes in flight that nobody computes"
            self._fetch.check_idle()

    def _view(self, worker: WorkerRef) -> InstanceView | None:
        view = self._views.get(worker.worker_id)
        return view if view is not None and view.worker == worker else None

    def _tell(self, news: BookNews) -> None:
        if self.news is not None:
            self.news.append(news)

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
        self.forecast.expect(name, decoding.worker_id, booking.num_tokens, now + booking.ttft_s)
        self.inflight.add(computing.worker_id, KeyChain(booking.keys))
        self._fetch.started(booking.sources)

    def _prefilled(self, name: str, entry: Entry) -> None:
        if entry.prefilled:
            return
        entry.prefilled = True
        booking = entry.booking
        self.inflight.remove(booking.computing.worker_id, KeyChain(booking.keys))
        self._fetch.ended(booking.sources)
        view = self._view(booking.computing)
        if view is not None:
            view.prefilled(name)
            if booking.computing != booking.decode:
                view.release(name)

    def _release(self, name: str) -> bool:
        entry = self._entries.get(name)
        if entry is None:
            return False
        self._prefilled(name, entry)
        self.forecast.ended(name)
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
    """Return the name of another gateway's booking: no request id has such a character."""
    return f"{gateway_id}\x1f{request_id}"
