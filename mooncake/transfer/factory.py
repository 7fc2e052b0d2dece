"""Builds a transfer engine from its protocols and threads; this is the only module that knows them
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mooncake.base.clock import Clock
from mooncake.base.errors import ConfigError
from mooncake.base.ids import SystemIds
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Credential, own_credential
from mooncake.transfer.choices import PROTOCOLS, check_protection, usable_protocols
from mooncake.transfer.local import MAX_HANDS, CopyPool, InprocBackend, InprocFabric
from mooncake.transfer.net.endpoint import Protection
from mooncake.transfer.net.handshake import Credentials
from mooncake.transfer.net.io_loop import IoLoop
from mooncake.transfer.rdma.backend import open_rdma
from mooncake.transfer.rdma.settings import RdmaSettings
from mooncake.transfer.regions import Progress, RegionTable, no_progress
from mooncake.transfer.router import RoutedTransfer
from mooncake.transfer.shm.backend import ShmBackend
from mooncake.transfer.staging.engine import StagingEngine
from mooncake.transfer.staging.slots import StagingLimits
from mooncake.transfer.tcp.backend import TcpBackend, TcpSettings


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """The configuration of one process's transfer engine."""

    secret: str = field(repr=False)
    """The cluster secret, or the text of a credential; peers that have neither are refused."""
    roles: Sequence[CredentialRole] = (CredentialRole.WORKER,)
    """The roles in which this process acts; with the secret, all of them."""
    host: str
    """Name of this machine; peers with an equal one may use shared memory."""
    shm_directory: str = ""
    """Directory in which those peers find each other, if they are not in one network."""
    protocols: Sequence[str] = field(default_factory=usable_protocols)
    protection: Protection | None = None
    """The least protection of what passes over sockets; peers may want more. None: peers'
    connections to us carry MACs unless we listen on the loopback only, and peers decide about our
    connections to them.
    """
    num_io_threads: int = 2
    """Threads that serve all sockets."""
    num_copy_threads: int = 2
    """Threads that copy memory to memory; 0 = copies are done inside `poll` (tests)."""
    tcp: TcpSettings = field(default_factory=TcpSettings)
    rdma: RdmaSettings = field(default_factory=RdmaSettings)
    staging: StagingLimits = field(default_factory=StagingLimits)


def open_transfer(
    config: TransferConfig,
    engine_id: str,
    clock: Clock,
    *,
    credential: Credential | None = None,
    fabric: InprocFabric | None = None,
    progress: Progress = no_progress,
) -> RoutedTransfer:
    """Return a transfer engine ready for peers, listening where its protocols ask for it.

    `engine_id` must be new at every start. `credential` is that of the process and may be renewed;
    without it one is made of the secret. Engines of one process see each other's memory when they
    share `fabric`. `progress` hears how far registration has come.

    Raises:
        ConfigError: a protocol is unknown, or an address unusable.
    """
    _check(config)
    ids = SystemIds()
    fabric = fabric or InprocFabric()
    table = RegionTable(fabric.gates, progress)
    router = RoutedTransfer(engine_id, config.host, table, clock)
    listen = config.tcp.listen
    usual = Protection.NONE if listen.is_loopback else Protection.MAC
    credentials = Credentials(
        engine_id=engine_id,
        credential=credential or own_credential(config.secret, *config.roles, ids=ids),
        ids=ids,
        protection=config.protection or usual,
        least=config.protection or Protection.NONE,
    )
    router.add_staging_engine(StagingEngine(credentials, table, router, config.staging, listen))
    loops: list[IoLoop] = []
    if {"shm", "rdma", "tcp"} & set(config.protocols):
        loops = [
            IoLoop(fabric.gates, f"transfer-io-{index}") for index in range(config.num_io_threads)
        ]
        router.use_loops(loops)
        for loop in loops:
            router.add_closer(loop.close)
    try:
        if {"inproc", "shm"} & set(config.protocols):
            pool = CopyPool(fabric.gates, config.num_copy_threads, "transfer-copy")
            router.add_closer(pool.close)
            if not config.num_copy_threads:
                router.add_pump(pool.pump)
            if "inproc" in config.protocols:
                router.add_backend(InprocBackend(engine_id, fabric, table, pool, router))
            if "shm" in config.protocols:
                place = config.host, config.shm_directory
                router.add_backend(ShmBackend(credentials, table, pool, loops[0], router, *place))
        if "rdma" in config.protocols:
            loop = IoLoop(fabric.gates, "transfer-rdma")
            router.add_closer(loop.close)
            router.add_backend(open_rdma(credentials, table, loop, router, config.rdma, listen))
        if "tcp" in config.protocols:
            router.add_asking_backend(TcpBackend(credentials, table, loops, router, config.tcp))
    except ConfigError:
        router.close()
        raise
    if loops:
        loops[0].post(lambda: credentials.standing.keep_looking(loops[0], credentials.connect))
    return router


def _check(config: TransferConfig) -> None:
    unknown = [name for name in config.protocols if name not in PROTOCOLS]
    if unknown or not config.protocols:
        raise ConfigError(
            f"transport: {', '.join(unknown) or 'the empty list'} is not known; choose from "
            f"{', '.join(PROTOCOLS)}"
        )
    if not config.secret:
        raise ConfigError("the cluster secret is empty; set one, the same for all workers")
    check_protection(config.protection, config.protocols)
    if config.num_io_threads < 1 or config.num_copy_threads < 0:
        raise ConfigError("the transfer engine needs at least one I/O thread")
    if config.num_copy_threads >= MAX_HANDS:
        raise ConfigError(f"the transfer engine may have at most {MAX_HANDS - 1} threads that copy")
