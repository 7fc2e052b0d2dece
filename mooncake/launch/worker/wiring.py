"""Builds a worker over given ports. No other module knows how the machine of a role is wired."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from mooncake.base import (
    CheckpointError,
    MonotonicClock,
    MooncakeError,
    PageArray,
    Role,
    SystemIds,
    WorkerHello,
    WorkerRef,
)
from mooncake.base.mailbox import Polled
from mooncake.base.messages import Asleep, CheckWeights
from mooncake.decode.worker import DecodeWorker
from mooncake.engine.config import EngineConfig
from mooncake.engine.engine import Engine
from mooncake.engine.plan import PolledRunner
from mooncake.instance.expert_worker import ExpertWorker
from mooncake.instance.instance import Instance, InstancePorts
from mooncake.instance.rank_pages import FollowerPages
from mooncake.instance.sleeper import Sleeper
from mooncake.kvstore.node.node import KvNode
from mooncake.launch.pool_node.disks import open_disks
from mooncake.launch.worker.kept_profile import place_of_profile, timed_or_kept
from mooncake.launch.worker.page_hasher import PageHasher
from mooncake.launch.worker.profile import profile, shapes_for
from mooncake.launch.worker.settings import WorkerSettings
from mooncake.launch.worker.weights.held_model import HeldModel, NoFiles
from mooncake.launch.worker.weights.weights_lender import WeightsLender
from mooncake.launch.worker.worker import Worker
from mooncake.prefill.worker import PrefillWorker
from mooncake.rpc.channel import PolledChannel
from mooncake.rpc.seed_addresses import SeedAddresses
from mooncake.transfer.engine import PolledTransfer, Region
from mooncake.transfer.factory import TransferConfig
from mooncake.transfer.regions import Progress, no_progress

if TYPE_CHECKING:  # a worker without a model has no torch either
    from mooncake.model.device.pages import PageMemory
    from mooncake.model.opening import ModelSource

_log = logging.getLogger(__name__)


def doze(
    settings: WorkerSettings,
    channel: PolledChannel,
    opened: contextlib.ExitStack,
    model: HeldModel,
    gateways: Sequence[str],
    *,
    health_url: str = "",
    lender: WeightsLender | None = None,
) -> Worker:
    """Return the worker of an engine that sleeps. It tells `gateways`, and frees what it does not
    keep at its level of sleep. `lender` lets others read its weights, and those that it has
    checked. What `opened` closes is the worker's from now on.
    """
    ref = WorkerRef(settings.worker_id, SystemIds().hex(8), channel.address)
    asleep = Asleep(
        worker=ref,
        role=settings.role,
        node_id=settings.node_id,
        host=settings.host,
        pid=os.getpid(),
        level=model.rest(settings.mode.sleep_level),
        mode=settings.mode,
        health_url=health_url,
    )
    seeds = opened.enter_context(SeedAddresses(settings.seeds))
    known = [*gateways, *([settings.gateway_address] if settings.gateway_address else [])]

    def check(question: CheckWeights) -> None:
        threading.Thread(target=look, args=(question,), name="check-weights", daemon=True).start()

    def look(question: CheckWeights) -> None:
        path, borrows = question.model, False
        revision = fingerprint = error = ""
        try:
            revision, fingerprint = model.check(question, settings.layout)
            if lender is not None:
                lender.offer(revision, Path(path))
        except MooncakeError as problem:
            error, borrows = problem.message, isinstance(problem, NoFiles)
        except Exception as problem:  # whatever it is, the cluster keeps its weights
            _log.exception("the weights in %s cannot be checked", path)
            error = f"{path} cannot be checked ({type(problem).__name__}); the log says why"
        worker.driver.call(
            lambda machine, _: machine.checked(revision, fingerprint, error, borrows=borrows)
        )

    interval_s = settings.instance.report_interval_s
    lend = None if lender is None else lender.ask
    machine = Sleeper(asleep, channel, known, seeds, check, interval_s, lend)
    worker = Worker(machine, ref, channel, opened, seeds=seeds)  # `look` calls it
    return worker


def build(
    settings: WorkerSettings,
    channel: PolledChannel,
    transfer: PolledTransfer,
    opened: contextlib.ExitStack,
    *,
    model: ModelSource | None = None,
    progress: Progress = no_progress,
    health_url: str = "",
    rank_transfer: TransferConfig | None = None,
    lender: WeightsLender | None = None,
) -> Worker:
    """Return the worker that `settings` describe, over the given ports. Engines need `model`.
    `health_url`: the URL of its process' health port. `rank_transfer`: the settings of the transfer
    engines of ranks that have their own memories. `lender` lets others read the weights. What
    `opened` closes is the worker's from now on, unless this raises.

    Raises:
        CheckpointError: the model cannot be loaded.
        ConfigError: a directory of the pool cannot be used.
        TransferError: there is not enough memory for the pages or the pool.
    """
    ref = WorkerRef(settings.worker_id, SystemIds().hex(8), channel.address)
    hello = _hello(settings, ref, health_url)
    seeds = opened.enter_context(SeedAddresses(settings.seeds))
    if settings.role is Role.KVSTORE:
        progress("allocating the pool", 0, 0)
        return _pool_node(settings, hello, channel, transfer, opened, seeds)
    assert model is not None, "an engine needs a model"
    if model.revision != settings.weights_revision:
        raise CheckpointError(
            f"{settings.model} holds other weights (revision {model.revision}) than those of the "
            f"cluster ({settings.weights_revision})"
        )
    model.load(lambda done, whole: progress("loading weights", done, whole))
    if settings.role is Role.EXPERTS:
        return _expert_worker(settings, hello, channel, opened, seeds, model)
    progress("allocating KV pages", 0, 0)
    layout, config = settings.layout, settings.engine
    if settings.role is Role.PREFILL:  # it samples one token of each sequence
        config = dataclasses.replace(config, speculation=None)
    config = dataclasses.replace(config, num_blocks=model.num_pages(layout, config))
    array = PageArray(layout, config.num_blocks, config.num_homes)
    own_array = settings.options.held_by(0, array)
    region, runner, pages = _pages(settings, config, own_array, transfer, model, rank_transfer)
    model.warm_up(config, lambda done, whole: progress("warming up", done, whole))
    samples = []
    if settings.self_profile:
        samples = timed_or_kept(
            shapes_for(settings.role, config),
            lambda shapes: profile(
                runner, shapes, config, MonotonicClock(),
                lambda done, whole: progress("timing a few steps", done, whole),
            ),
            place_of_profile(settings, config, model.machine),
        )  # fmt: skip
    hello = msgspec.structs.replace(
        hello,
        num_blocks=config.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_gap_s=config.max_gap_s,
        max_gap_is_target=config.max_gap_is_target,
        first_token_s=config.first_token_s,
        num_stages=config.num_stages,
        profile=samples,
    )
    hasher = PageHasher(region, own_array) if settings.instance.push_checksums else None
    engine = Engine(config, layout.fingerprint, runner)
    engine.calibrate(samples)
    instance = Instance(
        settings.instance,
        layout,
        engine,
        hello,
        InstancePorts(
            channel,
            transfer,
            region,
            settings.gateway_address,
            hasher,
            own_array,
            _followers(settings, model, array) if settings.options.own_memories else (),
            seeds,
            None if lender is None else lender.ask,
        ),
    )
    machine = PrefillWorker(instance) if settings.role is Role.PREFILL else DecodeWorker(instance)
    opened.callback(transfer.unregister, region)
    opened.callback(runner.close)
    polled: list[Polled[msgspec.Struct]] = [runner]
    if hasher is not None:
        opened.callback(hasher.close)
        polled.append(hasher)
    return Worker(
        machine, ref, channel, opened,
        transfer=transfer, polled=polled, seeds=seeds, pages=pages,
        returns=settings.expert_group is None,  # those that share its experts end with it
    )  # fmt: skip


def _hello(settings: WorkerSettings, ref: WorkerRef, health_url: str) -> WorkerHello:
    """Return how a worker introduces itself, before its pages and steps are known."""
    return WorkerHello(
        worker=ref,
        role=settings.role,
        node_id=settings.node_id,
        host=settings.host,
        pid=os.getpid(),
        layout_fingerprint=settings.layout.fingerprint,
        block_tokens=settings.layout.block_tokens,
        num_blocks=0,
        block_bytes=settings.layout.block_bytes,
        expert_group=settings.expert_group.name if settings.expert_group is not None else "",
        health_url=health_url,
        transports=settings.transfer_protocols,
        mode=settings.mode,
    )


def _pages(
    settings: WorkerSettings,
    config: EngineConfig,
    held: PageArray,
    transfer: PolledTransfer,
    model: ModelSource,
    rank_transfer: TransferConfig | None,
) -> tuple[Region, PolledRunner, PageMemory | None]:
    """Return an engine's pages, registered, and the runner over them. Pages on a device have a
    memory of their own. Followers are told `rank_transfer` if each has its own memory.
    """
    layout, threads = settings.layout, settings.options.num_threads
    of_ranks = dict[str, bytes]()
    if settings.options.own_memories:
        of_ranks["transfer"] = msgspec.msgpack.encode(rank_transfer)
    if model.owns_pages:
        pages = model.device_pages(layout, config.num_blocks)
        region: Region = transfer.register_device(pages, "kv-pages")
        return region, model.runner(layout, config, pages, threads, None, **of_ranks), pages
    region = transfer.allocate(held.num_bytes, "kv-pages")
    runner = model.runner(layout, config, region.buffer, threads, region.fd, **of_ranks)
    return region, runner, None


def _expert_worker(
    settings: WorkerSettings,
    hello: WorkerHello,
    channel: PolledChannel,
    opened: contextlib.ExitStack,
    seeds: SeedAddresses,
    model: ModelSource,
) -> Worker:
    config = dataclasses.replace(settings.engine, speculation=None)
    model.num_pages(settings.layout, config)  # it computes in the steps that others measure
    runner = model.runner(settings.layout, config, None, settings.options.num_threads)
    machine = ExpertWorker(
        hello, channel, settings.gateway_address, seeds, settings.instance.report_interval_s,
        model.is_released,
    )  # fmt: skip
    opened.callback(runner.close)
    return Worker(machine, hello.worker, channel, opened, polled=[runner], seeds=seeds)


def _pool_node(
    settings: WorkerSettings,
    hello: WorkerHello,
    channel: PolledChannel,
    transfer: PolledTransfer,
    opened: contextlib.ExitStack,
    seeds: SeedAddresses,
) -> Worker:
    disks = open_disks(settings.kvstore, settings.layout, settings.ssd_key)
    try:
        node = KvNode(
            settings.kvstore, hello, settings.layout, channel, transfer, settings.gateway_address,
            disks, seeds,
        )  # fmt: skip
    except BaseException:
        disks.close()
        raise
    opened.callback(transfer.unregister, node.region)
    opened.callback(disks.close)  # its threads read and write the memory that goes next
    return Worker(
        node, hello.worker, channel, opened, transfer=transfer, polled=[disks], seeds=seeds
    )


def _followers(
    settings: WorkerSettings, model: ModelSource, array: PageArray
) -> list[FollowerPages]:
    """Return the pages of the other ranks, each in its own memory."""
    link, verify = model.lead, settings.instance.verify_fetches
    assert link is not None, "ranks have a lead"
    found = []
    for rank, opened in enumerate(model.memories, 1):
        assert opened.segment is not None, "peers reach every rank of a worker"
        held = settings.options.held_by(rank, array)
        found.append(
            FollowerPages(rank, held, opened.segment, opened.region_id, link, verify=verify)
        )
    return found
