"""Clients that put and get blocks without end, and look closely at what they are given."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from mooncake.base import MooncakeError
from mooncake.launch.pool_client.session import PoolSession
from tests.support.kvstore.pool_process import until

RUN = 6
"""Blocks of one put or get."""


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def content(key: bytes, num_bytes: int) -> bytes:
    """The one content that a key of these tests may have."""
    return random.Random(key).randbytes(64) * (num_bytes // 64)


def blocks_of(session: PoolSession, numbers: Iterable[int]) -> dict[bytes, bytes]:
    return {key_of(n): content(key_of(n), session.block_bytes) for n in numbers}


class Traffic(threading.Thread):
    """One client that puts and gets random runs of `num_keys` keys until it is stopped or, unless
    it is `patient`, something fails.
    """

    def __init__(
        self, session: PoolSession, seed: int, num_keys: int, *, patient: bool = False
    ) -> None:
        super().__init__(daemon=True)
        self.num_ok = 0
        self.num_errors = 0
        self.wrong: list[bytes] = []
        self.session = session
        self._chance = random.Random(seed)
        self._num_keys = num_keys
        self._patient = patient
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.is_set():
            start = self._chance.randrange(self._num_keys - RUN)
            blocks = blocks_of(self.session, range(start, start + RUN))
            try:
                if self._chance.random() < 0.6:
                    self.session.put(blocks)
                else:
                    self._check(blocks, self.session.get(list(blocks)))
                self.num_ok += 1
            except MooncakeError:
                self.num_errors += 1
                if not self._patient:
                    return

    def _check(self, blocks: dict[bytes, bytes], found: list[bytes]) -> None:
        pairs = zip(blocks.items(), found, strict=False)
        self.wrong += [key for (key, data), got in pairs if got != data]

    def stop(self) -> None:
        """Have it end; what it has in hand may still take as long as its session allows."""
        self._stopped.set()


def check_nothing_is_held(session: PoolSession) -> None:
    """Wait until all memory of the node is either free or a whole block."""

    def idle() -> bool:
        state = session.stat()
        load = state.load
        at_rest = load.num_free_blocks + load.num_cached_blocks == load.num_total_blocks
        none_pinned = load.num_running == load.num_waiting == state.num_quarantined == 0
        return at_rest and none_pinned

    until(idle, "all memory is free or holds a whole block, and none of it is pinned")
