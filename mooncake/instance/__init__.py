"""Holds what prefill and decode workers share: an engine, its membership in the cluster, and its
fetches, pushes and puts of blocks.

Names are imported when they are first used: a gateway needs the settings alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake.base.lazy_names import lazily

if TYPE_CHECKING:
    from mooncake.instance.config import InstanceConfig
    from mooncake.instance.instance import Instance
    from mooncake.instance.push import Destination, Push
    from mooncake.instance.role import RoleWorker

__all__ = ["Destination", "Instance", "InstanceConfig", "Push", "RoleWorker"]

__getattr__ = lazily(
    __name__,
    {
        "config": "InstanceConfig",
        "instance": "Instance",
        "push": "Destination Push",
        "role": "RoleWorker",
    },
)
