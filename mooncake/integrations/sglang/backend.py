"""What SGLang loads: a storage backend of HiCache whose pages lie in a Mooncake pool. Alone imports
SGLang. SGLang's threads call it: one that looks up, one that loads, one that saves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import msgspec
import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from mooncake.base import ConfigError
from mooncake.base.blocks import KEY_BYTES
from mooncake.integrations.page_pool import PagePool, Parts
from mooncake.integrations.settings import BackendSettings, weights_name

T = TypeVar("T")
logger = logging.getLogger("sglang.mooncake")


class MooncakeHiCache(HiCacheStorage):  # type: ignore[misc]
    """Keeps pages of one rank in a pool. A pool that fails is a miss."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Read the settings, and name the weights. The pool is reached when it is first needed.

        Raises:
            ConfigError: a setting is wrong, nothing identifies the weights, or this rank's pages
                cannot be shared.
        """
        del kwargs
        self._config = storage_config
        self._settings = BackendSettings.of_extra(
            storage_config.extra_config, "hicache-storage-backend-extra-config"
        )
        if getattr(storage_config, "should_split_heads", False):
            raise ConfigError(
                "tp_lcm_size: this backend does not split heads among servers of several "
                "tensor-parallel sizes; leave tp_lcm_size out"
            )
        model = self._settings.model or storage_config.model_name or ""
        self._weights = weights_name(model, self._settings.revision or None, "")
        self._lock = threading.Lock()
        self._pools: dict[str, PagePool] = {}
        self._is_stopped = False

    # ------------------------------------------------------------------ pages of host memory

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages the pool holds."""
        del extra_info
        return self._or_miss(lambda: self._looked_up.find(keys, self._page_bytes), 0)

    def exists(self, key: str) -> bool:
        """Return whether the pool holds a page."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Load pages into host memory. Return which came: leading ones."""
        del extra_info
        pages = self._places
        count = self._or_miss(lambda: self._by_place.load(keys, pages(keys, host_indices)), 0)
        return [number < count for number in range(len(keys))]

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Save pages of host memory. Return which of them the pool holds now."""
        del extra_info
        pages, missed = self._places, [False] * len(keys)
        return self._or_miss(lambda: self._by_place.save(keys, pages(keys, host_indices)), missed)

    # ------------------------------------------------------------------ pages as tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Load a page into a tensor, by default a new one. Return it, or None if the pool
        lacks it.
        """
        return self.batch_get([key], [target_location], target_sizes)[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> Any:
        """Load pages into tensors. Return these, with None for each that did not come."""
        del target_sizes
        given = list(target_locations or [None] * len(keys))

        def load() -> list[Any]:
            new = self.mem_pool_host.get_dummy_flat_data_page
            targets = [new() if each is None else each for each in given]
            count = self._flat.load(keys, [_parts_of(each) for each in targets])
            return [each if number < count else None for number, each in enumerate(targets)]

        return self._or_miss(load, [None] * len(keys))

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Save a page that lies in a tensor. Return whether the pool holds it now."""
        return self.batch_set([key], [value], target_location, target_sizes)

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:  # fmt: skip
        """Save pages that lie in tensors. Return whether the pool holds all of them now."""
        del target_locations, target_sizes
        return self._or_miss(
            lambda: all(self._flat.save(keys, [_parts_of(value) for value in values])), False
        )

    # ------------------------------------------------------------------ the rest of the contract

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Refuse memory of a second kind, such as states of Mamba layers."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != "kv":
            raise ConfigError(
                f"this backend keeps the KV of one pool, and not also {name!r}: serve this model "
                "without --hicache-storage-backend dynamic"
            )
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def clear(self) -> None:
        """Stop using the pool: its blocks belong to other servers too, and this server's weights
        may have been changed in place.
        """
        self._is_stopped = True
        logger.warning(
            "HiCache was cleared: this server does not use the pool any more; restart it with "
            "another namespace to begin anew"
        )

    def get_stats(self) -> None:
        """Return nothing: the pool has metrics of its own."""

    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.close()
            self._pools = {}

    # ------------------------------------------------------------------ what pages these are

    @property
    def _by_place(self) -> PagePool:
        return self._pool("parts")

    @property
    def _flat(self) -> PagePool:
        return self._pool("flat")

    @property
    def _looked_up(self) -> PagePool:
        """The pages in the form in which SGLang is going to load them."""
        by_place = (self._config.extra_config or {}).get("interface_v1")
        return self._by_place if by_place else self._flat

    def _pool(self, form: str) -> PagePool:
        """Return the pages in a form: as they lie in host memory, or flat. Their bytes differ."""
        with self._lock:
            if form not in self._pools:
                self._pools[form] = PagePool(self._settings, self._fingerprint(form), logger)
            return self._pools[form]

    def _fingerprint(self, form: str) -> bytes:
        """Return a name for everything that a page's bytes depend on, besides tokens."""
        config, memory = self._config, self.mem_pool_host
        ranks = {
            name: getattr(config, name, 0)
            for name in ("pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
        }
        if not config.is_mla_model:  # of MLA, all ranks of a stage hold the same
            ranks |= {"tp_rank": config.tp_rank, "tp_size": config.tp_size}
        shape = {
            name: str(getattr(memory, name, ""))
            for name in (
                "layout", "dtype", "page_size", "layer_num", "start_layer", "end_layer", "head_num",
                "head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim",
            )
        }  # fmt: skip
        kind = {
            "engine": f"sglang {getattr(sglang, '__version__', 'of no version')}",
            "weights": self._weights,
            "namespace": self._settings.namespace,
            "is_mla": bool(config.is_mla_model),
            "ranks": ranks,
            "shape": shape,
            "form": form,
            "page_bytes": self._page_bytes,
        }
        encoded = msgspec.json.encode(kind, order="sorted")
        return blake2b(encoded, digest_size=KEY_BYTES).digest()

    @property
    def _page_bytes(self) -> int:
        memory = self.mem_pool_host
        size: int = memory.get_size_per_token() * memory.page_size
        return size

    def _or_miss(self, work: Callable[[], T], missed: T) -> T:
        """Return what `work` returns, or `missed` if it fails or HiCache was cleared.

        Errors of the pool are misses already (`PagePool`). All others are caught here, because a
        thread of SGLang that an error ends is not started again.
        """
        if self._is_stopped:
            return missed
        try:
            return work()
        except Exception:
            logger.exception("the pool was used wrongly because of a bug, so pages are computed")
            return missed

    def _places(self, keys: Sequence[str], host_indices: Any) -> list[Parts]:
        """Return the parts of each page in host memory."""
        addresses, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        parts = list(zip(addresses, sizes, strict=True))
        each, rest = divmod(len(parts), len(keys) or 1)
        if rest:
            raise ValueError(f"{len(parts)} parts of memory for {len(keys)} pages")
        return [parts[number * each : (number + 1) * each] for number in range(len(keys))]


def _parts_of(tensor: Any) -> Parts:
    """Return where a tensor lies in host memory."""
    if not tensor.is_contiguous():
        raise ValueError("a page must lie in one piece")
    return [(tensor.data_ptr(), tensor.numel() * tensor.element_size())]
