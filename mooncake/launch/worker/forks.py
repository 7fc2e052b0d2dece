"""The fork server of workers and of Ray's helpers: when one is started, and what it imports."""

from __future__ import annotations

import os

from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.credentials import private_dir
from mooncake.launch.host.fork_server import ForkServer

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Variables that Ray sets in processes that ask for no CPU, unless the user has set them. torch
reads them when it is imported. Engines set their own number.
"""
ENGINE = (
    "mooncake.launch.worker.process", "mooncake.launch.worker.page_hasher",
    "mooncake.model.opening", "cryptography.hazmat.backends.openssl.backend",
)  # fmt: skip
RAY = (
    "mooncake.launch.cluster.ray_cluster", "ray.dashboard.agent", "ray.dashboard.dashboard",
    "ray.util.state",  # it imports pydantic, as each actor does
)  # fmt: skip
"""Modules that import Ray, which then reads the environment that it gives each worker."""
UNUSED = ("*/ray/autoscaler/*/monitor.py",)
"""Scripts of a Ray started for us that nothing needs: its autoscaler would add machines."""
FIRST_JOB = "01000000"
"""The name that a Ray started for us gives our job."""


def forks_workers(config: ServeConfig) -> bool:
    """Return whether engines start here as processes of Ray that are forked. They are not if there
    is a GPU: loading weights for a GPU takes longer than imports, and its driver must not be
    touched before a fork.
    """
    if config.colocated or config.role is not None or machine_facts.num_gpus():
        return False
    return config.stays_here and (config.prefill + config.decode) > 0


def starts_ray(config: ServeConfig) -> bool:
    """Return whether this process starts Ray, instead of attaching to one."""
    return config.role is None and config.ray_address is None


def worker_forks(config: ServeConfig) -> ForkServer:
    """Start the fork server of this process' workers, and of Ray's helpers if it starts Ray."""
    given = environment.variables()  # without secrets: forks get the variables of their clients
    environ = {name: value for name, value in given.items() if not name.startswith("MOONCAKE_")}
    environ = environment.with_ray(environ, here_only=config.stays_here)
    environ = {**ONE_THREAD, **environ, **environment.COMPUTE}
    path = private_dir() / f"forks-{os.getpid()}"
    if starts_ray(config):
        # Workers end when they find that process gone: ours, with which the raylet ends too.
        known = {"RAY_JOB_ID": FIRST_JOB, "RAY_RAYLET_PID": str(os.getpid())}
        environ |= known
        return ForkServer(path, (*RAY, *ENGINE), (), environ, environment.COMPUTE, UNUSED)
    return ForkServer(path, ENGINE, RAY, environ, environment.COMPUTE)
