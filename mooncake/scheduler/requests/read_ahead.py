"""Read-ahead: loads the prefixes of pending requests into DRAM, from SSD or a bucket, before they
are placed, and the busiest prefixes into an engine that joins.

Owned by the pending queue. Only the first requests of the queue are served, head of the prefix
first, with a bounded number of bytes in flight. Pool nodes load a block only where that evicts
nothing of equal worth, engines only into free pages. All of it is a hint: a block that is not
loaded in time is loaded when a worker fetches it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from mooncake.base import BlockKey, WorkerHello, WorkerRef
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.rpc.channel import Channel
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.placement.conductor import Conductor
from mooncake.scheduler.requests.record import RequestRecord

MAX_REQUESTS = 4
"""How many requests of the queue are served: they are likely to be placed next."""
CHUNK_BYTES = 512 << 20
GIVE_UP_S = 10.0
"""A block that is not loaded by then is given up: its node has no room for it."""
REPEAT_S = 10.0
"""A request that still waits is examined again: its blocks may have been evicted."""


class _Chunk:
    """Blocks of a run that one node is asked to load."""

    __slots__ = ("give_up_s", "keys", "num_bytes", "store", "ticket")

    def __init__(self, store: WorkerRef, keys: list[BlockKey], num_bytes: int) -> None:
        self.store = store
        self.keys = keys
        self.num_bytes = num_bytes
        self.ticket = 0
        self.give_up_s = 0.0


class _Reading:
    """The chunks of one request that were asked for, and those still to ask for."""

    __slots__ = ("asked", "chunks", "repeat_s")

    def __init__(self, chunks: Iterable[_Chunk], repeat_s: float) -> None:
        self.chunks = deque(chunks)
        self.asked: list[_Chunk] = []
        self.repeat_s = repeat_s


class ReadAhead:
    """Sends `Prefetch` messages for pending requests and for engines that join, for each within
    `read_ahead_bytes`.
    """

    def __init__(
        self, config: SchedulerConfig, gateway: WorkerRef, channel: Channel, conductor: Conductor
    ) -> None:
        self._gateway = gateway
        self._max_bytes = config.read_ahead_bytes
        self._channel = channel
        self._conductor = conductor
        self._readings: dict[str, _Reading] = {}
        self._in_flight: list[_Chunk] = []
        self._last_ticket = 0

    @property
    def num_bytes_in_flight(self) -> int:
        """Bytes asked for that are not known to be loaded."""
        return sum(chunk.num_bytes for chunk in self._in_flight)

    def advance(self, queue: Iterable[RequestRecord], now: float) -> None:
        """Ask for more blocks, for the first requests of `queue`."""
        if not self._max_bytes:
            return
        self._in_flight = [
            chunk for chunk in self._in_flight
            if now < chunk.give_up_s and not self._is_up(chunk)
        ]  # fmt: skip
        room = self._max_bytes - self.num_bytes_in_flight
        for record, _ in zip(queue, range(MAX_REQUESTS), strict=False):
            reading = self._reading(record, now)
            while reading.chunks and reading.chunks[0].num_bytes <= room:
                chunk = reading.chunks.popleft()
                room -= chunk.num_bytes
                reading.asked.append(chunk)
                self._ask(chunk, now)
            if reading.chunks:
                return  # in order: the first to be placed needs its blocks first

    def welcome(self, joined: WorkerHello) -> None:
        """Tell an engine that joins to read the busiest prefixes from the pools."""
        for keys, sources in self._conductor.busiest(joined):
            self._last_ticket += 1
            self._channel.send(
                joined.worker.address,
                Prefetch(
                    reader=self._gateway, ticket=self._last_ticket, keys=keys, sources=sources
                ),
            )

    def _ask(self, chunk: _Chunk, now: float) -> None:
        self._last_ticket += 1
        chunk.ticket, chunk.give_up_s = self._last_ticket, now + GIVE_UP_S
        self._in_flight.append(chunk)
        self._channel.send(
            chunk.store.address,
            Prefetch(reader=self._gateway, ticket=chunk.ticket, keys=chunk.keys),
        )

    def forget(self, request_id: str, *, gone: bool) -> None:
        """Drop a request that was placed or has ended; if it is `gone`, its loads are cancelled."""
        reading = self._readings.pop(request_id, None)
        if reading is None or not gone:
            return
        for chunk in reading.asked:
            if chunk in self._in_flight:
                self._in_flight.remove(chunk)
                stop = StopPrefetch(reader=self._gateway, ticket=chunk.ticket)
                self._channel.send(chunk.store.address, stop)

    def _reading(self, record: RequestRecord, now: float) -> _Reading:
        known = self._readings.get(record.request_id)
        if known is None or (now >= known.repeat_s and not known.chunks):
            keys = record.block_keys(self._conductor.layout)
            known = _Reading(self._find(keys), now + REPEAT_S)
            self._readings[record.request_id] = known
        return known

    def _find(self, keys: Sequence[BlockKey]) -> Iterator[_Chunk]:
        """Yield the blocks of the prefix that the pools hold below DRAM only, in chunks."""
        chunk: _Chunk | None = None
        for key in keys:
            replicas = self._conductor.replicas(key)
            if not replicas:
                break
            if not all(replica.tier.is_below_dram for replica in replicas):
                continue
            stores = [replica.worker for replica in replicas]
            store = chunk.store if chunk is not None and chunk.store in stores else stores[0]
            view = self._conductor.view(store.worker_id)
            if view is None or view.draining:
                continue
            size = view.hello.block_bytes
            if chunk is None or chunk.store != store or chunk.num_bytes + size > CHUNK_BYTES:
                if chunk is not None:
                    yield chunk
                chunk = _Chunk(store, [], 0)
            chunk.keys.append(key)
            chunk.num_bytes += size
        if chunk is not None:
            yield chunk

    def _is_up(self, chunk: _Chunk) -> bool:
        replicas = self._conductor.replicas(chunk.keys[-1])
        return not all(replica.tier.is_below_dram for replica in replicas)

    def check_integrity(self, waiting: Iterable[str]) -> None:
        """Raise AssertionError when a request is served that does not wait, or on overflow."""
        assert self._readings.keys() <= set(waiting), "reads ahead for a request that does not wait"
        assert self.num_bytes_in_flight <= self._max_bytes
