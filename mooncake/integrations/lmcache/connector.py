"""What LMCache loads: a remote connector whose chunks lie in a Mooncake pool. Alone imports
LMCache. LMCache's event loop calls it; what waits for the pool runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from mooncake.base import ConfigError
from mooncake.base.blocks import KEY_BYTES
from mooncake.integrations.page_pool import PagePool, Parts
from mooncake.integrations.settings import BackendSettings, weights_name

T = TypeVar("T")
URL = "plugin://mooncake_pool"
NUM_THREADS = 3
"""One that looks up, one that loads, one that saves: others would wait for these."""
logger = logging.getLogger("lmcache.mooncake")


class MooncakePoolAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Makes the connector for LMCache's plugin `mooncake_pool`."""

    def __init__(self) -> None:
        super().__init__(URL)

    def create_connector(self, context: Any) -> MooncakePoolConnector:
        """Return the connector. Raises ConfigError for settings that are wrong, and for an LMCache
        whose chunks cannot be shared.
        """
        return MooncakePoolConnector(
            context.loop, context.local_cpu_backend, context.config, context.metadata
        )


class MooncakePoolConnector(RemoteConnector):  # type: ignore[misc]
    """Keeps whole chunks of one worker in a pool. A pool that fails is a miss."""

    def __init__(self, loop: Any, memory: Any, config: Any, metadata: Any) -> None:
        super().__init__(config, metadata)
        settings = BackendSettings.of_extra(config.extra_config, "extra_config")
        if config.use_layerwise:
            raise ConfigError("use_layerwise: this connector keeps whole chunks; leave it out")
        if config.remote_serde not in (None, "naive"):
            raise ConfigError(
                f"remote_serde: this connector keeps chunks as they are, not by "
                f"{config.remote_serde!r}; set naive"
            )
        self._loop, self._memory = loop, memory
        self._size: int = self.full_chunk_size_bytes
        self._pages = PagePool(settings, self._fingerprint(settings, metadata), logger)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "mooncake-pool")

    def _fingerprint(self, settings: BackendSettings, metadata: Any) -> bytes:
        """Return a name for everything that a chunk's bytes depend on, besides LMCache's key."""
        model = settings.model or metadata.model_name
        kind = {
            "engine": "lmcache",
            "weights": weights_name(model, settings.revision or None, ""),
            "namespace": settings.namespace,
            "shapes": str([tuple(shape) for shape in self.meta_shapes]),
            "dtypes": str(self.meta_dtypes),
            "format": str(self.meta_fmt),
        }
        encoded = msgspec.json.encode(kind, order="sorted")
        return blake2b(encoded, digest_size=KEY_BYTES).digest()

    # ------------------------------------------------------------------ looking up

    async def exists(self, key: Any) -> bool:
        """Return whether the pool holds a chunk."""
        return await self._in_thread(lambda: self.exists_sync(key), missed=False)

    def exists_sync(self, key: Any) -> bool:
        """Return whether the pool holds a chunk."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Return how many leading chunks the pool holds."""
        return self._pages.find(_names(keys), self._size)

    async def batched_async_contains(
        self, lookup_id: str, keys: Sequence[Any], pin: bool = False
    ) -> int:
        """Return how many leading chunks the pool holds. They are not pinned."""
        del lookup_id, pin
        return await self._in_thread(lambda: self.batched_contains(keys), missed=0)

    # ------------------------------------------------------------------ loading

    async def get(self, key: Any) -> Any:
        """Load a chunk into new memory of LMCache. Return it, or None if it did not come."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """Load leading chunks of a run. Return them, and None for each that did not come."""
        found = await self.batched_get_non_blocking("", keys)
        return [*found, *[None] * (len(keys) - len(found))]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """Load leading chunks of a run into new memory of LMCache, and return those that came. If
        LMCache waits no more, they are let go when they have come.
        """
        del lookup_id
        came = list[Any]()

        def load() -> list[Any]:
            came.extend(self._load(keys))
            return came

        loading = self._loop.run_in_executor(self._threads, load)
        try:
            return await self._result(loading, missed=[])
        except asyncio.CancelledError:
            loading.add_done_callback(lambda _: _let_go(came))
            raise

    def _load(self, keys: Sequence[Any]) -> list[Any]:
        taken: list[Any] = []
        count = 0
        try:
            for _ in keys:
                chunk = self._memory.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
                if chunk is None:
                    break
                taken.append(chunk)
            places = [self._place(chunk) for chunk in taken]
            count = self._pages.load(_names(keys[: len(taken)]), places)
        finally:
            _let_go(taken[count:])
        return taken[:count]

    # ------------------------------------------------------------------ saving

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Save a chunk, if it is a full one."""
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Save chunks. Those that are not full are left out. They stay until they have been read,
        also when LMCache waits no more.
        """
        pairs = zip(keys, memory_objs, strict=True)
        full = [(key, chunk) for key, chunk in pairs if chunk.get_size() == self._size]
        for _, chunk in full:
            chunk.ref_count_up()
        await self._in_thread(lambda: self._save(full), missed=None)

    def _save(self, full: Sequence[tuple[Any, Any]]) -> None:
        chunks = [chunk for _, chunk in full]
        try:
            self._pages.save(
                _names([key for key, _ in full]), [self._place(each) for each in chunks]
            )
        finally:
            _let_go(chunks)

    # ------------------------------------------------------------------ the rest of the contract

    def remove_sync(self, key: Any) -> bool:
        """Return False: blocks of the pool belong to other servers, too, and are evicted there."""
        del key
        return False

    async def list(self) -> list[str]:
        """Return nothing: the pool does not know LMCache's keys."""
        return []

    async def close(self) -> None:
        self._threads.shutdown()
        self._pages.close()

    def _place(self, chunk: Any) -> Parts:
        return [(chunk.data_ptr, self._size)]

    async def _in_thread(self, work: Callable[[], T], *, missed: T) -> T:
        """Return what `work` returns in a thread, or `missed` if it fails."""
        return await self._result(self._loop.run_in_executor(self._threads, work), missed=missed)

    async def _result(self, running: asyncio.Future[T], *, missed: T) -> T:
        """Return the result of a thread, or `missed` if it failed. It runs to its end even when
        LMCache waits no more.
        """
        try:
            return await asyncio.shield(running)
        except Exception:
            logger.exception("the pool was used wrongly because of a bug, so chunks are computed")
            return missed


def _let_go(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()


def _names(keys: Sequence[Any]) -> list[str]:
    return [key.to_string() for key in keys]
