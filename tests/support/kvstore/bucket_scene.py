"""A bucket as the threads of one node use it, with an arena of a few blocks."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator

from mooncake.crypto.keys import KeyRing
from mooncake.kvstore.config import ObjectStoreConfig
from mooncake.kvstore.storage.bucket import Bucket, ObjectStore
from mooncake.kvstore.storage.disk import DiskBlock
from tests.support.kvstore.disk_bench import ALIGNED, key

SIZE = ALIGNED.block_bytes
KEYS = ["ab" * 32, "cd" * 32]


class DictStore:
    """An object store in memory, which may fail."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        """The one written last comes last."""
        self.error: Exception | None = None

    def _look(self) -> None:
        if self.error is not None:
            raise self.error

    def put(self, name: str, data: bytearray) -> None:
        self._look()
        self.objects.pop(name, None)
        self.objects[name] = bytes(data)

    def get(self, name: str, out: memoryview) -> int | None:
        self._look()
        data = self.objects.get(name)
        if data is None:
            return None
        size = min(len(data), len(out))
        out[:size] = data[:size]
        return size

    def delete(self, name: str) -> None:
        self._look()
        self.objects.pop(name, None)

    def listed(self, prefix: str) -> Iterator[tuple[str, float]]:
        written_s = {name: float(number) for number, name in enumerate(self.objects)}
        for name in sorted(self.objects):
            self._look()
            if name.startswith(prefix):
                yield name, written_s[name]


class BucketScene:
    """One node's bucket over a store."""

    def __init__(
        self, store: ObjectStore, keys: str = "", prefix: str = "here", num_blocks: int = 100
    ) -> None:
        config = ObjectStoreConfig(bucket="b", num_bytes=num_blocks * SIZE, prefix=prefix)
        self.memory = memoryview(mmap.mmap(-1, 4 * SIZE))
        ring = KeyRing.parse(keys, "keys") if keys else None
        self.bucket = Bucket(config, ALIGNED, store, ring)
        self.bucket.attach(self.memory)

    def fill(self, place: int) -> bytes:
        data = random.Random(place).randbytes(SIZE)
        self.data(place)[:] = data
        return data

    def data(self, place: int) -> memoryview:
        return self.memory[place * SIZE : (place + 1) * SIZE]

    def block(self, number: int, place: int, tenant: str = "alice") -> DiskBlock:
        return DiskBlock(key(number), 0, place * SIZE, tenant)

    def found(self) -> dict[bytes, str]:
        """Return the tenant of each block that a listing shows."""
        events = list(self.bucket.scan(0))
        assert not any(event.failed for event in events)
        assert [event.more for event in events] == [True] * (len(events) - 1) + [False]
        return {one.key: one.tenant for event in events for one in event.found}
