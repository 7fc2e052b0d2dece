"""The process of one worker: it opens sockets and the model, and is the worker through all its
lives, until it is told to leave.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake.base import CheckpointError, MonotonicClock, Role, SystemIds
from mooncake.base.messages import CheckWeights, NextLife
from mooncake.base.rights import CredentialRole
from mooncake.identity.credential import Credential, own_credential
from mooncake.launch.host import machine_facts
from mooncake.launch.host.processes.start_phases import StartPhases
from mooncake.launch.host.secrets.key_source import read_keys
from mooncake.launch.host.secrets.secret_file import SecretFollower
from mooncake.launch.worker.health_port import HealthPort
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.borrowed_weights import BorrowedWeights, Borrower
from mooncake.launch.worker.weights.held_model import HeldModel, NoFiles
from mooncake.launch.worker.weights.open_model import open_model, read_weights
from mooncake.launch.worker.weights.weights_lender import WeightsLender
from mooncake.launch.worker.wiring import build, doze
from mooncake.launch.worker.worker import Worker
from mooncake.model.checkpoint.files.checkpoint_files import has_weights
from mooncake.model.options import FROM_ENGINES
from mooncake.rpc.zmq_channel import ZmqChannel
from mooncake.transfer.choices import choose_protection
from mooncake.transfer.factory import TransferConfig, open_transfer
from mooncake.transfer.net.endpoint import ListenAddress
from mooncake.transfer.regions import Progress
from mooncake.transfer.tcp.backend import TcpSettings

if TYPE_CHECKING:  # a worker without a model has no torch either
    from mooncake.model.checkpoint.files.signature import Signature
    from mooncake.model.opening import ModelSource

_log = logging.getLogger(__name__)


def _open(
    settings: WorkerSettings,
    credential: Credential,
    model: HeldModel | None,
    progress: Progress,
    advertise_host: str | None,
    health_url: str,
    gateways: Sequence[str],
    lender: WeightsLender | None,
) -> Worker:
    """Return the worker over its own sockets. A worker that cannot be built leaves no sockets
    open. `gateways`: those that its former life knew. `lender`: that of an engine's process.
    """
    with contextlib.ExitStack() as opened:
        channel = ZmqChannel(
            settings.bind_host, credential=credential, ports=settings.bind_ports,
            advertise_host=advertise_host,
        )  # fmt: skip
        opened.callback(channel.close)
        if lender is not None:
            lender.serve(channel, settings.weights_revision, Path(settings.model))
            opened.callback(lender.leave)
        if model is not None and settings.sleeps:
            return doze(
                settings, channel, opened, model, gateways, health_url=health_url, lender=lender
            )
        source = None if model is None else model.use(settings)
        config = _transfer_config(settings, advertise_host)
        transfer = open_transfer(
            config, SystemIds().hex(8), MonotonicClock(), credential=credential,
            progress=progress,
        )  # fmt: skip
        opened.callback(transfer.close)
        return build(
            settings, channel, transfer, opened, model=source, progress=progress,
            health_url=health_url, rank_transfer=config, lender=lender,
        )  # fmt: skip


def _transfer_config(settings: WorkerSettings, advertise_host: str | None) -> TransferConfig:
    """Return the configuration of a worker's transfer engine."""
    listen = ListenAddress(settings.bind_host, advertise_host, settings.bind_ports)
    return TransferConfig(
        secret=settings.cluster_secret,
        host=machine_facts.boot_id(settings.shm_directory),
        shm_directory=settings.shm_directory,
        protocols=settings.transfer_protocols,
        protection=choose_protection(settings.transfer_protection),
        tcp=TcpSettings(listen=listen),
        rdma=settings.rdma,
    )


def run(
    settings: WorkerSettings,
    *,
    progress: Progress,
    started: Callable[[Worker], None],
    advertise_host: str | None = None,
    secret_file: Path | str | None = None,
) -> None:
    """Be the worker that `settings` describe until its driver is stopped.

    A worker that was told to come back ends, and a new one begins: with the same weights in another
    role, with others, or asleep.
    `advertise_host` is what peers connect to if `bind_host` is a wildcard. `started` is called with
    each worker before it is driven. `secret_file` is the file of the cluster secret, which is
    followed as it changes. When a machine fails, the health port stays open and says so until the
    process has ended.

    Raises:
        MooncakeError: the worker cannot start.
        Exception: its machine failed.
    """
    credential = own_credential(
        settings.cluster_secret, CredentialRole.WORKER, name=settings.worker_id
    )
    port = HealthPort(
        settings.health,
        settings.worker_id,
        settings.role,
        limit_s=settings.engine.step_timeout_s,
        own_host=advertise_host or settings.bind_host,
    )

    phases = StartPhases("opening the health port")

    def show(what: str, done: int, whole: int) -> None:
        phases.begin(what)
        port.health.starting(what, done, whole)
        progress(what, done, whole)

    def has_started(worker: Worker) -> None:
        phases.begin("ready")
        _log.info(phases.text())
        started(worker)

    model: HeldModel | None = None
    lender: WeightsLender | None = None
    following = SecretFollower(secret_file, credential.renew)
    try:
        if settings.role is not Role.KVSTORE:
            show("importing the tensor library", 0, 0)
            borrower = _borrower(settings, credential, advertise_host)
            model = HeldModel(
                _opener(settings, credential, show, borrower), _reader(settings, borrower)
            )
            lender = WeightsLender(
                settings.worker_id, _transfer_config(settings, advertise_host), credential,
                settings.options.cache_dir,
            )  # fmt: skip
            model.use(settings)
        gateways: list[str] = []
        while True:
            worker = _open(
                settings, credential, model, show, advertise_host, port.url, gateways, lender
            )
            life = _be(settings, credential, worker, has_started, port)
            gateways = worker.gateways
            del worker  # nothing of it is needed
            if life is None:  # the process ends: looking for garbage would only delay that
                break
            gc.unfreeze()
            phases = StartPhases("changing its role" if life.role else "coming back")
            settings = settings.next(life)
    finally:
        following.close()
        if lender is not None:
            lender.close()
        if model is not None:
            model.close()
        if not port.health.failed:
            port.close()


