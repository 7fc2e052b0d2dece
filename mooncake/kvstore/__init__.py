"""The cluster's KVCache pool: the Conductor's index of blocks, and the kvstore role."""

from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.index.prefix_index import PrefixIndex, Replica
from mooncake.kvstore.node.node import KvNode

__all__ = ["KvNode", "KvStoreConfig", "PrefixIndex", "Replica"]
