"""While a request waits in the gateway, blocks of its prefix that lie on SSD only are brought up.

Owned by the waiting room. Only for those at the front of the line, a bounded number of bytes at a
time, head first; when a request goes away, what is not on its way stays where it is. Nodes lift
blocks only where that pushes out nothing that is worth as much. Hints all of it: a block that is
not up in time comes up when it is fetched, as it would have anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from mooncake.base import BlockKey, Tier, WorkerRef
from mooncake.base.messages import Prefetch, StopPrefetch
from mooncake.rpc.channel import Channel
from mooncake.scheduler.conductor import Conductor
from mooncake.scheduler.config import SchedulerConfig
from mooncake.scheduler.record import RequestRecord

FRONT = 4
"""So many of the line are likely to be admitted next."""
CHUNK_BYTES = 512 << 20
GIVEN_UP_S = 10.0
"""Blocks that have not come up by then will not: the node has no room for them."""
AGAIN_S = 10.0
"""A request that still waits is looked at again: its blocks may have had to go."""


class _Chunk:
    """Blocks of a run that one node is asked to bring up."""

    __slots__ = ("given_up_s", "keys", "num_bytes", "store", "ticket")

    def __init__(self, store: WorkerRef, keys: list[BlockKey], num_bytes: int) -> None:
        self.store = store
        self.keys = keys
        self.num_bytes = num_bytes
        self.ticket = 0
        self.given_up_s = 0.0


class _Reading:
    """What is still to be asked for of one request."""

    __slots__ = ("again_s", "asked", "chunks")

    def __init__(self, chunks: Iterable[_Chunk], again_s: float) -> None:
        self.chunks = deque(chunks)
        self.asked: list[_Chunk] = []
        self.again_s = again_s


class ReadAhead:
    """See the module."""

    def __init__(
        self, config: SchedulerConfig, gateway: WorkerRef, channel: Channel, conductor: Conductor
    ) -> None:
        self._gateway = gateway
        self._max_bytes = config.read_ahead_bytes
        self._channel = channel
        self._conductor = conductor
        self._readings: dict[str, _Reading] = {}
        self._on_way: list[_Chunk] = []
        self._last_ticket = 0

    @property
    def num_bytes_on_way(self) -> int:
        """Bytes asked for and not known to be up."""
        return sum(chunk.num_bytes for chunk in self._on_way)

    def go_on(self, line: Iterable[RequestRecord], now: float) -> None:
        """Ask for more, for the first of `line`."""
        if not self._max_bytes:
            return
        self._on_way = [
            chunk for chunk in self._on_way
            if now < chunk.given_up_s and not self._is_up(chunk)
        ]  # fmt: skip
        room = self._max_bytes - self.num_bytes_on_way
        for record, _ in zip(line, range(FRONT), strict=False):
            reading = self._reading(record, now)
            while reading.chunks and reading.chunks[0].num_bytes <= room:
                chunk = reading.chunks.popleft()
                room -= chunk.num_bytes
                reading.asked.append(chunk)
                self._ask(chunk, now)
            if reading.chunks:
                return  # in turn: who is placed first needs its blocks first

    def _ask(self, chunk: _Chunk, now: float) -> None:
        self._last_ticket += 1
        chunk.ticket, chunk.given_up_s = self._last_ticket, now + GIVEN_UP_S
        self._on_way.append(chunk)
        self._channel.send(
            chunk.store.address,
            Prefetch(reader=self._gateway, ticket=chunk.ticket, keys=chunk.keys),
        )

    def forget(self, request_id: str, *, gone: bool) -> None:
        """The request is placed, or `gone`: then what of its blocks is not on its way need not
        come.
        """
        reading = self._readings.pop(request_id, None)
        if reading is None or not gone:
            return
        for chunk in reading.asked:
            if chunk in self._on_way:
                self._on_way.remove(chunk)
                stop = StopPrefetch(reader=self._gateway, ticket=chunk.ticket)
                self._channel.send(chunk.store.address, stop)

    def _reading(self, record: RequestRecord, now: float) -> _Reading:
        known = self._readings.get(record.request_id)
        if known is None or (now >= known.again_s and not known.chunks):
            keys = record.block_keys(self._conductor.layout)
            known = _Reading(self._find(keys), now + AGAIN_S)
            self._readings[record.request_id] = known
        return known

    def _find(self, keys: Sequence[BlockKey]) -> Iterator[_Chunk]:
        """Yield those blocks of the prefix that the pools hold which lie on SSD only."""
        chunk: _Chunk | None = None
        for key in keys:
            replicas = self._conductor.replicas(key)
            if not replicas:
                break
            if any(replica.tier is not Tier.SSD for replica in replicas):
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
        return any(replica.tier is not Tier.SSD for replica in replicas)

    def check_integrity(self, waiting: Iterable[str]) -> None:
        """Raise AssertionError when it reads for who does not wait, or too much."""
        assert self._readings.keys() <= set(waiting), "reads ahead for who does not wait"
        assert self.num_bytes_on_way <= self._max_bytes
