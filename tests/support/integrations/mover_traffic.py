"""The worker's side of the vLLM connector without vLLM: pages, and a mover between them and a pool
whose nodes come and go.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from mooncake.integrations.pool_link import PoolLink
from mooncake.integrations.settings import PoolSettings
from mooncake.integrations.vllm.chunks import Packing, RankKv
from mooncake.integrations.vllm.mover import Mover, Staging
from mooncake.integrations.vllm.plan import Load, Save
from tests.support.kvstore.pool_process import until
from tests.support.kvstore.pool_traffic import content, key_of

RUN = 4
"""Chunks of one save or load."""
PARTS = 2
"""Blocks of the pool that a chunk takes."""
LOAD_S = 6.0


class MoverTraffic(threading.Thread):
    """Saves and loads random runs of `num_keys` chunks until it is stopped, and looks at every page
    that a load has not named as missing. Some loads are aborted.
    """

    def __init__(
        self, pool_url: str, secret_file: Path, block_bytes: int, seed: int, num_keys: int
    ) -> None:
        super().__init__(daemon=True)
        self.num_loaded = 0
        """Chunks that came whole from the pool."""
        self.wrong: list[bytes] = []
        self.unasked: set[str] = set()
        """Loads that ended although they had not begun, or had ended before."""
        settings = PoolSettings(
            pool_urls=[pool_url], cluster_secret_file=str(secret_file), load_timeout_s=LOAD_S
        )
        rank, packing = RankKv(b"of a soak", PARTS * block_bytes), Packing(block_bytes, 1)
        self._staging = Staging(packing, rank, 3 * RUN * rank.block_bytes)
        link = PoolLink(settings, LOAD_S, logging.getLogger("mover traffic"))
        self._mover = Mover(link, self._staging, "", LOAD_S)
        self._pages = [b""] * RUN
        self._page_bytes = rank.block_bytes
        self._chance = random.Random(seed)
        self._num_keys = num_keys
        self._stopped = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._stopped.is_set():
            start = self._chance.randrange(self._num_keys - RUN)
            chain = [key_of(each) for each in range(start, start + RUN)]
            if self._chance.random() < 0.5:
                self._pages = [content(key, self._page_bytes) for key in chain]
                self._save(chain)
            else:
                number += 1
                self._load(f"r{number}", chain)

    def _save(self, chain: list[bytes]) -> None:
        """Save chunks whose first part may be in the pool before the second is copied."""
        saving = self._mover.begin_save(Save(chain, list(range(RUN))))
        if saving is not None:
            for part in range(1, PARTS + 1):
                num_bytes = part * self._page_bytes // PARTS
                for page, slot in zip(self._pages, saving.slots, strict=False):
                    self._slot(slot)[:num_bytes] = page[:num_bytes]
                self._mover.give(saving, num_bytes)

    def _load(self, name: str, chain: list[bytes]) -> None:
        self._pages = [b""] * RUN
        self._mover.load(Load(name, chain, list(range(RUN)), 0), time.monotonic())
        aborted: Collection[str] = [name] if self._chance.random() < 0.1 else []
        missing: set[int] = set()
        while self._mover.num_loads:
            self._mover.wait(0.02)
            ended = self._mover.collect(aborted, time.monotonic(), self._write)
            self.unasked |= ended.request_ids - {name}
            missing |= ended.missing
        for at, key in enumerate(chain):
            if at not in missing:
                self.num_loaded += 1
                if self._pages[at] != content(key, self._page_bytes):
                    self.wrong.append(key)

    def _slot(self, number: int) -> memoryview:
        begin = number * self._staging.slot_bytes
        return self._staging.memory[begin : begin + self._page_bytes]

    def _write(self, block_ids: Sequence[int], slots: Sequence[int], num_skipped: int) -> None:
        assert not num_skipped
        for block_id, slot in zip(block_ids, slots, strict=True):
            self._pages[block_id] = bytes(self._slot(slot))

    def stop(self) -> None:
        """End it. All staging memory is free afterwards."""
        self._stopped.set()
        self.join(2 * LOAD_S)
        assert not self.is_alive(), "a load hangs"
        until(lambda: self._mover.is_idle, "nothing of the connector's memory stays held")
        self._mover.close()
