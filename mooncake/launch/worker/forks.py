"""The fork server of workers: when there is one, and what it imports."""

from __future__ import annotations

import os

from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.credentials import private_dir
from mooncake.launch.host.fork_server import ForkServer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""What Ray sets in processes that ask for no CPU, unless the user has set it: torch reads it when
it is imported. Engines set their own number.
"""
EARLY = (
    "mooncake.launch.worker.process", "mooncake.launch.worker.page_hasher",
    "mooncake.model.opening",
)  # fmt: skip
LATE = ("mooncake.launch.cluster.ray_cluster",)
"""They import Ray, which reads the environment that it gives each worker as it is imported."""


def forks_workers(config: ServeConfig) -> bool:
    """Whether engines start here as processes of Ray. Not where there is a GPU: weights for one
    take longer than imports, and its driver must not be touched before a fork.
    """
    if config.colocated or machine_facts.num_gpus():
        return False
    if config.role is not None:
        return config.joins_by_ray and config.role in ("prefill", "decode")
    return environment.is_loopback(config.bind_host) and (config.prefill + config.decode) > 0


def worker_forks() -> ForkServer:
    """Start the fork server of this process' workers."""
    environ = {
        **ONE_THREAD, **environment.variables(), **environment.QUIET, **environment.COMPUTE,
    }  # fmt: skip
    path = private_dir() / f"forks-{os.getpid()}"
    return ForkServer(path, EARLY, LATE, environ)
