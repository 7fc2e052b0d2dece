"""A stand-in of LMCache, made from the interface that it publishes for remote storage plugins: the
base classes of connectors and of what makes them, memory that is allocated and counted, keys, and
the way in which its remote backend calls a connector. LMCache itself is not installed here.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from types import ModuleType
from typing import Any

import torch

MODULE = "mooncake.integrations.lmcache.connector"
PLUGIN = {
    "remote_storage_plugin.mooncake_pool.module_path": MODULE,
    "remote_storage_plugin.mooncake_pool.class_name": "MooncakePoolAdapter",
}


class RemoteConnector(ABC):
    """The contract: what a connector has to have, and what it may leave out."""

    def __init__(self, config: Config, metadata: Metadata) -> None:
        self.meta_shapes = [torch.Size(metadata.shape)]
        self.meta_dtypes = [metadata.dtype]
        self.meta_fmt = "KV_2LTD"
        self.full_chunk_size_bytes = prod(metadata.shape) * metadata.dtype.itemsize

    @abstractmethod
    async def exists(self, key: Key) -> bool: ...

    @abstractmethod
    def exists_sync(self, key: Key) -> bool: ...

    @abstractmethod
    async def get(self, key: Key) -> Chunk | None: ...

    @abstractmethod
    async def put(self, key: Key, memory_obj: Chunk) -> None: ...

    @abstractmethod
    async def list(self) -> list[str]: ...

    @abstractmethod
    async def close(self) -> None: ...

    def support_batched_get(self) -> bool:
        return False

    def support_batched_put(self) -> bool:
        return False

    def support_batched_contains(self) -> bool:
        return False

    def support_batched_async_contains(self) -> bool:
        return True

    def support_batched_get_non_blocking(self) -> bool:
        return True


class ConnectorAdapter(ABC):
    def __init__(self, schema: str = "") -> None:
        self.schema = schema

    def can_parse(self, url: str) -> bool:
        return self.schema != "" and url.startswith(self.schema)

    @abstractmethod
    def create_connector(self, context: Context) -> RemoteConnector: ...


@dataclass(frozen=True)
class Key:
    model_name: str
    worker_id: int
    chunk_hash: int
    world_size: int = 1

    def to_string(self) -> str:
        return f"{self.model_name}@{self.world_size}@{self.worker_id}@{self.chunk_hash:x}@bfloat16"


class Chunk:
    """Memory of one chunk, which is free again when nobody counts on it."""

    def __init__(self, memory: Memory, data: torch.Tensor) -> None:
        self.data, self.count, self._memory = data, 1, memory

    @property
    def data_ptr(self) -> int:
        return self.data.data_ptr()

    def get_size(self) -> int:
        return self.data.numel() * self.data.element_size()

    def ref_count_up(self) -> None:
        self.count += 1

    def ref_count_down(self) -> None:
        assert self.count > 0, "it is free already"
        self.count -= 1
        self._memory.num_taken -= self.count == 0


@dataclass
class Memory:
    """LMCache's host memory, of so many chunks."""

    num_chunks: int = 64
    num_taken: int = 0

    def allocate(
        self, shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], fmt: str
    ) -> Chunk | None:
        assert fmt == "KV_2LTD"
        if self.num_taken == self.num_chunks:
            return None
        self.num_taken += 1
        return Chunk(self, torch.zeros(shapes[0], dtype=dtypes[0]))


@dataclass(frozen=True)
class Config:
    extra_config: dict[str, Any] | None
    remote_storage_plugins: tuple[str, ...] = ("mooncake_pool",)
    remote_serde: str | None = "naive"
    use_layerwise: bool = False


@dataclass(frozen=True)
class Metadata:
    model_name: str = "org/model"
    worker_id: int = 0
    shape: tuple[int, ...] = (2, 3, 16, 8)
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Context:
    url: str
    loop: asyncio.AbstractEventLoop
    local_cpu_backend: Memory
    config: Config
    metadata: Metadata


@dataclass
class Backend:
    """Calls a connector as LMCache's remote backend does: from threads that wait for its loop."""

    config: Config
    metadata: Metadata = field(default_factory=Metadata)
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        try:
            self.connector: Any = self._connect()
        except BaseException:
            self._end()
            raise

    def _connect(self) -> RemoteConnector:
        [name], extra = self.config.remote_storage_plugins, self.config.extra_config or {}
        place = f"remote_storage_plugin.{name}"
        module = importlib.import_module(extra[f"{place}.module_path"])
        adapter = getattr(module, extra[f"{place}.class_name"])()
        assert isinstance(adapter, ConnectorAdapter)
        url = f"plugin://{name}"
        assert adapter.can_parse(url)
        return adapter.create_connector(
            Context(url, self.loop, self.memory, self.config, self.metadata)
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120.0)

    def key(self, number: int) -> Key:
        return Key(self.metadata.model_name, self.metadata.worker_id, number)

    def chunk(self, number: int, num_tokens: int | None = None) -> Chunk:
        """Return new memory with contents that no other number has."""
        shape = self.metadata.shape
        found = self.memory.allocate([torch.Size(shape)], [self.metadata.dtype], "KV_2LTD")
        assert found is not None
        found.data.copy_((torch.arange(prod(shape)) % 97 + number).view(shape))
        if num_tokens is not None:
            found.data = found.data[:, :, :num_tokens].contiguous()
        return found

    def save(self, numbers: Sequence[int], num_tokens: int | None = None) -> None:
        """Save new chunks of these numbers, and let them go."""
        chunks = [self.chunk(number, num_tokens) for number in numbers]
        keys = [self.key(number) for number in numbers]
        assert self.connector.support_batched_put()
        self.run(self.connector.batched_put(keys, chunks))
        for chunk in chunks:
            chunk.ref_count_down()

    def load(self, numbers: Sequence[int]) -> int:
        """Load chunks, compare them, let them go. Return how many came."""
        assert self.connector.support_batched_get()
        keys = [self.key(number) for number in numbers]
        found = self.run(self.connector.batched_get(keys))
        assert len(found) == len(keys)
        come = [each for each in found if each is not None]
        assert found[: len(come)] == come, "leading ones"
        for number, chunk in zip(numbers, come, strict=False):
            expected = self.chunk(number)
            assert torch.equal(chunk.data, expected.data)
            for each in (chunk, expected):
                each.ref_count_down()
        return len(come)

    def close(self) -> None:
        self.run(self.connector.close())
        self._end()

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


NAME = "lmcache.v1.storage_backend.connector"


@contextmanager
def stand_in() -> Iterator[None]:
    """Let `import lmcache` find this stand-in, and the connector be imported anew."""
    parts = NAME.split(".")
    names = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    modules = {name: ModuleType(name) for name in [*names, f"{NAME}.base_connector"]}
    modules[NAME].ConnectorAdapter = ConnectorAdapter  # type: ignore[attr-defined]
    modules[f"{NAME}.base_connector"].RemoteConnector = RemoteConnector  # type: ignore[attr-defined]
    before = {name: sys.modules.pop(name, None) for name in [*modules, MODULE]}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
