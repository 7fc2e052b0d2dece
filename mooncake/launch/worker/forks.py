"""The fork server of workers: when one is started, and what it imports."""

from __future__ import annotations

import os

from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.fork_server import ForkServer
from mooncake.launch.host.secrets.credentials import private_dir

ENGINE = (
    "mooncake.launch.worker.process", "mooncake.launch.worker.page_hasher",
    "mooncake.model.opening", "cryptography.hazmat.backends.openssl.backend",
)  # fmt: skip
RAY = (
    "mooncake.launch.cluster.ray_machines.ray_cluster",
    "ray.util.state",  # it imports pydantic, as each actor does
)
"""Modules that import Ray, which then reads the environment that it gives each worker."""


def forks_workers(config: ServeConfig) -> bool:
    """Return whether processes of engines start here and are forked. They are not if there is a
    GPU: loading weights for a GPU takes longer than imports, and its driver must not be
    touched before a fork.
    """
    if config.colocated or config.role is not None or machine_facts.num_gpus():
        return False
    return config.stays_here and (config.prefill + config.decode) > 0


def worker_forks(config: ServeConfig) -> ForkServer:
    """Start the fork server of this process' workers, and of Ray's if it attaches to one."""
    given = environment.variables()  # without secrets: forks get the variables of their clients
    environ = {name: value for name, value in given.items() if not name.startswith("MOONCAKE_")}
    path = private_dir() / f"forks-{os.getpid()}"
    if config.ray_address is not None:
        environ = environment.with_ray(environ, here_only=config.stays_here)
    environ = {**environment.QUIET, **environment.ONE_THREAD, **environ, **environment.COMPUTE}
    late = () if config.ray_address is None else RAY
    return ForkServer(path, ENGINE, late, environ, environment.COMPUTE)
