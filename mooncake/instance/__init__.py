"""Holds what prefill and decode workers share: an engine, its membership in the cluster, and its
fetches, pushes and puts of blocks.
"""

from mooncake.instance.config import InstanceConfig
from mooncake.instance.instance import Instance
from mooncake.instance.push import Destination, Push
from mooncake.instance.reuse import PrefixReuse

__all__ = ["Destination", "Instance", "InstanceConfig", "PrefixReuse", "Push"]
