"""The cluster's KVCache pool: the Conductor's index of blocks, and the kvstore role."""

from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.index.directory import Directory, Replica
from mooncake.kvstore.index.index import PrefixIndex
from mooncake.kvstore.node.node import KvNode

__all__ = ["Directory", "KvNode", "KvStoreConfig", "PrefixIndex", "Replica"]
