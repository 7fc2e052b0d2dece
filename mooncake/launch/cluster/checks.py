"""Checks that run before anything is started. `serve` and `--dry-run` both refuse by them."""

from __future__ import annotations

from mooncake.base import ConfigError, Role
from mooncake.base.tls_files import TlsFiles
from mooncake.launch.cluster.workers import check_transport, cluster_workers
from mooncake.launch.config.plan import ServePlan, check_memory
from mooncake.launch.config.settings import ServeConfig
from mooncake.launch.host import environment, machine_facts
from mooncake.launch.host.processes.start_phases import importing
from mooncake.launch.pool_node.disks import check_disks


def check_ray(config: ServeConfig) -> None:
    """Check the Ray that `--ray-address` names.

    Raises:
        ConfigError: it is another machine's, without TLS, and no setting allows that; or a file for
            TLS is wrong.
    """
    if config.ray_address is None:
        return
    environ, host = environment.variables(), config.ray_address.rpartition(":")[0]
    environment.check_ray_tls(host, environ, without_tls=config.ray_without_tls)
    if (files := environment.ray_tls(environ)) is not None:
        certfile, keyfile, ca_certs = files
        TlsFiles(certfile=certfile, keyfile=keyfile, ca_certs=ca_certs).context()


def check_start(config: ServeConfig, plan: ServePlan, *, adopts: bool = False) -> None:
    """Check memory, key file, certificates and disks. Ports are not checked: the process that is
    being replaced may still hold them. `adopts`: workers of the plan run already, and have the
    memory and the disks.

    Raises:
        ConfigError: something is missing or too small; the message names the flag.
    """
    if plan.refusal and plan.gpu_node is None:
        raise ConfigError(plan.refusal)
    if not adopts:
        check_memory(plan, machine_facts.available_bytes())
    check_ray(config)
    if config.role != "kvstore" or config.ssl_certfile or config.api_keys_file:
        _check_api_server(config)
    if config.ray_address is None and config.role != "gateway":
        check_transport(config)
    if config.ray_address is None:  # otherwise workers may run on other machines
        for worker in cluster_workers(config, plan, "", "", machine_facts.host_name()):
            for files in (worker.health.tls, worker.admin.tls if worker.admin else None):
                if files is not None:
                    files.context()
            if worker.role is Role.KVSTORE and not adopts:
                check_disks(worker.kvstore, worker.ssd_key)


def _check_api_server(config: ServeConfig) -> None:
    """Check the keys and certificates of the API server. A pool node does not need these
    imports.
    """
    with importing():
        from mooncake.launch.cluster.gateways.gateway_process import api_config, check_traces

    check_traces(config)
    if (tls := api_config(config).tls) is not None:
        tls.context()
