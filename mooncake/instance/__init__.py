"""Holds what prefill and decode workers share: an engine, its membership in the cluster, and its
fetches, pushes and puts of blocks.
"""

from mooncake.instance.config import InstanceConfig
from mooncake.instance.instance import Instance
from mooncake.instance.push import Destination, Push
from mooncake.instance.role import RoleWorker

__all__ = ["Destination", "Instance", "InstanceConfig", "Push", "RoleWorker"]
