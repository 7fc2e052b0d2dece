"""The cluster's KVCache pool: the Conductor's index of blocks, and the kvstore role.

Names are imported when they are first used: a gateway needs the index and the settings, no node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.base.lazy_names import lazily

if TYPE_CHECKING:
    from mooncake.kvstore.config import KvStoreConfig
    from mooncake.kvstore.index.prefix_index import PrefixIndex, Replica
    from mooncake.kvstore.node.node import KvNode

__all__ = ["KvNode", "KvStoreConfig", "PrefixIndex", "Replica"]

__getattr__ = lazily(
    __name__,
    {
        "config": "KvStoreConfig",
        "index.prefix_index": "PrefixIndex Replica",
        "node.node": "KvNode",
    },
)