def _borrower(
    settings: WorkerSettings, credential: Credential, advertise_host: str | None
) -> Borrower | None:
    """Return what finds the weights of other engines, or None if this one reads files."""
    if settings.weights_from != FROM_ENGINES:
        return None
    gateways = dict.fromkeys([*settings.seeds, settings.gateway_address])
    key = settings.options.weights_key
    return Borrower(
        list(filter(None, gateways)), Path(settings.model),
        _transfer_config(settings, advertise_host), credential, lambda: read_keys(key),
        settings.options.cache_dir,
    )  # fmt: skip


def _opener(
    settings: WorkerSettings, credential: Credential, show: Progress, borrower: Borrower | None
) -> Callable[[str, str], ModelSource]:
    """Return how a worker opens the checkpoint in a directory, with all that shares its model."""

    def opened(path: str, revision: str) -> ModelSource:
        borrowed = None
        if borrower is not None:
            show("asking engines for weights", 0, 0)
            path = str(borrower.directory(Path(path)))
            borrowed = _borrowed(borrower, Path(path), revision)
        peers = None
        if settings.expert_group is not None:
            from mooncake.launch.worker.ranks.expert_peers import meet

            show("waiting for those that share its experts", 0, 0)
            peers = meet(settings.expert_group, credential, settings.options)
        far = None
        if settings.stage_hosts:
            from mooncake.launch.worker.ranks.far_ranks import FarStages

            far = FarStages(tuple(settings.stage_hosts), settings.bind_host, credential)
        return open_model(path, settings.dtype, settings.options, peers, far, borrowed)

    return opened


def _reader(
    settings: WorkerSettings, borrower: Borrower | None
) -> Callable[[CheckWeights], tuple[Signature, str]]:
    """Return how a worker that sleeps reads what a question names: from files of this machine, or
    else from an engine that has some.
    """

    def read(question: CheckWeights) -> tuple[Signature, str]:
        path = Path(question.model)
        if borrower is None or has_weights(path):
            return read_weights(question.model, settings.options)
        if not question.lenders:
            raise NoFiles(f"{path} has no weights, and no engine has files of them to lend")
        found = borrower.borrow(path, question.revision, question.lenders)
        if isinstance(found, str):
            raise CheckpointError(f"{path} has no weights, and no engine lends any ({found})")
        try:
            return read_weights(str(borrower.directory(path)), settings.options, found)
        finally:
            found.close()

    return read


def _borrowed(borrower: Borrower, path: Path, revision: str) -> BorrowedWeights | None:
    """Return the weights of an engine that runs, or None if no engine lends them."""
    found = borrower.borrow(path, revision)
    if isinstance(found, BorrowedWeights):
        _log.info("weights are read from %s, which serves them", found.loan.lent.lender)
        return found
    if not has_weights(path):
        raise CheckpointError(
            f"{path} has no weights, and no engine lends any ({found}): start this worker again "
            "once an engine of the cluster serves, or copy the weights there"
        )
    _log.warning("weights are read from %s: %s", path, found)
    return None


def _be(
    settings: WorkerSettings,
    credential: Credential,
    worker: Worker,
    started: Callable[[Worker], None],
    port: HealthPort,
) -> NextLife | None:
    """Drive a worker to its end; return how to come back, if it was told to."""
    # What was made so far lives as long as the worker: full collections need not walk it again.
    # Nor does this one walk what was imported before a fork: its memory would be copied.
    gc.collect()
    gc.freeze()
    try:
        if settings.admin is not None:
            worker.open_admin(settings.admin, credential, _about(settings), port)
        _log.info("health at %s", port.url)
        started(worker)
        with port.of(worker, settings.role):
            worker.driver.run()
        worker.say_goodbye(settings.gateway_address)
        return worker.next_life
    finally:
        worker.close()


def _about(settings: WorkerSettings) -> dict[str, Any]:
    """Return what a client must know about a pool node besides the secret."""
    return {
        "gateway_address": settings.gateway_address,
        "node_id": settings.node_id,
        "layout": msgspec.to_builtins(settings.layout),
        "block_bytes": settings.layout.block_bytes,
        "ssd": [msgspec.to_builtins(disk) for disk in settings.kvstore.ssd],
        "pid": os.getpid(),
    }
