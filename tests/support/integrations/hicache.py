"""A stand-in of SGLang's HiCache, made from the documentation of its contract: the base class of
storage backends, host memory in the layouts that HiCache has, the loading of a backend by its
module and class, and a controller that saves and loads pages in batches. SGLang itself is not
installed here.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

BATCH_PAGES = 128
"""Pages that HiCache hands to a backend at a time."""
BACKEND = {
    "backend_name": "mooncake", "module_path": "mooncake.integrations.sglang.backend",
    "class_name": "MooncakeHiCache", "interface_v1": 1,
}  # fmt: skip


class HiCacheStorage(ABC):
    """The contract: what a backend has to have, and what it may leave out."""

    mem_pool_host: Any
    registered_pools: dict[str, Any]

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {
            **getattr(self, "registered_pools", {}), host_pool_name: host_pool
        }  # fmt: skip

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        raise NotImplementedError

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        raise NotImplementedError

    @abstractmethod
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any: ...

    @abstractmethod
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any: ...

    @abstractmethod
    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool: ...

    @abstractmethod
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool: ...  # fmt: skip

    @abstractmethod
    def exists(self, key: str) -> bool: ...

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return next((n for n, key in enumerate(keys) if not self.exists(key)), len(keys))

    def clear(self) -> None:
        return None

    def get_stats(self) -> Any:
        return None


@dataclass
class StorageConfig:
    """What HiCache tells a backend about its rank and its model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = None
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    extra_config: dict[str, Any] | None = None


@dataclass
class HostMemory:
    """Host memory of HiCache: pages of keys and values, or of MLA's latent, in one of its
    layouts.
    """

    layout: str = "page_first"
    is_mla: bool = False
    page_size: int = 4
    num_pages: int = 16
    layer_num: int = 3
    head_num: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.bfloat16
    kv_buffer: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        tokens = self.num_pages * self.page_size
        heads = (
            (1, self.head_num * self.head_dim) if self.is_mla else (self.head_num, self.head_dim)
        )
        shape = {
            "page_first": (tokens, self.layer_num),
            "page_first_direct": (self.num_pages, self.layer_num, self.page_size),
            "layer_first": (self.layer_num, tokens),
        }[self.layout]
        self.kv_buffer = torch.zeros((self._halves, *shape, *heads), dtype=self.dtype)

    @property
    def _halves(self) -> int:
        return 1 if self.is_mla else 2

    def get_size_per_token(self) -> int:
        width = self.head_num * self.head_dim * self.dtype.itemsize
        return self._halves * self.layer_num * width

    def page(self, number: int) -> torch.Tensor:
        """A view of a page, in an order that does not depend on the layout: half, layer, token."""
        first = number * self.page_size
        buffer = self.kv_buffer
        if self.layout == "page_first":
            return buffer[:, first : first + self.page_size].transpose(1, 2)
        if self.layout == "page_first_direct":
            return buffer[:, number]
        return buffer[:, :, first : first + self.page_size]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        addresses, sizes = [], []
        for first in indices.tolist()[:: self.page_size]:
            view = self.page(first // self.page_size)
            for half in view:
                pieces = list(half) if self.layout == "layer_first" else [half]
                for piece in pieces:
                    addresses.append(piece.data_ptr())
                    sizes.append(piece.numel() * piece.element_size())
        return addresses, sizes

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        page = self.page(int(index) // self.page_size).contiguous()
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0)).contiguous().flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        view = self.page(int(index) // self.page_size)
        view.copy_(data_page.reshape(view.shape))

    def indices_of(self, pages: Sequence[int]) -> torch.Tensor:
        """The places of all tokens of pages."""
        size = self.page_size
        return torch.tensor([page * size + n for page in pages for n in range(size)])

    def fill(self, number: int, seed: int) -> None:
        """Write a page's content, which depends on nothing but the seed."""
        view = self.page(number)
        drawn = torch.randn(view.shape, generator=torch.Generator().manual_seed(seed))
        view.copy_(drawn.to(self.dtype))


@contextmanager
def stand_in(version: str = "0.5.9") -> Iterator[None]:
    """Within, `sglang` is this stand-in, for a backend that is loaded anew."""
    modules = {}
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        modules[name] = ModuleType(name)
        modules[name].__path__ = []
    modules["sglang"].__version__ = version  # type: ignore[attr-defined]
    storage = modules["sglang.srt.mem_cache.hicache_storage"] = ModuleType("hicache_storage")
    storage.HiCacheStorage = HiCacheStorage  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in (*modules, BACKEND["module_path"])}
    sys.modules.update(modules)
    sys.modules.pop(str(BACKEND["module_path"]), None)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(str(name), None)
            else:
                sys.modules[str(name)] = module


def load_backend(config: StorageConfig) -> Any:
    """Load a backend by its module and class, as `--hicache-storage-backend dynamic` does."""
    extra = config.extra_config
    assert extra is not None
    module = importlib.import_module(extra["module_path"])
    kind = getattr(module, extra["class_name"])
    assert issubclass(kind, HiCacheStorage)
    return kind(config, {})


class Controller:
    """Saves and loads pages as HiCache's threads do."""

    def __init__(self, config: StorageConfig, memory: HostMemory) -> None:
        self.backend = load_backend(config)
        self.backend.register_mem_pool_host(memory)
        self.memory = memory
        self._copies = not (config.extra_config or {}).get("interface_v1")

    def backup(self, hashes: Sequence[str], pages: Sequence[int]) -> int:
        """Save pages; return how many, batch by batch, up to the first batch that fails."""
        done = 0
        for keys, indices in self._batches(hashes, pages):
            if self._copies:
                firsts = indices[:: self.memory.page_size]
                data = [self.memory.get_data_page(first) for first in firsts]
                saved = self.backend.batch_set(keys, data)
            else:
                saved = all(self.backend.batch_set_v1(keys, indices, None))
            if not saved:
                break
            done += len(keys)
        return done

    def prefetch(self, hashes: Sequence[str], pages: Sequence[int]) -> int:
        """Load what the backend says that it has; return how many pages came."""
        found = self.backend.batch_exists(list(hashes), None)
        done = 0
        for keys, indices in self._batches(hashes[:found], pages[:found]):
            count = self._get(keys, indices)
            done += count
            if count < len(keys):
                break
        return done

    def _get(self, keys: list[str], indices: torch.Tensor) -> int:
        if not self._copies:
            came = self.backend.batch_get_v1(keys, indices, None)
            return next((n for n, each in enumerate(came) if not each), len(came))
        targets = [self.memory.get_dummy_flat_data_page() for _ in keys]
        data = self.backend.batch_get(keys, targets)
        for number, page in enumerate(data):
            if page is None:
                return number
            self.memory.set_from_flat_data_page(int(indices[number * self.memory.page_size]), page)
        return len(keys)

    def _batches(
        self, hashes: Sequence[str], pages: Sequence[int]
    ) -> Iterator[tuple[list[str], torch.Tensor]]:
        for start in range(0, len(hashes), BATCH_PAGES):
            part = slice(start, start + BATCH_PAGES)
            yield list(hashes[part]), self.memory.indices_of(pages[part])
