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


def forks_workers(config: ServeConfig) -> bool:
    """Return whether this process starts engines, and has them forked. It does not if there is a
    GPU: loading weights for a GPU takes longer than imports, and its driver must not be
    touched before a fork.
    """
    if config.colocated or config.role is not None or machine_facts.num_gpus():
        return False
    return config.ray_address is None and (config.prefill + config.decode) > 0


def worker_forks() -> ForkServer:
    """Start the fork server of this process' workers."""
    given = environment.variables()  # without secrets: forks get the variables of their clients
    environ = {name: value for name, value in given.items() if not name.startswith("MOONCAKE_")}
    environ = {**environment.QUIET, **environment.ONE_THREAD, **environ, **environment.COMPUTE}
    return ForkServer(private_dir() / f"forks-{os.getpid()}", ENGINE, environ)
