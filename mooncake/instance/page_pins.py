"""Pins of this instance's pages. While it leaves, the workers that continue its requests read full
blocks from here as from a pool node.

Pure; owned by the instance. A pinned page is held, so nothing writes to it before its reader unpins
it or is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake.base.kv_layout import BlockPlaces
from mooncake.base.messages import PinBlocks, PinGranted, Unpin, WorkerRef
from mooncake.engine.block_pool import BlockPool
from mooncake.instance.mover import BlockChecksums
from mooncake.rpc.channel import Channel

MAX_PINS = 4096
"""With this many pins, a reader is told that nothing is here."""


@dataclass
class _Pin:
    """The blocks that one reader has pinned."""

    request: PinBlocks
    pages: Sequence[int]
    answered_s: float
    checksums: list[int] = field(default_factory=list)
    hashing: bool = False
    """Whether the answer waits for checksums."""


class PagePins:
    def __init__(
        self,
        worker: WorkerRef,
        channel: Channel,
        pool: BlockPool,
        places: Callable[[Sequence[int]], BlockPlaces],
        checksums: BlockChecksums,
        repeat_s: float,
    ) -> None:
        """`places` says where whole blocks lie. A reader that has had a pin for `repeat_s` is
        answered again; if its unpin message was lost, it unpins again.
        """
        self._worker = worker
        self._channel = channel
        self._pool = pool
        self._places = places
        self._checksums = checksums
        self._repeat_s = repeat_s
        self._pins: dict[tuple[str, str, int], _Pin] = {}
        """Pins by reader's id, its epoch, and ticket."""
        self._num_hashing = 0
        self.num_blocks_read = 0
        """The number of blocks of pins that have ended."""

    @property
    def num_open(self) -> int:
        """Number of pins, and of blocks that are being hashed for one."""
        return len(self._pins) + self._num_hashing

    def on_pin(self, message: PinBlocks, now: float) -> None:
        """Pin the leading blocks of a run that are here, and answer with their places."""
        key = _key(message.reader, message.ticket)
        pin = self._pins.get(key)
        if pin is not None:
            self._answer(pin, now)
            return
        pages = self._pool.match(message.keys) if len(self._pins) < MAX_PINS else []
        pin = _Pin(message, pages, now)
        if not pages:
            self._answer(pin, now)
            return
        self._pool.hold(pages)
        self._pins[key] = pin
        if self._checksums.can_hash:
            self._hash(pin)
        else:
            self._answer(pin, now)

    def on_unpin(self, message: Unpin) -> None:
        """End a pin. An unknown one does nothing."""
        pin = self._pins.pop(_key(message.reader, message.ticket), None)
        if pin is not None:
            self._pool.release(pin.pages)
            self.num_blocks_read += len(pin.pages)

    def on_peer_lost(self, worker: WorkerRef) -> None:
        """End what a lost reader had pinned."""
        for key, pin in list(self._pins.items()):
            if key[:2] == (worker.worker_id, worker.epoch):
                del self._pins[key]
                self._pool.release(pin.pages)

    def tick(self, now: float) -> tuple[list[WorkerRef], float | None]:
        """Answer readers again that have had a pin for long. Return them, because some may be lost,
        and when to call again.
        """
        old: dict[WorkerRef, None] = {}
        next_s: float | None = None
        for pin in self._pins.values():
            if now - pin.answered_s >= self._repeat_s:
                self._answer(pin, now)
                old[pin.request.reader] = None
            due_s = pin.answered_s + self._repeat_s
            next_s = due_s if next_s is None else min(next_s, due_s)
        return list(old), next_s

    def _hash(self, pin: _Pin) -> None:
        """Hash the blocks, which are held meanwhile. Then send the answer, with the checksums for
        the reader to compare.
        """
        pin.hashing = True
        self._num_hashing += 1
        self._pool.hold(pin.pages)

        def hashed(found: list[int], at: float) -> None:
            self._num_hashing -= 1
            self._pool.release(pin.pages)
            pin.hashing, pin.checksums = False, found
            if self._pins.get(_key(pin.request.reader, pin.request.ticket)) is pin:
                self._answer(pin, at)

        self._checksums.start(pin.pages, hashed)

    def _answer(self, pin: _Pin, now: float) -> None:
        pin.answered_s = now
        if pin.hashing:
            return
        reader = pin.request.reader
        self._channel.send(
            reader.address,
            PinGranted(
                asker=reader,
                ticket=pin.request.ticket,
                store=self._worker,
                num_blocks=len(pin.pages),
                places=self._places(pin.pages),
                checksums=pin.checksums,
            ),
        )


def _key(reader: WorkerRef, ticket: int) -> tuple[str, str, int]:
    return reader.worker_id, reader.epoch, ticket
