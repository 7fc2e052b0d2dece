"""Invariants of a simulated cluster: checked after each event and at the end.

Each check raises AssertionError naming the violation. Reads only.
"""

from __future__ import annotations

from mooncake.base import FinishReason
from mooncake.base.machine import Machine
from mooncake.base.messages import Tier
from mooncake.decode.worker import DecodeWorker
from mooncake.kvstore.node.node import KvNode
from mooncake.prefill.worker import PrefillWorker
from mooncake.sim.world.network import Endpoint
from mooncake.sim.world.runner import sampled_token
from mooncake.sim.world.world import Stream, World
from mooncake.transfer.engine import TransferBatch

SETTLED_S = 5.0
"""This many seconds after the last fault, gateways have heard again what they missed."""

WELL = (FinishReason.STOP, FinishReason.LENGTH)


def check_machine(machine: Machine) -> None:
    """Check after an event that the machine lost nothing, holds nothing twice and keeps
    its bounds.
    """
    machine.check_integrity()


def check_write(world: World, receiver: Endpoint, batch: TransferBatch) -> None:
    """Check, as a WRITE lands, that its receiver still keeps that memory for it, however late it
    is. The receiver's own records decide, not the code that refuses writes.
    """
    [machine] = [
        worker.machine
        for worker in world.workers.values()
        if worker.address == receiver.address and worker.machine is not None
    ]
    layout = world.config.layout
    ops = [op for op in batch.ops if receiver.holds(op)]  # all other writes are refused
    if isinstance(machine, KvNode):
        kept = machine.may_be_written(batch.grant)
        places = [op.remote_offset - op.remote_offset % layout.block_bytes for op in ops]
    else:
        kept = machine.instance.reservations.may_be_written(batch.grant)
        num_pages = machine.instance.engine.config.num_blocks
        places = [op.remote_offset // layout.slice_bytes % num_pages for op in ops]
    used = sorted(set(places) - kept)
    assert not used, f"{receiver.address}: written late by grant {batch.grant}, in use: {used}"


def check_stream(stream: Stream, num_checked: int = 0) -> None:
    """Check, at any time, for at most one final event and for the tokens of a run without faults.

    `num_checked` tokens have been compared before.
    """
    request = stream.request
    name = request.request_id
    assert len(stream.finals) <= 1, f"{name}: {len(stream.finals)} final events"
    assert len(stream.tokens) <= request.sampling.max_tokens, f"{name}: too many tokens"
    for position in range(num_checked, len(stream.tokens)):
        token, expected = stream.tokens[position], sampled_token(request.sampling, position)
        assert token == expected, f"{name}: token {position} is {token}, not {expected}"


def check_ended(stream: Stream) -> None:
    """Check, at the end, for exactly one final event that agrees with the tokens before it."""
    name = stream.request.request_id
    assert len(stream.finals) == 1, f"{name}: no final event"
    final = stream.finals[0]
    if final.reason in WELL:
        num_wanted = stream.request.sampling.max_tokens
        assert len(stream.tokens) == num_wanted, (
            f"{name}: {len(stream.tokens)} of {num_wanted} tokens came"
        )
        assert final.num_output_tokens == num_wanted, f"{name}: counted otherwise"
    elif final.reason is not FinishReason.ABORT:
        assert final.failure is not None, f"{name}: {final.reason.value} without a reason"
        assert final.failure.status in (429, 503), f"{name}: {final.failure.message}"


def is_quiet(world: World) -> bool:
    """Whether no machine has work left."""
    return all(host.gateway.idle for host in world.gateway_hosts.values()) and not _busy(world)


def _busy(world: World) -> list[str]:
    """Return the `busy` reports of workers that still hold part of a request."""
    found: list[str] = []
    for worker_id, worker in world.workers.items():
        machine = worker.machine
        if isinstance(machine, PrefillWorker | DecodeWorker) and not machine.quiet:
            found.append(f"{worker_id} still has something to do")
        elif isinstance(machine, KvNode) and machine.num_open:
            found.append(f"{worker_id} has {machine.num_open} leases open")
    return found


def check_quiet(world: World) -> None:
    """Check, at the end, that no machine holds part of a request and that no lease is left."""
    for gateway_id, host in world.gateway_hosts.items():
        assert host.gateway.idle, f"{gateway_id} still has requests"
    busy = _busy(world)
    assert not busy, "; ".join(busy)
    for _, machine in world.machines():
        machine.check_integrity()
    for worker_id, worker in world.workers.items():
        together = {each.process is None for each in world.sharing_experts(worker.spec)}
        assert len(together) == 1, f"{worker_id} lives, or is dead, without its expert group"
        ranked = world.ranked(worker_id)
        living = ranked.num_living if ranked is not None else 0
        assert ranked is None or living == ranked.num_ranks, f"{worker_id} has {living} ranks"


def check_index(world: World) -> None:
    """Check, at the end, `SETTLED_S` after the last message, that each Conductor's index equals the
    blocks that the pool nodes hold.
    """
    for name, gateway_host in world.gateway_hosts.items():
        for view in gateway_host.conductor.views:
            machine = world.workers[view.worker_id].machine
            if not isinstance(machine, KvNode) or view.draining:
                continue
            state, where = machine.state(), f"{name} about {view.worker_id}"
            assert state.store == view.worker, f"{where}: another boot of it lives"
            in_dram = gateway_host.conductor.held_by(view.worker_id, Tier.DRAM)
            gone = [key for key in in_dram if not machine.stores(key)]
            assert not gone, f"{where}: {len(gone)} blocks believed to be there are not"
            missing = state.load.num_cached_blocks - len(in_dram)
            assert not missing, f"{where}: {missing} blocks are there that it does not know of"
            on_ssd = len(gateway_host.conductor.held_by(view.worker_id, Tier.SSD))
            assert on_ssd == state.num_ssd_stored, f"{where}: {on_ssd} blocks believed on SSD"
            known = len(gateway_host.conductor.held_by(view.worker_id, Tier.OBJECT))
            assert known == state.num_objects_known, f"{where}: {known} believed in the bucket"
