"""What prefill and decode workers share: an engine, its standing in the cluster, and how blocks
come and go.
"""

from mooncake.instance.config import InstanceConfig
from mooncake.instance.instance import Instance
from mooncake.instance.push import Destination, Push
from mooncake.instance.reuse import PrefixReuse

__all__ = ["Destination", "Instance", "InstanceConfig", "PrefixReuse", "Push"]
