"""The cluster's KVCache pool: the Conductor's index of blocks, and the kvstore role."""

from mooncake.kvstore.config import KvStoreConfig
from mooncake.kvstore.directory import Directory, Replica
from mooncake.kvstore.index import PrefixIndex
from mooncake.kvstore.node import KvNode

__all__ = ["Directory", "KvNode", "KvStoreConfig", "PrefixIndex", "Replica"]
